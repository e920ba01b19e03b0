"""From a merged graph, whose nodes borrow each other's continuations, back to a tree of its most probable paths.

Gong et al., "Graph-Structured Speculative Decoding" (ACL Findings 2024), section 5.4, except that the tree is cut by
path probability and not by breadth. Does not depend on how lenders were found.
"""

import heapq
from typing import NamedTuple

import numpy as np
from numba import njit

from foredraft.graph.dag import NO_LENDER, DraftGraph
from foredraft.graph.tree import BoolArray, FloatArray, IntArray


class Unmerged(NamedTuple):
    """A tree whose nodes are copies of a graph's nodes, best first, so parents before children."""

    tokens: IntArray  # int32[N]
    parents: IntArray  # int32[N], -1 for the root
    score: FloatArray  # float32[N], path probability, borrowed steps included
    origin: IntArray  # int32[N], the copied node
    merged: BoolArray  # bool[N], whether its path contains a borrowed step


@njit(cache=True)
def unmerge(graph: DraftGraph, limit: int, max_depth: int) -> Unmerged:
    """Return the `limit` most probable paths of a graph as a tree, no node deeper than `max_depth`.

    A node is followed by its own children and by its lender's children, except those with a token of its own children.
    A borrowed child's probability is limited to what the own children leave of 1. A lender does not lend what it
    borrows, but what is borrowed may borrow too, so the tree can be deeper than the graph. A node that borrows is not
    `merged` itself, as its token was drafted after its own path; the nodes it borrows are. Paths of probability 0 are
    left out. The order of equal scores is deterministic but unspecified.
    """
    # of the written paths, the first of which is the root's
    origin, above = np.full(limit + 1, -1, np.int32), np.full(limit + 1, -1, np.int32)
    depth, score = np.zeros(limit + 1, np.int32), np.ones(limit + 1, np.float32)
    merged, written = np.zeros(limit + 1, np.bool_), 0
    queue = [(np.float32(0), 0, 0, False) for _ in range(0)]  # minus its score, last node, path before it, borrowed
    while written < limit:
        if depth[written] < max_depth:
            own, left = _children(graph, origin[written]), np.float32(1)
            for node in range(own.start, own.stop):
                left -= graph.probability[node]
                if graph.probability[node] > 0:
                    heapq.heappush(queue, (-score[written] * graph.probability[node], node, written, False))
            lender = graph.lenders[origin[written]] if written else NO_LENDER
            lent = _children(graph, lender) if lender >= 0 else slice(0, 0)
            for node in range(lent.start, lent.stop):
                share = min(graph.probability[node], left)
                if share > 0 and not (graph.tokens[own] == graph.tokens[node]).any():
                    heapq.heappush(queue, (-score[written] * share, node, written, True))
        if not queue:
            break
        lost, node, up, borrowed = heapq.heappop(queue)
        written += 1
        origin[written], above[written], score[written] = node, up, -lost
        merged[written], depth[written] = borrowed or merged[up], depth[up] + 1
    kept = slice(1, written + 1)
    parents = (above[kept] - 1).astype(np.int32)
    return Unmerged(graph.tokens[origin[kept]], parents, score[kept].copy(), origin[kept].copy(), merged[kept].copy())


@njit(cache=True)
def _children(graph: DraftGraph, node: int) -> slice:
    """Return the children of a node, -1 for the root, which are neighbours because parents ascend."""
    parents = graph.parents[: graph.counts[0]]
    return slice(np.searchsorted(parents, node), np.searchsorted(parents, node, side="right"))
