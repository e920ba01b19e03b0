"""A draft model's candidate tokens after each row, with their probabilities, in one device transfer a level.

A sampling target takes the token with the largest log-probability plus noise, and the noise is known (sampling/). The
draft model adds the same noise, so the two agree as often as their distributions allow.
Depends on logits and sampling options, not on the tree.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from foredraft.errors import NumericsError
from foredraft.graph.tree import I64, FloatArray, IntArray
from foredraft.sampling import SamplingOptions
from foredraft.sampling.logits import top_probabilities
from foredraft.sampling.noise import gumbel_noise

NOISY_TOKENS = 32  # most probable tokens that noise is added to; others rarely come out first; chosen


@dataclass(frozen=True, slots=True)
class Imitation:
    """How the target chooses tokens, as far as a draft model imitates it."""

    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    vocabulary: int | None = None  # number of ids that the target scores; None for all of the draft model's
    ids: IntArray | None = None  # int32[N], the token of each of the draft model's logits; None if they are 0, 1, ...

    @classmethod
    def of(cls, settings: Mapping[str, Any], seed: int, vocabulary: int, ids: IntArray | None = None) -> "Imitation":
        """Return the imitation for `DraftContext.settings`."""
        names = ("do_sample", "temperature")
        sampling = SamplingOptions(seed=seed, **{name: settings[name] for name in names if name in settings})
        return cls(sampling, vocabulary, ids)


class Candidates(NamedTuple):
    """Candidates after each of R rows."""

    tokens: IntArray  # int32[R, k]
    probabilities: FloatArray  # float32[R, k]


def candidates(logits: torch.Tensor, k: int, imitation: Imitation, positions: I64) -> Candidates:
    """Return `k` candidates for each row: the tokens that the target most probably takes, the most probable first.

    A token's probability is that the target takes it, estimated from this row and, when sampling, from the noise. Takes
    logits, float[R, V], or float[R, N] of `imitation.ids`, and the absolute positions of the tokens after the rows,
    int64[R]. Raises NumericsError if none can be chosen.
    """
    if imitation.ids is None:
        logits = logits[:, : imitation.vocabulary]
    sampling = imitation.sampling.do_sample
    tokens, probabilities = top_probabilities(logits, max(k, NOISY_TOKENS) if sampling else k)
    if not np.isfinite(probabilities).all():
        raise NumericsError("The draft model's scores are NaN or infinite; check its weights and dtype.")
    if imitation.ids is not None:
        tokens = imitation.ids[tokens]
    if not sampling:
        return Candidates(tokens, probabilities)
    with np.errstate(divide="ignore"):  # a probability may be 0
        scores = np.log(probabilities.astype(np.float64)) / imitation.sampling.temperature
    for row, position in enumerate(positions.tolist()):
        scores[row] += gumbel_noise(imitation.sampling.seed, position, tokens[row].astype(np.int64))
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    taken = np.take_along_axis(weights, order, axis=1).astype(np.float32)
    return Candidates(np.take_along_axis(tokens, order, axis=1), taken)
