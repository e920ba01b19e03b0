"""Continuations of re-occurring grams, grafted onto the other places where the same tokens occur in a tree.

What graph-structured drafting does while a tree is drafted (graph/dag.py), done to a finished tree of any drafter.
Knows tokens and scores; not who drafted them.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.dag import NO_LENDER
from foredraft.graph.grams import Grams, first_occurrence, index_grams, remember
from foredraft.graph.reach import inherit, no_reach, reach_itself, reaches
from foredraft.graph.tree import ROOT, FloatArray, IntArray, check_tree
from foredraft.graph.unmerge import Unmerged, unroll


def graft(
    tokens: IntArray,
    parents: IntArray,
    score: FloatArray,
    context: npt.NDArray[np.integer],
    tau: int,
    limit: int,
    max_depth: int,
) -> Unmerged:
    """Add to a tree what follows the same `tau` tokens elsewhere in it, and keep the most probable paths.

    Every node, and the root, borrows the children of the first node that ends in the same tokens, has a child that the
    borrower lacks, and may lend: a node that reaches the borrower, through the tree or through loans, may not. Grafted
    children are scored as `unroll` says, with score[child] / score[parent] for their conditional probability.

    Args:
        tokens: int32[N].
        parents: int32[N], -1 for the root; siblings carry different tokens. Nodes that come first lend and are served
            first, so the most probable ones should.
        score: float32[N], estimates that each node's whole path is accepted, at most 1 and not above the parent's; what
            is above is taken for as much.
        context: int[n], the text before the tree, the root last; the last `tau` ids are enough.
        tau: length of the grams, at least 1.
        limit: nodes at most, grafted ones included.
        max_depth: no node deeper than this.

    Returns:
        The tree; `merged` says what was grafted.

    Raises:
        ValueError: arrays that are no tree, a score that is not a number or is negative, `tau` below 1.
    """
    check_tree(tokens, parents)
    if tau < 1:
        raise ValueError(f"tau must be at least 1, not {tau}.")
    if score.dtype != np.float32 or score.shape != tokens.shape or not (score >= 0).all():
        raise ValueError(f"score must be float32[{len(tokens)}] without NaN or negative numbers.")
    loans = lenders(index_grams(tokens, parents, context, tau))
    return Unmerged(*unroll(tokens, parents, _conditional(parents, score), loans[1:], int(loans[0]), limit, max_depth))


def _conditional(parents: IntArray, score: FloatArray) -> FloatArray:
    """Return score[node] / score[parent], float32[N], between 0 and 1."""
    before = np.append(score, np.float32(1.0))[parents]  # the root, -1, is last
    return np.divide(score, before, out=np.zeros_like(score), where=before > 0).clip(max=np.float32(1.0))


@njit(cache=True)
def lenders(grams: Grams) -> IntArray:
    """Return the lender of the root and of each node, int32[N + 1], -1 for nobody; `grams` remembers no node yet.

    The graph of a tree's edges and of the loans has no cycle: a loan is made only where the lender does not reach the
    borrower, and everything that the lender reaches is then marked as reached by all that reaches the borrower.
    """
    nodes = len(grams.tokens)
    above = no_reach(nodes)
    child, sibling = np.full(nodes + 1, -1, np.int32), np.full(nodes, -1, np.int32)  # the root's are last
    for node in range(nodes):
        parent = int(grams.parents[node])
        inherit(above, node, parent)
        reach_itself(above, node)
        child[parent], sibling[node] = node, child[parent]
    for node in range(nodes):
        if child[node] >= 0:
            remember(grams, node)
    loans = np.full(nodes + 1, NO_LENDER, np.int32)
    for node in range(ROOT, nodes):
        if node >= 0:
            lender = first_occurrence(grams, int(grams.parents[node]), int(grams.tokens[node]))
        elif len(grams.tail):
            lender = first_occurrence(grams, ROOT - 1, int(grams.tail[-1]))
        else:
            continue
        # Nothing reaches the root, so it may borrow from any node.
        while lender >= 0 and (
            (node >= 0 and reaches(above, lender, node))
            or not _has_more(grams.tokens, sibling, child[lender], child[node])
        ):
            lender = int(grams.later[lender])
        loans[node + 1] = lender
        if lender >= 0 and node >= 0:
            for other in range(nodes):
                if reaches(above, lender, other):
                    inherit(above, other, node)
    return loans


@njit(cache=True)
def _has_more(tokens: IntArray, sibling: IntArray, theirs: int, own: int) -> bool:
    """Say whether one of the siblings from `theirs` on carries a token that none of those from `own` on does."""
    while theirs >= 0:
        mine = own
        while mine >= 0 and tokens[mine] != tokens[theirs]:
            mine = sibling[mine]
        if mine < 0:
            return True
        theirs = sibling[theirs]
    return False
