"""A draft model's candidate tokens after each row, with their probabilities, in one device transfer a level.

Under matched verification a sampling target takes the token with the largest log-probability plus noise, and the noise
is known (sampling/). The draft model adds the same noise, so the two agree as often as their distributions allow.
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
from foredraft.sampling.filters import distribution
from foredraft.sampling.logits import top_probabilities
from foredraft.sampling.noise import gumbel_noise
from foredraft.sampling.rejection import VERIFIER_STREAM, SeededChance, draw_siblings

_FIRST_STREAM = VERIFIER_STREAM + 1  # the verifier's own stream is not shared
_MOST_ROWS, _STREAMS = 1 << 11, 1 << 31
NOISY_TOKENS = 32  # most probable tokens that noise is added to; others rarely come out first; chosen


@dataclass(frozen=True, slots=True)
class Imitation:
    """How the target chooses tokens, as far as a draft model imitates it."""

    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    draws: bool = False  # whether nodes are drawn, for rejection verification, instead of chosen
    draft: int = 0  # number of the draft in the sequence; each uses a fresh random stream
    vocabulary: int | None = None  # number of ids that the target scores; None for all of the draft model's
    ids: IntArray | None = None  # int32[N], the token of each of the draft model's logits; None if they are 0, 1, ...

    @classmethod
    def of(cls, settings: Mapping[str, Any], seed: int, vocabulary: int, ids: IntArray | None = None) -> "Imitation":
        """Return the imitation for `DraftContext.settings`."""
        names = ("do_sample", "temperature", "top_k", "top_p", "min_p")
        sampling = SamplingOptions(seed=seed, **{name: settings[name] for name in names if name in settings})
        draws = sampling.do_sample and settings.get("verification") == "rejection"
        return cls(sampling, draws, vocabulary=vocabulary, ids=ids)


class Candidates(NamedTuple):
    """Candidates after each of R rows."""

    tokens: IntArray  # int32[R, k]; -1 where filters leave fewer than k
    probabilities: FloatArray  # float32[R, k], 0 where there is no token
    q: FloatArray | None = None  # float32[R, k, V], what each token was drawn from; None if they were chosen


def candidates(logits: torch.Tensor, k: int, imitation: Imitation, positions: I64) -> Candidates:
    """Return `k` candidates for each row: its most probable tokens, the most probable first, or drawn ones.

    A chosen token's probability is that the target takes it, estimated from this row and, when sampling, from the
    noise. A drawn token's is its probability in the row. Takes logits, float[R, V], or float[R, N] of `imitation.ids`,
    and the absolute positions of the tokens after the rows, int64[R]. Raises NumericsError if none can be chosen.
    """
    if imitation.ids is None:
        logits = logits[:, : imitation.vocabulary]
    if imitation.draws:
        return _drawn(logits, k, imitation, positions)
    sampling = imitation.sampling.do_sample
    tokens, probabilities = top_probabilities(logits, max(k, NOISY_TOKENS) if sampling else k)
    if not np.isfinite(probabilities).all():
        raise NumericsError(_UNUSABLE)
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


def _drawn(logits: torch.Tensor, k: int, imitation: Imitation, positions: I64) -> Candidates:
    options, stream = imitation.sampling, _FIRST_STREAM + imitation.draft * _MOST_ROWS % _STREAMS
    rows = logits.float().cpu().numpy()
    ids, vocabulary = imitation.ids, imitation.vocabulary
    if vocabulary is not None and (ids is not None or rows.shape[1] < vocabulary):  # its other tokens are not scored
        scored, rows = rows, np.full((len(rows), vocabulary), -np.inf, np.float32)
        rows[:, slice(scored.shape[1]) if ids is None else ids] = scored
    found = np.full((len(rows), k), -1, np.int32)
    chances, q_of = np.zeros((len(rows), k), np.float32), np.zeros((len(rows), k, rows.shape[1]), np.float32)
    for row, position in enumerate(positions.tolist()):
        q = distribution(rows[row], options)
        if not len(q):
            raise NumericsError(_UNUSABLE)
        tokens, distributions = draw_siblings(q, k, SeededChance(options.seed, position, stream + row))
        found[row, : len(tokens)] = tokens
        chances[row, : len(tokens)] = q[tokens]
        q_of[row, : len(tokens)] = distributions
    return Candidates(found, chances, q_of)


_UNUSABLE = "The draft model's scores are NaN or infinite; check its weights and dtype."
