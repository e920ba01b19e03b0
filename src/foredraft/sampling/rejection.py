"""Rejection verification: a drafted token stands with probability min(1, p/q), else what p has more of than q goes on.

`p` is the target's processed distribution after a row, `q` the one that the drafted token was drawn from. Whatever was
drafted, the token emitted has exactly the law p: for one candidate by Leviathan et al., "Fast inference from
transformers via speculative decoding" (2023), and Chen et al., "Accelerating large language model decoding with
speculative sampling" (2023); for several, drawn without replacement and tried in order, by recursive rejection (Miao et
al., "SpecInfer", 2024; Jeon et al., "Recursive speculative decoding", 2024). The two halves of the bargain, drawing
and trying, are both here. Does not know how p or q comes about, or where chance comes from.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from foredraft.contracts import Chooser, Draft
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.sampling import Probabilities
from foredraft.sampling.noise import philox

VERIFIER_STREAM = 1
"""The stream of the seed's noise that verification uses. 0 is matched verification's; drafters take any above 1."""


class Chance(Protocol):
    """Where randomness comes from: a seed, or a test that goes through every outcome."""

    def accept(self, probability: float) -> bool:
        """Return True with this probability."""
        ...

    def draw(self, distribution: Probabilities) -> int:
        """Return a token drawn from `distribution`, float64[V] with sum 1."""
        ...


class SeededChance:
    """Chance that belongs to (seed, position, stream), and in it to the number of times that it was asked.

    Philox-4x32-10 under the seed with counter = (times asked, position, stream, 0); two output words make a u of 53
    bits in [0, 1).

    Args:
        seed: 0 to 2**64 - 1.
        position: absolute position of the token that is decided.
        stream: whose noise, so that drafting and verifying never share any.
    """

    def __init__(self, seed: int, position: int, stream: int = VERIFIER_STREAM) -> None:
        self._key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
        self._counter = np.array([0, position, stream, 0], np.uint32)

    def accept(self, probability: float) -> bool:
        """Return True with this probability; always for 1, never for 0."""
        return self._uniform() < probability

    def draw(self, distribution: Probabilities) -> int:
        """Return a token drawn from `distribution`, float64[V]; never one of probability 0."""
        below = distribution.cumsum()
        token = int(below.searchsorted(self._uniform() * below[-1], side="right"))
        # the product may round up to the sum itself, after the last token that has any probability
        return token if token < len(below) else int(np.flatnonzero(distribution)[-1])

    def _uniform(self) -> float:
        words = philox(self._counter, self._key).tolist()
        self._counter[0] += np.uint32(1)
        return float((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2.0**53


def rejection_chooser(
    draft: Draft,
    at: int,
    distribution: Callable[[int, Sequence[int]], Probabilities],
    chance: Callable[[int], Chance],
) -> Chooser:
    """Return what chooses the token after each row of a verification by trying the row's drafted children.

    The chosen token is a child's, and the walk goes on there, or one that no child has. A node that a graph reaches by
    several prefixes stands in the draft once under each, always with the q it was drawn from; a walk meets one of them.

    Args:
        draft: what is verified.
        at: absolute position of its root.
        distribution: the target's after a row after an emitted path, processed: float64[V] with sum 1.
        chance: what decides at a position; called once for each position.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(draft.parents.tolist()):
        children.setdefault(parent, []).append(node)

    def choose(row: int, path: Sequence[int]) -> int:
        p = distribution(row, path)
        return choose_token(p, draft, children.get(row - 1, ()), chance(at + len(path) + 1))

    return choose


def choose_token(p: Probabilities, draft: Draft, siblings: Sequence[int], chance: Chance) -> int:
    """Return a token whose law is `p`: the first of `siblings` that is accepted, else a draw from what is left of p.

    Args:
        p: float64[V] with sum 1, the target's distribution after their parent.
        draft: the tree; where it has no q, its nodes were chosen rather than drawn: the one-hot case.
        siblings: nodes of `draft` with one parent, in the order in which they were drawn.
        chance: decides.

    Raises:
        ValueError: a node that its q cannot have given.
    """
    for place, node in enumerate(siblings):
        token = int(draft.tokens[node])
        q = one_hot(token, len(p)) if draft.q is None else _checked(draft, node, siblings[:place])
        if chance.accept(min(1.0, float(p[token] / q[token]))):
            return token
        p = residual(p, q)
    return chance.draw(p)


def residual(p: Probabilities, q: Probabilities) -> Probabilities:
    """Return max(p - q, 0) with sum 1, float64[V]: the law of what follows a rejected draw from `q`.

    Where p nowhere exceeds q, as only rounding makes it after a rejection, p itself is returned.
    """
    more = np.maximum(p - q, 0.0)
    total = float(more.sum())
    return more / total if total > 0 else p


def as_drawn(row: FloatArray) -> Probabilities:
    """Return the probabilities, float64[V] with sum 1, that a row of `Draft.q`, float32[V], stands for."""
    exact = row.astype(np.float64)
    return exact / float(exact.sum())


def one_hot(token: int, vocabulary: int) -> Probabilities:
    """Return the law, float64[V], of a token that is certain."""
    certain = np.zeros(vocabulary, np.float64)
    certain[token] = 1.0
    return certain


def draw_siblings(q: Probabilities, count: int, chance: Chance) -> tuple[IntArray, FloatArray]:
    """Draw different tokens one after the other, each from what the ones before it leave of `q`.

    How many there are depends on `count` and on how many tokens `q` allows, not on what is drawn, as the law demands.

    Args:
        q: float64[V], the draft model's distribution, processed as the target's is.
        count: how many to draw; fewer where `q` allows fewer tokens.
        chance: draws; never the verifier's own.

    Returns:
        int32[K] tokens, and float32[K, V], the q of each for `Draft.q`.
    """
    left = q.astype(np.float64)
    tokens: list[int] = []
    rows: list[FloatArray] = []
    while len(tokens) < count and (total := float(left.sum())) > 0:
        row = (left / total).astype(np.float32)  # the draw is from the row as it travels, rounding included
        token = chance.draw(as_drawn(row))
        tokens.append(token)
        rows.append(row)
        left[token] = 0.0
    return np.array(tokens, np.int32), np.array(rows, np.float32).reshape(len(rows), len(q))


def _checked(draft: Draft, node: int, earlier: Sequence[int]) -> Probabilities:
    """Return a node's q, float64[V] with sum 1.

    Raises:
        ValueError: it cannot have given the node, or it allows the token of an earlier sibling.
    """
    assert draft.q is not None
    row, token = draft.q[node], int(draft.tokens[node])
    if not row[token] > 0:  # NaN included
        raise ValueError(
            f"Node {node} of the draft is token {token}, to which its q gives {row[token]:g}; q must be the "
            "distribution that the node was drawn from."
        )
    for other in draft.tokens[list(earlier)].tolist():
        if row[other] != 0:
            raise ValueError(
                f"The q of node {node} gives {row[other]:g} to token {other}, which an earlier sibling has; siblings "
                "are drawn without replacement, so set it to 0 and divide by the rest."
            )
    return as_drawn(row)
