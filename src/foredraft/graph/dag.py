"""A graph of drafted tokens that grows level by level, drafts repeated phrases once, and is turned into a tree.

Gong et al., "Graph-Structured Speculative Decoding" (ACL Findings 2024), sections 4.2 and 5. A node whose last tau
tokens occurred before in the graph is tau-redundant. It is drafted and verified like others but not expanded: it
borrows the continuations of the first occurrence, its lender. Does not depend on the model.

The first occurrence is that of the earliest level and, within a level, of the most probable path; it may get the
continuations that it lends later. A pruned node does not lend, but may borrow. The tree is cut by path probability, and
not by breadth. docs/explanation/draft-models.md tells what else differs from the paper's code.
"""

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.tree import I64, BoolArray, FloatArray, IntArray

NO_LENDER = -1


class DraftGraph(NamedTuple):
    """The graph, with room for R nodes, of which `size` are in use. Changed in place, by `add_level` only."""

    tokens: IntArray  # int32[R]
    parents: IntArray  # int32[R], the parent in the tree, earlier in the arrays; -1 for the root; ascending
    probability: FloatArray  # float32[R], of the token given its path in the tree, at most 1
    score: FloatArray  # float32[R], product of these along the path
    lenders: IntArray  # int32[R], the node whose continuations this one borrows, or -1; a lender never borrows
    opened: IntArray  # int32[R], the nodes that may be expanded and lend, in the order of their being added to these
    grams: IntArray  # int32[R + 1, tau], the last tokens of each node's path, the root's last; -1 before the text
    counts: I64  # int64[2]: nodes, open nodes

    @property
    def size(self) -> int:
        """The number of nodes."""
        return int(self.counts[0])


def leaves(probabilities: FloatArray, least_probability: float, least_share: float) -> BoolArray:
    """Return which children are not worth expanding (section 4.2), bool[F, k]; they are still drafted.

    `probabilities`, float32[F, k], has the children of one node per row, each given its path. A child is a leaf below
    `least_probability` (theta_prob), below the share `least_share` (theta_sib) of its best sibling, or if it is NaN.
    """
    best = probabilities.max(axis=1, keepdims=True, initial=0.0)
    kept: BoolArray = probabilities >= np.maximum(np.float32(least_probability), np.float32(least_share) * best)
    return ~kept


def empty_graph(context: npt.NDArray[np.integer], tau: int, room: int) -> DraftGraph:
    """Return a graph without nodes and with room for some, after the text `context`, int[n]; its last `tau` suffice."""
    ids, floats = np.empty((3, room), np.int32), np.empty((2, room), np.float32)
    grams = np.full((room + 1, tau), -1, np.int32)
    tail = context[max(0, len(context) - tau) :]
    grams[-1, tau - len(tail) :] = tail
    lenders, counts = np.full(room, NO_LENDER, np.int32), np.zeros(2, np.int64)
    return DraftGraph(ids[0], ids[1], floats[0], floats[1], lenders, ids[2], grams, counts)


def add_level(
    graph: DraftGraph, parents: IntArray, tokens: IntArray, probabilities: FloatArray, leaf: BoolArray, most_open: int
) -> IntArray:  # fmt: skip
    """Add the children of the last level's open nodes, and return which of them to expand next.

    In the order of path probability, each child becomes a borrower if it is redundant, else a leaf if `leaf` says so or
    `most_open` nodes are open already, else an open node. Nodes of the last level get no children after this.

    `parents`, int32[M], are nodes of the last level that `add_level` returned, ascending, or -1 in the first level;
    siblings have different tokens. `probabilities`, float32[M], are of each token given its path; what rounding adds
    above 1 is cut off. `most_open` is 0 for the last level. There must be room in the graph, which is changed. Returned
    are int32[K], the open nodes of the new level, ascending. New nodes are numbered from the old `graph.size` on.
    """
    new = slice(graph.size, graph.size + len(tokens))
    assert new.stop <= len(graph.tokens)
    graph.tokens[new], graph.parents[new] = tokens, parents
    graph.probability[new] = np.minimum(probabilities, 1)
    graph.score[new] = graph.probability[new] * np.where(parents < 0, np.float32(1), graph.score[parents])
    graph.grams[new] = np.column_stack([graph.grams[parents], tokens])[:, 1:]
    order = np.argsort(-graph.score[new], kind="stable")
    return _merge_level(graph, order, leaf, most_open)


@njit(cache=True)
def _merge_level(graph: DraftGraph, order: I64, leaf: BoolArray, most_open: int) -> IntArray:
    """Decide which of the new nodes are open, in `order`, and make them the last level; return the open ones."""
    start, first = int(graph.counts[0]), int(graph.counts[1])
    graph.counts[0] += len(order)
    for i in order:
        lender, opened = _lender(graph, start + i), graph.counts[1]
        graph.lenders[start + i] = lender
        if lender < 0 and not leaf[i] and opened < first + most_open:
            graph.opened[opened] = start + i
            graph.counts[1] += 1
    return np.sort(graph.opened[first : graph.counts[1]])


@njit(cache=True)
def _lender(graph: DraftGraph, new: int) -> int:
    """Return the first of the open nodes that ends in the gram of the new node and may lend to it, or -1.

    The graph stays acyclic, by induction: the only edge to a new node comes from its parent, so an edge from it to a
    lender closes a cycle if and only if the lender reaches the parent.
    """
    for node in graph.opened[: graph.counts[1] if graph.grams.shape[1] else 0]:
        is_alike = graph.tokens[node] == graph.tokens[new] and np.array_equal(graph.grams[node], graph.grams[new])
        if is_alike and not _reaches(graph, node, graph.parents[new]):
            return int(node)
    return NO_LENDER


@njit(cache=True)
def _reaches(graph: DraftGraph, lender: int, goal: int) -> bool:
    """Return whether tree edges and loans lead from a lender to a node, -1 for the root."""
    reached = np.zeros(graph.counts[0], np.bool_)
    reached[lender] = growing = True
    while growing and goal >= 0 and not reached[goal]:
        growing = False
        for node in range(len(reached)):
            parent, lent = graph.parents[node], graph.lenders[node]
            reached[node] |= parent >= 0 and reached[parent]
            if reached[node] and lent >= 0 and not reached[lent]:
                reached[lent] = growing = True
    return bool(goal >= 0 and reached[goal])


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
