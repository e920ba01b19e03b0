"""A graph of guessed tokens that grows level by level, where what re-occurs is drafted once.

Gong et al., "Graph-Structured Speculative Decoding" (ACL Findings 2024), sections 4.2 and 5. A node whose last tau
tokens have occurred before is tau-redundant: it is drafted and verified as a node of its own, but not expanded; it
borrows what follows the first occurrence, its lender. Knows tokens and probabilities; not the model that gave them, nor
the tree that the graph is unmerged to (graph/unmerge.py).

Where the paper leaves a choice, or its released code does something else:

- tau counts the tokens of the gram, as section 5.2 says; the tables and the code count one less. 0 merges nothing: the
  graph is then the paper's token tree.
- A gram near the root reaches back into the text before the draft.
- "First" is the earliest level, and within a level the most probable path. Levels are completed before they are
  expanded, so that a node may borrow what its lender, of the same level, is yet to get (section 6.3).
- A first occurrence that must not lend, as the graph would have a cycle (section 5.3), gives way to the next one that
  may; where none may, the node is expanded itself. The code excludes ancestors in the tree only, and has cycles.
- Each redundant node has an edge of its own. The code keeps one for each parent, and a second overwrites the first.
- A pruned node does not lend, as it will have nothing; but it may borrow, which costs no draft model's pass. Pruned
  nodes stay as leaves (section 4.2); the code drops the ones that siblings outshine, and expands the others.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.grams import Grams, first_occurrence, index_grams, remember
from foredraft.graph.tree import BoolArray, FloatArray, IntArray

NO_LENDER = -1
Bits = npt.NDArray[np.int64]
"""Who reaches whom, int64[R, R / 64]: bit `f` of row `x` says that node `f` reaches node `x`. All reach themselves."""


class DraftGraph(NamedTuple):
    """The graph, with room for R nodes. Changed in place by `add_level` only; of each array, the first `size` count."""

    tokens: IntArray  # int32[R]
    parents: IntArray  # int32[R], the node before it in the tree, earlier in the arrays; -1 for the root
    probability: FloatArray  # float32[R], of the token after the path that leads to its parent in the tree, at most 1
    score: FloatArray  # float32[R], the product of these along that path
    lenders: IntArray  # int32[R], the node whose continuations this one borrows, or -1; a lender never borrows
    open: BoolArray  # bool[R], whether the node is, was or could have been expanded: neither a leaf nor a borrower
    tau: int  # length of the grams that are merged; 0 for none
    grams: Grams  # where each gram occurs among the open nodes
    above: Bits  # which open nodes reach an open node of the last level, along edges of both kinds
    counts: npt.NDArray[np.int64]  # int64[2], the number of nodes, and the first node of the last level

    @property
    def size(self) -> int:
        """How many nodes the graph has."""
        return int(self.counts[0])


def leaves(probabilities: FloatArray, least_probability: float = 0.2, least_share: float = 0.3) -> BoolArray:
    """Say which of some nodes' best children are not worth expanding (section 4.2); they are still drafted.

    Both rules look at the probability of a token after its path, not at that of the whole path.

    Args:
        probabilities: float32[F, k], each row the children of one node.
        least_probability: theta_prob: a child below it is a leaf.
        least_share: theta_sib: a child below this share of its best sibling is a leaf.

    Returns:
        bool[F, k]. Probabilities that are NaN make leaves.
    """
    best = probabilities.max(axis=1, keepdims=True, initial=0.0)
    kept: BoolArray = probabilities >= np.maximum(np.float32(least_probability), np.float32(least_share) * best)
    return ~kept


def empty_graph(context: npt.NDArray[np.integer], tau: int, room: int) -> DraftGraph:
    """Return a graph without nodes.

    Args:
        context: int[n], the text before the draft, the root last; the last `tau` ids are enough.
        tau: length of the grams that are merged, 0 for none.
        room: nodes that it can hold.

    Raises:
        ValueError: a negative `tau` or `room`.
    """
    if tau < 0 or room < 0:
        raise ValueError(f"tau and room must be at least 0, not {tau} and {room}.")
    tokens, parents = np.empty(room, np.int32), np.empty(room, np.int32)
    return DraftGraph(
        tokens, parents, np.empty(room, np.float32), np.empty(room, np.float32), np.full(room, NO_LENDER, np.int32),
        np.zeros(room, np.bool_), tau, index_grams(tokens, parents, context, tau),
        np.zeros((room, (room + 63) >> 6), np.int64),  # rows that are never written cost no memory
        np.zeros(2, np.int64),
    )  # fmt: skip


_REFUSALS = (
    "tokens, parents, probabilities and leaf must be as long as each other",
    "there is no room for it",
    "parents must ascend",
    "parents must be open nodes of the last level, or -1 in the first",
    "tokens must be at least 0",
    "siblings must carry different tokens",
    "probabilities must lie between 0 and 1",
)


def add_level(
    graph: DraftGraph, parents: IntArray, tokens: IntArray, probabilities: FloatArray, leaf: BoolArray,
    most_open: int | None = None,
) -> IntArray:  # fmt: skip
    """Add the children of the last level's open nodes, and say which of them are to be expanded next.

    In the order of their paths' probability, each becomes a borrower if it is redundant, or else a leaf if `leaf` says
    so or `most_open` nodes are open already, or else an open node. Open nodes that get no children here never will.

    Args:
        graph: changed in place.
        parents: int32[M], ascending: nodes of the last level that `add_level` returned; -1 in the first level.
        tokens: int32[M]; siblings carry different ones.
        probabilities: float32[M], of each token after its parent's path; up to a thousandth above 1 is taken for 1.
        leaf: bool[M], nodes not to be expanded; see `leaves`.
        most_open: at most so many are left to be expanded; 0 for the last level. None for no limit.

    Returns:
        int32[K], the open nodes of the new level, ascending. Nodes are numbered from the old `graph.size` on, in the
        order given.

    Raises:
        ValueError: arrays that break a rule above, or more nodes than there is room for. The graph is then unchanged.
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
    """Return the number of the rule that is broken, or -1, and by which of the new nodes."""
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
    """Say whether one of `tokens[first:last]` is `tokens[last]`."""
    for i in range(first, last):  # noqa: SIM110  # compiled, a loop is quicker than a generator
        if tokens[i] == tokens[last]:
            return True
    return False


