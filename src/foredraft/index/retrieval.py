"""Retrieval: from where a context occurs to what followed it there.

He et al., "REST: Retrieval-Based Speculative Decoding" (NAACL 2024), section 3. What follows the occurrences of the
context's last tokens is collected as rows of tokens, each with a weight. Several lengths of context are several levels:
each has a share of the weight. Knows arrays; not whose text they are, how levels come to be trusted (index/backoff.py),
nor the tree that is made of the rows (index/prefixes.py).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.tree import IntArray
from foredraft.index.recent_text import RecentText
from foredraft.index.suffix_array import SuffixArrays

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

STORE, OWN, SHARED, FORESEEN = 0, 1, 2, 3
"""Where a level's rows come from: occurrences in the datastore, in the sequence itself, in what other sequences have
shared; or what a neural drafter foresees, which occurs nowhere."""
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
