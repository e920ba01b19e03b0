"""Token trees as parent arrays: checks, depths, masks and cuts.

A tree of N nodes is `parents int32[N]` with `parents[i] < i`; -1 marks a child of the root. The root itself is not in
the array. Does not depend on what the tokens mean or where the tree comes from.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]

ROOT = -1
MOST_IDS = 1 << 31  # int32 holds no others


def check_tree(tokens: IntArray, parents: IntArray, vocabulary: int = MOST_IDS) -> None:
    """Check that `tokens int32[N]`, below `vocabulary`, and `parents int32[N]` form a tree; fast for a valid one.

    ValueError for a wrong dtype or shape, a token outside the vocabulary, a parent at or after its child, or two
    siblings with the same token.
    """
    for name, array in (("tokens", tokens), ("parents", parents)):
        if array.dtype != np.int32 or array.ndim != 1:
            raise ValueError(
                f"{name} must be a one-dimensional int32 array, not {array.dtype} with {array.ndim} dimensions."
            )
    if len(tokens) != len(parents):
        raise ValueError(f"A tree needs one parent per token; it has {len(tokens)} tokens and {len(parents)} parents.")
    node = wrong_node(tokens, parents, vocabulary)
    if node < 0:
        return
    parent = int(parents[node])
    if parent < ROOT:
        raise ValueError(f"Parent {parent} is below -1, which marks a child of the root.")
    if parent >= node:
        raise ValueError(f"Node {node} has parent {parent}: a parent must come before its child.")
    if not 0 <= tokens[node] < vocabulary:
        raise ValueError(
            f"The draft holds token {int(tokens.max())} (or a negative one); the target scores ids below {vocabulary}."
        )
    raise ValueError("Two siblings have the same token; merge them into one node.")


@njit(cache=True)
def wrong_node(tokens: IntArray, parents: IntArray, vocabulary: int) -> int:
    """Return the first node that makes two arrays of one length no tree (see `check_tree`); -1 for a tree."""
    for node in range(len(parents)):
        if not -1 <= parents[node] < node or not 0 <= tokens[node] < vocabulary:
            return node
        for other in range(parents[node] + 1, node):
            if parents[other] == parents[node] and tokens[other] == tokens[node]:
                return node
    return -1


@njit(cache=True)
def depths(parents: IntArray) -> IntArray:
    """Return each node's depth, int32[N]: 1 for a child of the root."""
    depth = np.empty(len(parents), np.int32)
    for node in range(len(parents)):
        depth[node] = 1 if parents[node] < 0 else depth[parents[node]] + 1
    return depth


@njit(cache=True)
def ancestor_mask(parents: IntArray) -> BoolArray:
    """Return bool[1+N, 1+N] over rows (root first, then nodes): whether row `i` may attend to row `j`.

    A row attends to itself, its ancestors and the root.
    """
    rows = len(parents) + 1
    mask = np.zeros((rows, rows), np.bool_)
    mask[0, 0] = True
    for node in range(len(parents)):
        row = node + 1
        for column in range(row):  # not as a slice: numba's check of its shape takes four seconds to compile
            mask[row, column] = mask[parents[node] + 1, column]
        mask[row, row] = True
    return mask


@njit(cache=True)
def child_with(tokens: IntArray, parents: IntArray, node: int, token: int) -> int:
    """Return the child of `node` with `token`, or -1; node -1 is the root."""
    for child in range(node + 1, len(parents)):
        if parents[child] == node and tokens[child] == token:
            return child
    return -1


def chain_parents(length: int) -> IntArray:
    """Return the parents of a chain of `length` tokens: -1, 0, 1, ... as int32[length]."""
    return np.arange(-1, length - 1, dtype=np.int32)


def common_length(one: npt.ArrayLike, other: npt.ArrayLike) -> int:
    """Return the number of tokens with which two sequences both begin."""
    first, second = np.asarray(one), np.asarray(other)
    count = min(len(first), len(second))
    return int(np.logical_and.accumulate(first[:count] == second[:count]).sum())


@njit(cache=True)
def top_nodes(parents: IntArray, score: FloatArray, limit: int, max_depth: int) -> IntArray:
    """Return the best `limit` nodes of a tree, int32[K] ascending, none without its parent or deeper than `max_depth`.

    Nodes are taken best first, by `score`, float32[N], among those whose parent is taken. If scores never rise from
    parent to child, as path probabilities do not, these are exactly the top `limit`. Ties go to the earlier node.
    """
    nodes, depth, count = len(parents), depths(parents), 0
    taken = np.zeros(nodes, np.bool_)
    while count < limit:
        best = -1
        for node in range(nodes):
            ready = not taken[node] and depth[node] <= max_depth and (parents[node] < 0 or taken[parents[node]])
            if ready and (best < 0 or score[node] > score[best]):
                best = node
        if best < 0:
            break
        taken[best] = True
        count += 1
    return np.flatnonzero(taken).astype(np.int32)


def reindexed_parents(parents: IntArray, kept: IntArray) -> IntArray:
    """Return the parents, int32[K], of the sub-tree of the nodes `kept` (ascending and prefix-closed)."""
    new_index = np.full(len(parents) + 1, ROOT, np.int32)
    new_index[kept] = np.arange(len(kept), dtype=np.int32)
    return new_index[parents[kept]]


@njit(cache=True)
def best_chain(parents: IntArray, score: FloatArray, longest: int) -> IntArray:
    """Return the path from the root with the most expected accepted tokens, int32[K], K at most `longest`.

    That is the sum of its nodes' scores, float32[N], which do not rise from parent to child; NaN is
    left out. Ties go to the earlier last node.
    """
    worth, depth = np.empty(len(parents), np.float64), depths(parents)
    last = -1
    for node in range(len(parents)):
        worth[node] = score[node] + (worth[parents[node]] if parents[node] >= 0 else 0.0)
        if depth[node] <= longest and score[node] >= 0.0 and (last < 0 or worth[node] > worth[last]):
            last = node
    chain = np.empty(depth[last] if last >= 0 else 0, np.int32)
    for place in range(len(chain) - 1, -1, -1):
        chain[place] = last
        last = parents[last]
    return chain