@njit(cache=True)
def _append(graph: DraftGraph, parents: IntArray, tokens: IntArray, probabilities: FloatArray) -> FloatArray:
    """Write the new nodes after the others, as a level whose nodes are undecided; return their scores."""
    start = int(graph.counts[0])
    for i in range(len(tokens)):
        node, parent = start + i, parents[i]
        probability = min(np.float32(probabilities[i]), np.float32(1.0))
        graph.tokens[node], graph.parents[node], graph.probability[node] = tokens[i], parent, probability
        graph.score[node] = probability if parent < 0 else graph.score[parent] * probability
    return graph.score[start : start + len(tokens)]


@njit(cache=True)
def reaches(above: Bits, source: int, node: int) -> bool:
    """Say whether `source` reaches `node`."""
    return bool(above[node, source >> 6] >> (source & 63) & 1)


@njit(cache=True)
def inherit(above: Bits, node: int, source: int) -> None:
    """Let everything that reaches `source`, and so `source` itself, reach `node`; -1, the root, adds nothing."""
    if source >= 0:
        for word in range(above.shape[1]):  # quicker than views of the rows
            above[node, word] |= above[source, word]


@njit(cache=True)
def reach_itself(above: Bits, node: int) -> None:
    """Set a node's own bit."""
    above[node, node >> 6] |= np.int64(1) << np.int64(node & 63)


@njit(cache=True)
def _lender(grams: Grams, above: Bits, parent: int, token: int) -> int:
    """Return the first open node with the gram that `token` completes after `parent`, and that may lend, or -1.

    The graph stays acyclic, by induction. A new node has one edge to it, from its parent, so a new edge to a lender
    closes a cycle if and only if the lender reaches the parent. `above` knows that of every parent that a new node can
    have: the open nodes of the last level (`_merge_level` keeps it so).
    """
    lender = first_occurrence(grams, parent, token)
    while lender >= 0 and parent >= 0 and reaches(above, lender, parent):
        lender = int(grams.later[lender])
    return lender


@njit(cache=True)
def _merge_level(graph: DraftGraph, order: npt.NDArray[np.int64], leaf: BoolArray, most_open: int) -> IntArray:
    """Decide on the nodes after the last level, in `order`, and make them the last level; return the open ones."""
    grams, above, is_open = graph.grams, graph.above, graph.open
    before, start = int(graph.counts[1]), int(graph.counts[0])
    end, opened = start + len(order), 0
    for i in order:
        node = start + i
        parent = int(graph.parents[node])
        lender = _lender(grams, above, parent, int(graph.tokens[node])) if graph.tau > 0 else NO_LENDER
        graph.lenders[node] = lender
        if lender >= start:
            continue  # it has no children yet, so what the edge adds to its row can wait until the level is complete
        if lender >= 0:
            # What reaches the parent now also reaches the lender and all that the lender reaches. Of these, only rows
            # of the last level will be asked for, or be handed down.
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
