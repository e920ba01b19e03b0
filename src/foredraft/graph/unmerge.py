"""From a merged graph, whose nodes borrow each other's continuations, back to a tree of its most probable paths.

Gong et al., "Graph-Structured Speculative Decoding" (ACL Findings 2024), section 5.4, except that the tree is cut by
path probability and not by breadth. Does not depend on how lenders were found.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from foredraft.graph.dag import NO_LENDER, DraftGraph
from foredraft.graph.search import Queue, new_queue, pop, push
from foredraft.graph.tree import BoolArray, FloatArray, IntArray


class Unmerged(NamedTuple):
    """A tree whose nodes are copies of a graph's nodes, best first, so parents before children."""

    tokens: IntArray  # int32[N]
    parents: IntArray  # int32[N], -1 for the root
    score: FloatArray  # float32[N], path probability, borrowed steps included
    origin: IntArray  # int32[N], the copied node
    merged: BoolArray  # bool[N], whether its path contains a borrowed step


class _Candidates(NamedTuple):
    """Candidate paths, R at most."""

    node: IntArray  # int32[R], the last node
    above: IntArray  # int32[R], the written path that it follows
    borrowed: BoolArray  # bool[R], whether the step to `node` is borrowed
    queue: Queue  # by path probability


@njit(cache=True)
def unmerge(graph: DraftGraph, limit: int, max_depth: int) -> Unmerged:
    """Return the `limit` most probable paths of a graph as a tree, no node deeper than `max_depth`.

    A node is followed by its own children and by its lender's children, except those with a token of its own children.
    A borrowed child's probability is limited to what the own children leave of 1. A lender does not lend what it
    borrows, but what is borrowed may borrow too, so the tree can be deeper than the graph. A node that borrows is not
    `merged` itself, as its token was drafted after its own path; the nodes it borrows are. Paths of probability 0 are
    left out. The order of equal scores is deterministic but unspecified.

    Siblings become candidates one after the other, most probable first, so there are at most three candidates per
    written node, and a path never waits for a less probable one.
    """
    room = 3 * limit + 4
    c = _Candidates(
        np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.bool_),
        new_queue(np.empty(room, np.float32)),
    )  # fmt: skip
    first, following = _sorted_children(graph)
    # of the written paths, the first of which is the root's
    origin, above = np.full(limit + 1, -1, np.int32), np.empty(limit + 1, np.int32)
    depth, score = np.zeros(limit + 1, np.int32), np.ones(limit + 1, np.float32)
    merged, written = np.zeros(limit + 1, np.bool_), 0
    while True:
        place = int(origin[written])
        own, lender = int(first[place]), int(graph.lenders[place]) if place >= 0 else NO_LENDER
        if depth[written] < max_depth and own >= 0:
            _offer(c, own, written, False, score[written] * graph.probability[own])
        if depth[written] < max_depth and lender >= 0:
            _offer_borrowed(c, graph, following, int(first[lender]), own, written, score[written])
        best = pop(c.queue) if written < limit else -1
        if best < 0:
            break
        node, up, borrowed = int(c.node[best]), int(c.above[best]), bool(c.borrowed[best])
        written += 1
        origin[written], above[written], score[written] = node, up, c.queue.score[best]
        merged[written], depth[written] = borrowed or merged[up], depth[up] + 1
        sibling = int(following[node])
        if borrowed:
            _offer_borrowed(c, graph, following, sibling, int(first[origin[up]]), up, score[up])
        elif sibling >= 0:
            _offer(c, sibling, up, False, score[up] * graph.probability[sibling])
    kept = slice(1, written + 1)
    parents = (above[kept] - 1).astype(np.int32)
    return Unmerged(graph.tokens[origin[kept]], parents, score[kept].copy(), origin[kept].copy(), merged[kept].copy())


@njit(cache=True)
def _sorted_children(graph: DraftGraph) -> tuple[IntArray, IntArray]:
    """Return each node's most probable child, int32[N + 1] with the root's last, and each node's next sibling."""
    nodes, parents, probability = int(graph.counts[0]), graph.parents, graph.probability
    first, following = np.full(nodes + 1, -1, np.int32), np.full(nodes, -1, np.int32)
    for node in range(nodes - 1, -1, -1):  # backwards, so that equal siblings keep their order
        before, after = -1, first[parents[node]]
        while after >= 0 and probability[after] > probability[node]:
            before, after = after, following[after]
        following[node] = after
        if before < 0:
            first[parents[node]] = node
        else:
            following[before] = node
    return first, following


@njit(cache=True)
def _offer(c: _Candidates, node: int, above: int, borrowed: bool, score: np.float32) -> None:
    if score > 0:
        candidate = push(c.queue, score)
        c.node[candidate], c.above[candidate], c.borrowed[candidate] = node, above, borrowed


@njit(cache=True)
def _offer_borrowed(
    c: _Candidates, graph: DraftGraph, following: IntArray, node: int, own: int, above: int, total: np.float32
) -> None:
    """Offer the first of the siblings from `node` on whose token none of the siblings from `own` on has."""
    while node >= 0:
        left, shadowed, other = np.float32(1.0), False, own
        while other >= 0:
            left -= graph.probability[other]
            shadowed = shadowed or graph.tokens[other] == graph.tokens[node]
            other = int(following[other])
        if not shadowed:
            _offer(c, node, above, True, total * min(graph.probability[node], left))
            return
        node = int(following[node])
