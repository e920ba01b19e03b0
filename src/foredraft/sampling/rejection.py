"""Rejection verification: a drafted token is accepted with probability min(1, p/q), else max(p - q, 0) is sampled.

`p` is the target's processed distribution after a row, `q` the distribution of the drafted token. The emitted token has
exactly the distribution p: with one candidate by Leviathan et al., "Fast inference from transformers via speculative
decoding" (2023), and Chen et al., "Accelerating large language model decoding with speculative sampling" (2023); with
several, drawn without replacement and tried in order, by recursive rejection (Miao et al., "SpecInfer", 2024; Jeon et
al., "Recursive speculative decoding", 2024). Does not depend on how p and q are computed.
"""

from collections.abc import Callable, Sequence

import numpy as np

from foredraft.contracts import Chooser, Draft
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.sampling import Probabilities
from foredraft.sampling.noise import philox

VERIFIER_STREAM = 1  # of the noise; matched verification uses stream 0, drafters any above 1


class SeededChance:
    """Randomness determined by (seed, position, stream) and the number of earlier calls.

    Philox-4x32-10 with the seed, below 2**64, as key and counter = (earlier calls, position, stream, 0); two output
    words give a u of 53 bits in [0, 1). The stream keeps drafting and verification independent.
    """

    def __init__(self, seed: int, position: int, stream: int = VERIFIER_STREAM) -> None:
        self._key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
        self._counter = np.array([0, position, stream, 0], np.uint32)

    def accept(self, probability: float) -> bool:
        """Return True with this probability: always for 1, never for 0."""
        return self._uniform() < probability

    def draw(self, distribution: Probabilities) -> int:
        """Return a token drawn from `distribution`, float64[V] with sum 1; never one of probability 0."""
        below = distribution.cumsum()
        token = int(below.searchsorted(self._uniform() * below[-1], side="right"))
        # the product may round up to the whole sum, beyond the last token with a probability
        return token if token < len(below) else int(np.flatnonzero(distribution)[-1])

    def _uniform(self) -> float:
        words = philox(self._counter, self._key).tolist()
        self._counter[0] += np.uint32(1)
        return float((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2.0**53


def rejection_chooser(
    draft: Draft,
    at: int,
    distribution: Callable[[int, Sequence[int]], Probabilities],
    chance: Callable[[int], SeededChance],
) -> Chooser:
    """Return a chooser of the token after each row of a verification, which tries the row's drafted children.

    `distribution` returns the target's after a row and an emitted path, float64[V] with sum 1; `chance` the randomness
    of a position, once for each. The root of the draft is at position `at`.
    """

    def choose(row: int, path: Sequence[int]) -> int:
        children = np.flatnonzero(draft.parents == row - 1).tolist()
        return choose_token(distribution(row, path), draft, children, chance(at + len(path) + 1))

    return choose


def choose_token(p: Probabilities, draft: Draft, siblings: Sequence[int], chance: SeededChance) -> int:
    """Return a token with distribution `p`: the first accepted one of `siblings`, else a draw from the last residual.

    `p` is float64[V], the target's distribution after the parent of `siblings`, nodes of `draft` in the order drawn.
    Without q they were chosen, not drawn, and q is one-hot. ImpossibleDraftError if a node cannot have been drawn from
    its q.
    """
    for node in siblings:
        token = int(draft.tokens[node])
        if draft.q is None:
            q = np.zeros(len(p), np.float64)
            q[token] = 1.0
        else:
            q = as_drawn(draft.drawn_from(node))
        if chance.accept(min(1.0, float(p[token] / q[token]))):
            return token
        p = residual(p, q)
    return chance.draw(p)


def residual(p: Probabilities, q: Probabilities) -> Probabilities:
    """Return max(p - q, 0), normalised to sum 1, float64[V]: the distribution after a rejected draw from `q`.

    If p exceeds q nowhere, which only rounding can cause after a rejection, return p.
    """
    more = np.maximum(p - q, 0.0)
    total = float(more.sum())
    return more / total if total > 0 else p


def as_drawn(row: FloatArray) -> Probabilities:
    """Return a row of `Draft.q`, float32[V], normalised in float64[V]."""
    exact = row.astype(np.float64)
    return exact / float(exact.sum())


def draw_siblings(q: Probabilities, count: int, chance: SeededChance) -> tuple[IntArray, FloatArray]:
    """Draw `count` tokens without replacement from `q`, or as many as it allows; `chance` is not the verifier's.

    `q` is float64[V], the draft model's distribution, processed like the target's. Returned are int32[K] tokens and the
    q of each for `Draft.q`, float32[K, V]; as exactness requires, K does not depend on the draws.
    """
    left = q.astype(np.float64)
    tokens: list[int] = []
    rows: list[FloatArray] = []
    while len(tokens) < count and (total := float(left.sum())) > 0:
        row = (left / total).astype(np.float32)  # the draw uses the rounded row that the verifier gets
        token = chance.draw(as_drawn(row))
        tokens.append(token)
        rows.append(row)
        left[token] = 0.0
    return np.array(tokens, np.int32), np.array(rows, np.float32).reshape(len(rows), len(q))
