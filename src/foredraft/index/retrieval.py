"""Retrieval: from where a context occurs to the tree of what most probably follows it.

He et al., "REST: Retrieval-Based Speculative Decoding" (NAACL 2024), section 3. What follows the occurrences of the
context's last tokens is collected as rows of tokens, each with a weight, and the tree keeps the most probable prefixes.
Several lengths of context are several levels: each has a share of the weight. Knows arrays; not whose text they are,
and not how levels come to be trusted (index/backoff.py).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.heap import pop, sift_up
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.recent_text import RecentText
from foredraft.index.suffix_array import SuffixArrays

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

STORE, OWN, SHARED = 0, 1, 2
"""Where a level's occurrences lie: in the datastore, in the sequence itself, in what other sequences have shared."""
_NOTHING = -1


class Levels(NamedTuple):
    """Which occurrences are asked what follows, the most trusted first: one level for each length and source.

    Attributes:
        source: int64[M], STORE, OWN or SHARED.
        length: int64[M], tokens of context that match.
        occurrences: int64[M], how many there are.
        start: int64[M + 1]: the level's rows are `start[m]` to `start[m + 1]`.
        share: float64[M], the weight of all its rows together.
    """

    source: I64
    length: I64
    occurrences: I64
    start: I64
    share: F64


class Rows(NamedTuple):
    """What followed: tokens int32[R, D], -1 from where the document ended; weights float64[R]."""

    tokens: IntArray
    weights: F64


@njit(cache=True)
def levels_of(counts: I64, shortest: int, only_longest: bool) -> Levels:
    """Choose the levels.

    A length whose occurrences are those of the next longer one says nothing new and is left out.

    Args:
        counts: int64[3, longest + 1]: how often the context's last L tokens occur, by source.
        shortest: the least L.
        only_longest: take the greatest L that occurs anywhere, and no other.

    Returns:
        The levels by descending length; at equal length the sequence itself first, then what is shared. Each has a
        share by its count, as if its occurrences lay in one text, and no rows yet.
    """
    longest = counts.shape[1] - 1
    most = 3 * longest
    source, length, count = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    made = 0
    for matched in range(longest, shortest - 1, -1):
        for kind in (OWN, SHARED, STORE):
            occurs = counts[kind, matched]
            if occurs == 0 or (matched < longest and occurs == counts[kind, matched + 1]):
                continue
            source[made], length[made], count[made] = kind, matched, occurs
            made += 1
        if only_longest and made:
            break
    share = count[:made] / max(count[:made].sum(), 1)
    return Levels(source[:made], length[:made], count[:made], np.zeros(made + 1, np.int64), share)


@njit(cache=True)
def allot(levels: Levels, samples: int) -> None:
    """Give the levels rows in proportion to their shares, about `samples` in all, and none more than it can fill."""
    for m in range(len(levels.share)):
        rows = min(levels.occurrences[m], int(np.rint(levels.share[m] * samples)))
        levels.start[m + 1] = levels.start[m] + rows


@njit(cache=True)
def rows_for(levels: Levels, depth: int) -> Rows:
    """Return rows for the levels, without tokens yet, each with an equal part of its level's share."""
    total = levels.start[-1]
    rows = Rows(np.full((total, depth), _NOTHING, np.int32), np.empty(total, np.float64))
    for m in range(len(levels.share)):
        low, high = levels.start[m], levels.start[m + 1]
        if low < high:
            rows.weights[low:high] = levels.share[m] / (high - low)
    return rows


@njit(cache=True)
def gather_from_store(text: SuffixArrays, ranges: I64, before: I64, levels: Levels, rows: Rows) -> None:
    """Fill in what follows in one segment.

    A level's rows are spread evenly over its occurrences in all segments, taken one behind the other.

    Args:
        text: the segment.
        ranges: int64[longest + 1, 2], from `follow`.
        before: int64[longest + 1], how many occurrences of each length lie in the segments before this one; this
            one's are added.
        levels: what is asked.
        rows: changed in place.
    """
    separator, n = len(text.first) - 1, len(text.symbols)
    depth = rows.tokens.shape[1]
    places = np.empty(len(rows.tokens), np.int64)
    for m in range(len(levels.source)):
        start, taken = levels.start[m], levels.start[m + 1] - levels.start[m]
        if levels.source[m] != STORE or taken == 0:
            continue
        length = levels.length[m]
        low, skipped = ranges[length, 0], before[length]
        here = ranges[length, 1] - low
        for row in range(taken):  # apart from reading the text, so that the memory is asked for many rows at once
            occurrence = (2 * row + 1) * levels.occurrences[m] // (2 * taken) - skipped
            places[row] = text.suffixes[low + occurrence] + length if 0 <= occurrence < here else n
        for row in range(taken):
            place = places[row]
            for i in range(min(depth, n - place) if place >= 0 else 0):  # a damaged file may say anything
                token = text.symbols[place + i]
                if token >= separator:
                    break
                rows.tokens[start + row, i] = token
    for length in range(len(before)):
        before[length] += ranges[length, 1] - ranges[length, 0]


