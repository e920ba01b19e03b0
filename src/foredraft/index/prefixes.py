"""Prefixes of rows of tokens: grouped by the token that comes next, and the most probable ones as a tree.

The tree of He et al., "REST: Retrieval-Based Speculative Decoding" (NAACL 2024), section 3, cut exactly. Knows rows and
weights; not where they come from (index/retrieval.py).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.heap import pop, sift_up
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.retrieval import Rows

F64 = npt.NDArray[np.float64]


class _Groups(NamedTuple):
    """Working memory: the tokens that may come next, each with its weight and its rows, found by hashing.

    Attributes:
        slot_token: int32[2^k], the tokens met, by open addressing; -1 where free.
        slot_group: int32[2^k], the group of each.
        slot: int32[G], the slot of each group.
        rows: int32[G], how many rows go on with its token.
        first: int32[G], the place of its first row among the members, once `_split_rows` has put them together.
        weight: float64[G].
        row_group: int32[R + 1], the group of the row at each place among the members; -1 where a row has ended.
        moved: int32[R + 1], members on their way to new places.
    """

    slot_token: IntArray
    slot_group: IntArray
    slot: IntArray
    rows: IntArray
    first: IntArray
    weight: F64
    row_group: IntArray
    moved: IntArray


@njit(cache=True)
def _room_for_groups(rows: int, more: int) -> _Groups:
    """Return working memory for `rows` rows, and `more` tokens that no row need hold."""
    most = rows + more
    slots = 16
    while slots < 2 * most:
        slots *= 2
    return _Groups(
        np.full(slots, -1, np.int32), np.empty(slots, np.int32), np.empty(most, np.int32), np.empty(most, np.int32),
        np.empty(most, np.int32), np.empty(most, np.float64), np.empty(rows + 1, np.int32),
        np.empty(rows + 1, np.int32),
    )  # fmt: skip


@njit(cache=True)
def _group_of(groups: _Groups, made: int, token: int) -> int:
    """Return the number of `token`'s group among `made`, or make it the next one, empty."""
    mask = len(groups.slot_token) - 1
    slot = (np.int64(token) * 40503) & mask
    while groups.slot_token[slot] >= 0 and groups.slot_token[slot] != token:
        slot = (slot + 1) & mask
    if groups.slot_token[slot] < 0:
        groups.slot_token[slot], groups.slot_group[slot] = token, made
        groups.slot[made], groups.rows[made], groups.weight[made] = slot, 0, 0.0
    return int(groups.slot_group[slot])


@njit(cache=True)
def _group_rows(rows: Rows, members: IntArray, low: int, high: int, level: int, groups: _Groups) -> int:
    """Group the rows `members[low:high]` by their token at `level`; return how many groups there are.

    A group weighs what its rows do. Rows that have ended are in none.
    """
    made = 0
    for i in range(low, high):
        token = rows.tokens[members[i], level]
        groups.row_group[i] = -1
        if token < 0:
            continue
        group = _group_of(groups, made, token)
        made = max(made, group + 1)
        groups.row_group[i] = group
        groups.rows[group] += 1
        groups.weight[group] += rows.weights[members[i]]
    return made


@njit(cache=True)
def _split_rows(members: IntArray, low: int, high: int, groups: _Groups, made: int) -> None:
    """Reorder `members[low:high]` so that each group's rows lie together, in their old order, and forget the tokens.

    `groups.first` then says where each group's rows begin. Rows that have ended come last.
    """
    at = low
    for group in range(made):
        groups.first[group] = at
        at += groups.rows[group]
        groups.slot_token[groups.slot[group]] = -1
    if at == low:
        return
    for i in range(low, high):
        group = groups.row_group[i]
        if group >= 0:
            groups.moved[groups.first[group]] = members[i]
            groups.first[group] += 1
        else:
            groups.moved[at] = members[i]
            at += 1
    members[low:high] = groups.moved[low:high]
    for group in range(made):
        groups.first[group] -= groups.rows[group]


@njit(cache=True)
def _weight_of(rows: Rows, members: IntArray, low: int, high: int) -> float:
    """Return what the rows `members[low:high]` weigh together."""
    total = 0.0
    for i in range(low, high):
        total += rows.weights[members[i]]
    return total


class _Candidates(NamedTuple):
    """Prefixes that may become nodes: the rows of candidate c are `members[low[c]:high[c]]`."""

    token: IntArray
    parent: IntArray
    level: IntArray
    low: IntArray
    high: IntArray
    score: FloatArray


@njit(cache=True)
def _expand(
    rows: Rows, members: IntArray, low: int, high: int, node: int, level: int, scale: float, made: int,
    c: _Candidates, groups: _Groups,
) -> int:  # fmt: skip
    """Make a candidate of each token that follows at `level` in the rows `members[low:high]`; return how many exist.

    A candidate scores `scale` times its weight.
    """
    count = _group_rows(rows, members, low, high, level, groups)
    for group in range(count):
        c.token[made + group] = groups.slot_token[groups.slot[group]]
        c.parent[made + group], c.level[made + group] = node, level + 1
        c.score[made + group] = min(scale * groups.weight[group], 1.0)
    _split_rows(members, low, high, groups, count)
    for group in range(count):
        c.low[made + group] = groups.first[group]
        c.high[made + group] = groups.first[group] + groups.rows[group]
    return made + count


@njit(cache=True)
def best_nodes(rows: Rows, limit: int, doubt: float) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the `limit` prefixes of the rows that are most probable, as a tree.

    A first token's score is the weight of the rows that begin with it. Behind that, a prefix passes its score on to its
    continuations by their part of its weight, times n / (n + doubt) where n rows have it: what was seen once is likely
    to go on otherwise. So no score exceeds that of the prefix extended, and the result is exactly the prefix-closed top
    `limit`; with `doubt` 0, scores are shares of the weight.

    Args:
        rows: what followed.
        limit: nodes at most.
        doubt: rows that are imagined to go on in some other way, at every prefix.

    Returns:
        tokens int32[N], parents int32[N], and scores float32[N], at most 1.
    """
    count, depth = rows.tokens.shape
    room = count * depth + 1
    c = _Candidates(
        np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32),
        np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.float32),
    )  # fmt: skip
    groups = _room_for_groups(count, 0)
    members, heap = np.arange(count).astype(np.int32), np.empty(room, np.int32)
    tokens, parents, scores = np.empty(limit, np.int32), np.empty(limit, np.int32), np.empty(limit, np.float32)
    made = _expand(rows, members, 0, count, -1, 0, 1.0, 0, c, groups) if count else 0
    size, node = 0, 0
    for candidate in range(made):
        heap[size] = candidate
        size += 1
        sift_up(heap, size, c.score)
    while node < limit and size:
        best = pop(heap, size, c.score)
        size -= 1
        tokens[node], parents[node], scores[node] = c.token[best], c.parent[best], c.score[best]
        if c.level[best] < depth:
            before = made
            low, high = c.low[best], c.high[best]
            scale = c.score[best] / _weight_of(rows, members, low, high) * (high - low) / (high - low + doubt)
            made = _expand(rows, members, low, high, node, c.level[best], scale, made, c, groups)
            for candidate in range(before, made):
                heap[size] = candidate
                size += 1
                sift_up(heap, size, c.score)
        node += 1
    return tokens[:node].copy(), parents[:node].copy(), scores[:node].copy()
