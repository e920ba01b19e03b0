"""A graph of drafted tokens that grows level by level and drafts repeated phrases once.

Gong et al., "Graph-Structured Speculative Decoding" (ACL Findings 2024), sections 4.2 and 5. A node whose last tau
tokens occurred before in the graph is tau-redundant. It is drafted and verified like others but not expanded: it
borrows the continuations of the first occurrence, its lender. Does not depend on the model, nor on the tree that the
graph is turned into (graph/unmerge.py).

Choices that the paper leaves open, and differences from its released code:

- tau counts the tokens of the gram, as section 5.2 says; the tables and the code count one less. With 0 nothing is
  merged: the graph is the paper's token tree.
- A gram near the root reaches back into the text before the draft.
- "First" means the earliest level, and within a level the most probable path. Levels are completed before they are
  expanded, so a node may borrow continuations that its lender, of the same level, does not have yet (section 6.3).
- A first occurrence that would close a cycle (section 5.3) is skipped for the next one that would not; if all would,
  the node is expanded. The code excludes only ancestors in the tree, and has cycles.
- Each redundant node has its own edge. The code keeps one per parent, and a second overwrites the first.
- A pruned node does not lend, as it gets no continuations, but it may borrow, which costs no pass of the draft model.
  Pruned nodes stay as leaves (section 4.2); the code drops those pruned by their siblings' probabilities, and expands
  the others.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.grams import Grams, first_occurrence, index_grams, remember
from foredraft.graph.tree import BoolArray, FloatArray, IntArray

NO_LENDER = -1
Bits = npt.NDArray[np.int64]
"""Reachability, int64[R, R / 64]: bit `f` of row `x` is set if node `f` reaches node `x`; each reaches itself."""


class DraftGraph(NamedTuple):
    """The graph, with room for R nodes, of which `size` are in use. Changed in place, by `add_level` only."""

    tokens: IntArray  # int32[R]
    parents: IntArray  # int32[R], the parent in the tree, earlier in the arrays; -1 for the root
    probability: FloatArray  # float32[R], of the token given its path in the tree, at most 1
    score: FloatArray  # float32[R], product of these along the path
    lenders: IntArray  # int32[R], the node whose continuations this one borrows, or -1; a lender never borrows
    open: BoolArray  # bool[R], whether the node is neither a leaf nor a borrower, so that it may be expanded
    tau: int  # length of the grams that are merged; 0 for none
    grams: Grams  # the open nodes by gram
    above: Bits  # which open nodes reach an open node of the last level, along tree edges and loans
    counts: npt.NDArray[np.int64]  # int64[2], number of nodes, and first node of the last level

    @property
    def size(self) -> int:
        """The number of nodes."""
        return int(self.counts[0])


def leaves(probabilities: FloatArray, least_probability: float = 0.2, least_share: float = 0.3) -> BoolArray:
    """Return which children are not worth expanding (section 4.2); they are still drafted.

    Both rules use the probability of a token given its path, not of the whole path.

    Args:
        probabilities: float32[F, k], per row the children of one node.
        least_probability: theta_prob: a child below it is a leaf.
        least_share: theta_sib: a child below this share of its best sibling is a leaf.

    Returns:
        bool[F, k]. NaN gives a leaf.
    """
    best = probabilities.max(axis=1, keepdims=True, initial=0.0)
    kept: BoolArray = probabilities >= np.maximum(np.float32(least_probability), np.float32(least_share) * best)
    return ~kept


def empty_graph(context: npt.NDArray[np.integer], tau: int, room: int) -> DraftGraph:
    """Return a graph without nodes.

    Args:
        context: int[n], the text before the draft, the root last; the last `tau` ids suffice.
        tau: length of the merged grams, 0 for none.
        room: nodes at most.

    Raises:
        ValueError: a negative `tau` or `room`.
    """
    if tau < 0 or room < 0:
        raise ValueError(f"tau and room must be at least 0, not {tau} and {room}.")
    tokens, parents = np.empty(room, np.int32), np.empty(room, np.int32)
    return DraftGraph(
        tokens, parents, np.empty(room, np.float32), np.empty(room, np.float32), np.full(room, NO_LENDER, np.int32),
        np.zeros(room, np.bool_), tau, index_grams(tokens, parents, context, tau),
        np.zeros((room, (room + 63) >> 6), np.int64),  # rows never written use no memory
        np.zeros(2, np.int64),
    )  # fmt: skip


_REFUSALS = (
    "tokens, parents, probabilities and leaf must have the same length",
    "the graph is full",
    "parents must ascend",
    "parents must be open nodes of the last level, or -1 in the first",
    "tokens must be at least 0",
    "siblings must have different tokens",
    "probabilities must lie between 0 and 1",
)


def add_level(
    graph: DraftGraph, parents: IntArray, tokens: IntArray, probabilities: FloatArray, leaf: BoolArray,
    most_open: int | None = None,
) -> IntArray:  # fmt: skip
    """Add the children of the last level's open nodes, and return which of them to expand next.

    In the order of path probability, each child becomes a borrower if it is redundant, else a leaf if `leaf` says so or
    `most_open` nodes are open already, else an open node. Nodes of the last level get no children after this.

    Args:
        graph: changed in place.
        parents: int32[M], ascending: nodes of the last level that `add_level` returned; -1 in the first level.
        tokens: int32[M]; siblings have different ones.
        probabilities: float32[M], of each token given its path; rounding may exceed 1 by up to 0.001.
        leaf: bool[M], nodes not to expand; see `leaves`.
        most_open: nodes to expand at most; 0 for the last level, None for no limit.

    Returns:
        int32[K], the open nodes of the new level, ascending. Nodes are numbered from the old `graph.size` on, in order.

    Raises:
        ValueError: arrays that break a rule above, or too many nodes. The graph is then unchanged.
    """
    refusal, at = _refusal(graph, parents, tokens, probabilities, leaf)
    if refusal >= 0:
        raise ValueError(f"The level cannot be added: {_REFUSALS[refusal]} (node {at} of {len(tokens)}).")
    start = graph.size
    scores = _append(graph, parents, tokens, probabilities)
    order = np.argsort(-scores, kind="stable")
    opened = _merge_level(graph, order, leaf, len(tokens) if most_open is None else most_open)
    return opened + np.int32(start)


@njit(cache=True)
def _refusal(
    graph: DraftGraph, parents: IntArray, tokens: IntArray, probabilities: FloatArray, leaf: BoolArray
) -> tuple[int, int]:
    """Return the index of the broken rule in `_REFUSALS`, or -1, and the new node that breaks it."""
    if not len(parents) == len(tokens) == len(probabilities) == len(leaf):
        return 0, 0
    if graph.counts[0] + len(tokens) > len(graph.tokens):
        return 1, len(graph.tokens) - int(graph.counts[0])
    size, last_level, first = int(graph.counts[0]), int(graph.counts[1]), 0
    for i in range(len(tokens)):
        parent, refusal = int(parents[i]), -1
        in_last_level = last_level <= parent < size and parent >= 0
        if i > 0 and parent != parents[i - 1]:
            first = i  # of the siblings
        if i > 0 and parent < parents[i - 1]:
            refusal = 2
        elif not (graph.open[parent] if in_last_level else parent == -1 and size == 0):
            refusal = 3
        elif tokens[i] < 0:
            refusal = 4
        elif _occurs(tokens, first, i):
            refusal = 5
        elif not 0 <= probabilities[i] <= 1.001:
            refusal = 6
        if refusal >= 0:
            return refusal, i
    return -1, 0


@njit(cache=True)
def _occurs(tokens: IntArray, first: int, last: int) -> bool:
    """Return whether `tokens[last]` occurs in `tokens[first:last]`."""
    for i in range(first, last):  # noqa: SIM110  # compiled, a loop is quicker than a generator
        if tokens[i] == tokens[last]:
            return True
    return False


@njit(cache=True)
def _append(graph: DraftGraph, parents: IntArray, tokens: IntArray, probabilities: FloatArray) -> FloatArray:
    """Write the new nodes after the others, without deciding which are open; return their scores."""
    start = int(graph.counts[0])
    for i in range(len(tokens)):
        node, parent = start + i, parents[i]
        probability = min(np.float32(probabilities[i]), np.float32(1.0))
        graph.tokens[node], graph.parents[node], graph.probability[node] = tokens[i], parent, probability
        graph.score[node] = probability if parent < 0 else graph.score[parent] * probability
    return graph.score[start : start + len(tokens)]


@njit(cache=True)
def reaches(above: Bits, source: int, node: int) -> bool:
    """Return whether `source` reaches `node`."""
    return bool(above[node, source >> 6] >> (source & 63) & 1)


@njit(cache=True)
def inherit(above: Bits, node: int, source: int) -> None:
    """Let everything that reaches `source`, which includes `source`, reach `node`; -1, the root, adds nothing."""
    if source >= 0:
        for word in range(above.shape[1]):  # quicker than views of the rows
            above[node, word] |= above[source, word]


@njit(cache=True)
def reach_itself(above: Bits, node: int) -> None:
    """Set a node's own bit."""
    above[node, node >> 6] |= np.int64(1) << np.int64(node & 63)