@njit(cache=True)
def gather_from_text(
    text: RecentText, source: int, places: IntArray, lengths: IntArray, levels: Levels, rows: Rows
) -> None:
    """Fill in what followed in a recent text at `places`, newest first, where `lengths` tokens match; see `Rows`."""
    depth = rows.tokens.shape[1]
    end = int(text.length[0])
    for m in range(len(levels.source)):
        if levels.source[m] != source:
            continue
        row, stop = levels.start[m], levels.start[m + 1]
        for k in range(len(places)):
            if row == stop:
                break
            if lengths[k] < levels.length[m]:
                continue
            for i in range(min(depth, end - places[k])):
                token = text.symbols[places[k] + i]
                if token < 0:
                    break
                rows.tokens[row, i] = token
            row += 1


@njit(cache=True)
def count_lengths(lengths: IntArray, counts: I64) -> None:
    """Set `counts[L]`, int64[longest + 1], to how many of `lengths` are at least L."""
    counts[:] = 0
    for length in lengths:
        counts[length] += 1
    for length in range(len(counts) - 2, -1, -1):
        counts[length] += counts[length + 1]


class _Candidates(NamedTuple):
    """Prefixes that may become nodes: the rows of candidate c are `members[low[c]:high[c]]`."""

    token: IntArray
    parent: IntArray
    level: IntArray
    low: IntArray
    high: IntArray
    score: FloatArray


class _Scratch(NamedTuple):
    """Working memory of `_expand`: a hash table from token to group, and the groups' sums and members."""

    slot_token: IntArray
    slot_group: IntArray
    group_slot: IntArray
    group_size: IntArray
    group_weight: F64
    row_group: IntArray
    reordered: IntArray


@njit(cache=True)
def _expand(
    rows: Rows, members: IntArray, low: int, high: int, node: int, level: int, scale: float, made: int,
    candidates: _Candidates, scratch: _Scratch,
) -> int:  # fmt: skip
    """Make a candidate of each token that follows at `level` in the rows `members[low:high]`; return how many exist.

    A candidate scores `scale` times its weight. The rows are reordered so that each candidate's lie together.
    """
    mask = len(scratch.slot_token) - 1
    groups = 0
    for i in range(low, high):
        token = rows.tokens[members[i], level]
        scratch.row_group[i] = -1
        if token < 0:
            continue
        slot = (np.int64(token) * 40503) & mask
        while scratch.slot_token[slot] >= 0 and scratch.slot_token[slot] != token:
            slot = (slot + 1) & mask
        if scratch.slot_token[slot] < 0:
            scratch.slot_token[slot], scratch.slot_group[slot] = token, groups
            scratch.group_slot[groups], scratch.group_size[groups], scratch.group_weight[groups] = slot, 0, 0.0
            groups += 1
        group = scratch.slot_group[slot]
        scratch.row_group[i] = group
        scratch.group_size[group] += 1
        scratch.group_weight[group] += rows.weights[members[i]]
    at = low
    for group in range(groups):
        slot = scratch.group_slot[group]
        c = made + group
        candidates.token[c], candidates.parent[c], candidates.level[c] = scratch.slot_token[slot], node, level + 1
        candidates.low[c], candidates.high[c] = at, at
        candidates.score[c] = min(scale * scratch.group_weight[group], 1.0)
        at += scratch.group_size[group]
        scratch.slot_token[slot] = -1
    for i in range(low, high):
        group = scratch.row_group[i]
        if group >= 0:
            scratch.reordered[candidates.high[made + group]] = members[i]
            candidates.high[made + group] += 1
    members[low:at] = scratch.reordered[low:at]
    return made + groups


@njit(cache=True)
def _weight(rows: Rows, members: IntArray, low: int, high: int) -> float:
    total = 0.0
    for i in range(low, high):
        total += rows.weights[members[i]]
    return total


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
    slots = 16
    while slots < 2 * count:
        slots *= 2
    scratch = _Scratch(
        np.full(slots, -1, np.int32), np.empty(slots, np.int32), np.empty(count, np.int32), np.empty(count, np.int32),
        np.empty(count, np.float64), np.empty(count, np.int32), np.empty(count, np.int32),
    )  # fmt: skip
    members, heap = np.arange(count).astype(np.int32), np.empty(room, np.int32)
    tokens, parents, scores = np.empty(limit, np.int32), np.empty(limit, np.int32), np.empty(limit, np.float32)
    made = _expand(rows, members, 0, count, -1, 0, 1.0, 0, c, scratch) if count else 0
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
            scale = c.score[best] / _weight(rows, members, low, high) * (high - low) / (high - low + doubt)
            made = _expand(rows, members, low, high, node, c.level[best], scale, made, c, scratch)
            for candidate in range(before, made):
                heap[size] = candidate
                size += 1
                sift_up(heap, size, c.score)
        node += 1
    return tokens[:node].copy(), parents[:node].copy(), scores[:node].copy()
