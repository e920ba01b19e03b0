"""Choosing the target's token from its logits: processors, filters, and noise determined by (seed, position, token).

The token at absolute position `p` is `argmax_v l[v]/T + g(seed, p, v)` over the filtered tokens (noise.py): a sample of
the softmax by noise that does not depend on drafts. Does not depend on drafters or text.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit

from foredraft.contracts import Chooser, Scores, TokenIds
from foredraft.errors import NumericsError, UsageError
from foredraft.graph.tree import FloatArray
from foredraft.options import shown
from foredraft.sampling import LogitsProcessor, SamplingOptions
from foredraft.sampling.filters import filter_row, penalize
from foredraft.sampling.logits import most_probable, rows_of
from foredraft.sampling.noise import perturbed_argmax


@njit(cache=True)
def drawn(
    row: FloatArray, seed: np.uint64, position: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> int:  # fmt: skip
    """Return the token at a position after a row, float32[V], filtered as by `filter_row`; -1 for an unusable row."""
    if temperature == 0.0:  # without noise
        return most_probable(row)
    weights = filter_row(row, temperature, top_k, top_p, min_p)
    return perturbed_argmax(weights, seed, position) if len(weights) else -1


class Sampler:
    """Chooses one sequence's tokens.

    The processors are called in order, with the node's own path, once per emitted position, as in plain decoding. If
    `needs_prefix`, the methods need the `prefix`, int64[n]: prompt and emitted ids, the root last.
    """

    def __init__(self, options: SamplingOptions, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._options, self._processors = options, tuple(processors)
        self._seed = np.uint64(options.seed)
        self._filters = options.filters
        self.needs_prefix = bool(self._processors) or options.repetition_penalty != 1.0

    def chooser(self, scores: Scores, at: int, prefix: TokenIds | None = None) -> Chooser:
        """Return the chooser of the token after each row of `scores`, whose root is at position `at`."""
        tokens = None if self.needs_prefix else self._tokens_after_rows(scores)
        rows = None
        if tokens is None and not self.needs_prefix and scores.logits.device.type == "cpu":
            rows = rows_of(scores.logits)

        def choose(row: int, path: Sequence[int]) -> int:
            position = at + len(path) + 1
            if tokens is not None:
                token = tokens[row]
            else:
                scored = self._row(scores.logits[row], prefix, path) if rows is None else rows[row]
                token = drawn(scored, self._seed, position, *self._filters)
            if token < 0:
                raise NumericsError(
                    f"No token can be chosen at position {position}: the scores are NaN or infinite, or a filter left "
                    "none. Check the model's weights and dtype, and the logits processors."
                )
            return int(token)

        return choose

    def _tokens_after_rows(self, scores: Scores) -> list[int] | None:
        """Return the tokens after all rows, found in the pass or on the device; None if rows must be read."""
        if self._options.do_sample:
            return None if scores.draw is None else scores.draw(self._options.seed, *self._filters)
        if scores.best is None:
            return None
        found: list[int] = scores.best.tolist()
        return found

    def _row(self, logits: torch.Tensor, prefix: TokenIds | None, path: Sequence[int]) -> FloatArray:
        """Return the scores of a row, float32[V] and not to be changed, after the penalty and the processors."""
        row: FloatArray = logits.detach().float().cpu().numpy()
        if prefix is None:
            return row
        row, prefix = row.copy(), np.concatenate([prefix, np.array(path, np.int64)])
        if self._options.repetition_penalty != 1.0:
            penalize(row, prefix, self._options.repetition_penalty)
        if self._processors:
            input_ids = torch.from_numpy(prefix).unsqueeze(0).to(logits.device)  # processors may hold tensors on it
            scores: Any = torch.from_numpy(row).unsqueeze(0).to(logits.device)
            for processor in self._processors:
                scores = processor(input_ids, scores)
                if not isinstance(scores, torch.Tensor) or scores.shape != (1, len(row)):
                    raise UsageError(
                        f"The logits processor {type(processor).__name__} returned {shown(scores)}; it must return the "
                        f"scores, float[1, {len(row)}]."
                    )
            row = scores[0].detach().float().cpu().numpy()
            if (forced := np.isposinf(row)).any():  # no other token is left
                row = np.where(forced, np.float32(0), np.float32(-np.inf))
        return row
