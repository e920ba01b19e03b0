"""From nodes that borrow each other's continuations back to a tree: the most probable paths, up to a number of nodes.

Gong et al., "Graph-Structured Speculative Decoding", section 5.4, except that the tree is cut by the probability of its
paths and not by breadth. Knows tokens, conditional probabilities and lenders; not how lenders were found.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from foredraft.graph.dag import NO_LENDER, DraftGraph
from foredraft.graph.search import pop, sift_up
from foredraft.graph.tree import BoolArray, FloatArray, IntArray


class Unmerged(NamedTuple):
    """A tree in which every node is a copy of a graph's: best first, so parents before children."""

    tokens: IntArray  # int32[N]
    parents: IntArray  # int32[N], -1 for the root
    score: FloatArray  # float32[N], the product of the conditional probabilities along the path, borrowed ones included
    origin: IntArray  # int32[N], the node that it is a copy of
    merged: BoolArray  # bool[N], whether its path went through a loan; where it did not, the path is the origin's own


def unmerge(graph: DraftGraph, limit: int, max_depth: int) -> Unmerged:
    """Return the `limit` most probable paths of a graph as a tree, no node deeper than `max_depth`.

    Borrowed continuations may borrow in their turn, so the tree can be deeper than the graph has levels. A node that
    borrows is not `merged` itself, as its token was drafted after its own path; what it borrows is. Paths of
    probability 0 are left out. Which of equal scores comes first, or is left out, is the same every time, and not said.
    """
    size = graph.size
    tokens, parents, lenders = graph.tokens[:size], graph.parents[:size], graph.lenders[:size]
    return Unmerged(*unroll(tokens, parents, graph.probability[:size], lenders, limit, max_depth))


class _Candidates(NamedTuple):
    """Paths that may come next, R at most."""

    node: IntArray  # int32[R], their last node
    above: IntArray  # int32[R], the written node that they go on from, -1 for the root
    borrowed: BoolArray  # bool[R], whether the step to `node` is a loan
    score: FloatArray  # float32[R]
    heap: IntArray  # int32[R], candidates that wait
    counts: IntArray  # int32[2], how many were made, and how many wait


@njit(cache=True)
def _sorted_children(parents: IntArray, conditional: FloatArray) -> tuple[IntArray, IntArray]:
    """Return each node's most probable child, int32[N + 1] with the root's last, and each one's next sibling."""
    nodes = len(parents)
    first, following = np.full(nodes + 1, -1, np.int32), np.full(nodes, -1, np.int32)
    for node in range(nodes - 1, -1, -1):  # backwards, and equals in front, so that they stand in their order
        before, after = -1, first[parents[node]]
        while after >= 0 and conditional[after] > conditional[node]:
            before, after = after, following[after]
        following[node] = after
        if before < 0:
            first[parents[node]] = node
        else:
            following[before] = node
    return first, following


@njit(cache=True)
def _shadowed(tokens: IntArray, following: IntArray, own: int, node: int) -> bool:
    """Say whether one of the siblings from `own` on carries the token of `node`."""
    while own >= 0:
        if tokens[own] == tokens[node]:
            return True
        own = following[own]
    return False


@njit(cache=True)
def _left_over(conditional: FloatArray, following: IntArray, own: int) -> np.float32:
    """Return the probability that the siblings from `own` on leave to other tokens."""
    left = np.float32(1.0)
    while own >= 0:
        left -= conditional[own]
        own = following[own]
    return left if left > 0 else np.float32(0.0)


@njit(cache=True)
def _offer(c: _Candidates, node: int, above: int, borrowed: bool, score: np.float32) -> None:
    if not score > 0:
        return
    made, waiting = c.counts[0], c.counts[1]
    c.node[made], c.above[made], c.borrowed[made], c.score[made] = node, above, borrowed, score
    c.heap[waiting] = made
    c.counts[0], c.counts[1] = made + 1, waiting + 1
    sift_up(c.heap, waiting + 1, c.score)


@njit(cache=True)
def unroll(
    tokens: IntArray, parents: IntArray, conditional: FloatArray, lenders: IntArray, limit: int, max_depth: int
) -> tuple[IntArray, IntArray, FloatArray, IntArray, BoolArray]:
    """Return the most probable paths of a tree whose nodes borrow continuations, as the arrays of an `Unmerged`.

    A node is followed by its own children and by its lender's, except those with a token that its own carry; together,
    own and borrowed ones cannot be more probable than 1, so a borrowed one has at most what the own ones leave over.
    What a lender borrows, it does not lend. Siblings are offered one after the other, most probable first, so at most
    three candidates are made for each node written, and a path never waits behind a less probable one.

    Args:
        tokens: int32[N].
        parents: int32[N], parents first, -1 for the root; siblings carry different tokens.
        conditional: float32[N], of each node after its parent, between 0 and 1.
        lenders: int32[N], whose continuations each node borrows, -1 for nobody's; without cycles.
        limit: nodes at most.
        max_depth: no node deeper than this.
    """
    limit = max(limit, 0)
    room = 3 * limit + 4
    c = _Candidates(
        np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.bool_), np.empty(room, np.float32),
        np.empty(room, np.int32), np.zeros(2, np.int32),
    )  # fmt: skip
    first, following = _sorted_children(parents, conditional)
    origin, above, depth = np.empty(limit, np.int32), np.empty(limit, np.int32), np.empty(limit, np.int32)
    score, merged = np.empty(limit, np.float32), np.empty(limit, np.bool_)
    count, written, level, total = 0, -1, 0, np.float32(1.0)  # the path just written; at first, the root's
    while True:
        place = -1 if written < 0 else int(origin[written])
        own = int(first[place])
        lender = NO_LENDER if written < 0 else int(lenders[place])
        if level < max_depth and own >= 0:
            _offer(c, own, written, False, total * conditional[own])
        if level < max_depth and lender >= 0:
            _offer_borrowed(c, tokens, conditional, following, int(first[lender]), own, written, total)
        if c.counts[1] == 0 or count == limit:
            break
        best = pop(c.heap, c.counts[1], c.score)
        c.counts[1] -= 1
        written, node, borrowed = count, int(c.node[best]), bool(c.borrowed[best])
        up = int(c.above[best])
        origin[written], above[written], score[written] = node, up, c.score[best]
        merged[written] = borrowed or (up >= 0 and merged[up])
        depth[written] = 1 if up < 0 else depth[up] + 1
        count += 1
        level, total = int(depth[written]), c.score[best]
        before, sibling = np.float32(1.0) if up < 0 else score[up], int(following[node])
        if borrowed:
            own = int(first[-1 if up < 0 else origin[up]])
            _offer_borrowed(c, tokens, conditional, following, sibling, own, up, before)
        elif sibling >= 0:
            _offer(c, sibling, up, False, before * conditional[sibling])
    return (
        tokens[origin[:count]], above[:count].copy(), score[:count].copy(), origin[:count].copy(),
        merged[:count].copy(),
    )  # fmt: skip


@njit(cache=True)
def _offer_borrowed(
    c: _Candidates, tokens: IntArray, conditional: FloatArray, following: IntArray, node: int, own: int, above: int,
    total: np.float32,
) -> None:  # fmt: skip
    """Offer the first of the siblings from `node` on that none of the siblings from `own` on shadows."""
    while node >= 0 and _shadowed(tokens, following, own, node):
        node = int(following[node])
    if node >= 0:
        left = _left_over(conditional, following, own)
        _offer(c, node, above, True, total * min(conditional[node], left))