@njit(cache=True)
def _lender(grams: Grams, above: Bits, parent: int, token: int) -> int:
    """Return the first open node that ends in the gram of `token` after `parent` and may lend, or -1.

    The graph stays acyclic, by induction: the only edge to a new node comes from its parent, so an edge from it to a
    lender closes a cycle if and only if the lender reaches the parent. `above` holds this for every possible parent,
    the open nodes of the last level (see `_merge_level`).
    """
    lender = first_occurrence(grams, parent, token)
    while lender >= 0 and parent >= 0 and reaches(above, lender, parent):
        lender = int(grams.later[lender])
    return lender


@njit(cache=True)
def _merge_level(graph: DraftGraph, order: npt.NDArray[np.int64], leaf: BoolArray, most_open: int) -> IntArray:
    """Decide which of the new nodes are open, in `order`, and make them the last level; return the open ones."""
    grams, above, is_open = graph.grams, graph.above, graph.open
    before, start = int(graph.counts[1]), int(graph.counts[0])
    end, opened = start + len(order), 0
    for i in order:
        node = start + i
        parent = int(graph.parents[node])
        lender = _lender(grams, above, parent, int(graph.tokens[node])) if graph.tau > 0 else NO_LENDER
        graph.lenders[node] = lender
        if lender >= start:
            continue  # it has no children yet, so its row is updated when the level is complete
        if lender >= 0:
            # What reaches the parent now also reaches the lender and all that the lender reaches. Only the rows of the
            # last level are read later, or inherited.
            for other in range(before, start):
                if reaches(above, lender, other):
                    inherit(above, other, parent)
        elif not leaf[i] and opened < most_open:
            is_open[node] = True
            opened += 1
            if graph.tau > 0:
                remember(grams, node)
    found, count = np.empty(opened, np.int32), 0
    for node in range(start, end):
        if is_open[node]:
            reach_itself(above, node)
            inherit(above, node, int(graph.parents[node]))
            found[count] = node - start
            count += 1
        elif graph.lenders[node] >= start:
            inherit(above, int(graph.lenders[node]), int(graph.parents[node]))
    graph.counts[0], graph.counts[1] = end, start
    return found
