"""Where a sequence's last tokens occur, followed as it grows: in stored segments, in itself, in shared text.

Knows the texts that are searched, and how far each kind of match is trusted; not what is drafted from the answers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.contracts import TokenIds
from foredraft.index.backoff import Trust, weigh
from foredraft.index.recent_text import NO_TEXT, RecentText, append, empty_text, occurrences, with_room
from foredraft.index.retrieval import (
    OWN,
    SHARED,
    STORE,
    Levels,
    Rows,
    allot,
    count_lengths,
    gather_from_store,
    gather_from_text,
    levels_of,
    rows_for,
)
from foredraft.index.suffix_array import SuffixArrays, follow


class Question(NamedTuple):
    """What is asked of the texts.

    Attributes:
        shortest: tokens of the shortest context.
        only_longest: no other context than the longest that occurs anywhere.
        weighs: levels are weighed by how far each kind is trusted; else by how often they occur.
        samples: occurrences that are looked at, about; in a recent text, at most.
        depth: tokens of what follows that are taken.
    """

    shortest: int
    only_longest: bool
    weighs: bool
    samples: int
    depth: int


@njit(cache=True)
def _stored_counts(ranges: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how often each length of context occurs in the segments, int64[3, longest + 1], as `levels_of` takes it.

    Args:
        ranges: int64[S, longest + 1, 2], from `follow`, for each segment.
    """
    counts = np.zeros((3, ranges.shape[1]), np.int64)
    for segment in range(len(ranges)):
        for length in range(ranges.shape[1]):
            counts[STORE, length] += ranges[segment, length, 1] - ranges[segment, length, 0]
    return counts


@njit(cache=True)
def retrieve(
    ranges: npt.NDArray[np.int64], own: RecentText, shared: RecentText, context: TokenIds, trust: Trust, asked: Question
) -> tuple[Levels, Rows]:
    """Return which occurrences of a context there are, and what followed them in the recent texts.

    One compiled call, as each costs time before it begins: between two passes every cache is cold.

    Args:
        ranges: int64[S, longest + 1, 2], where it occurs in stored segments, whose rows are left to be filled in.
        own: the sequence itself; empty where it is not searched.
        shared: what others have said; likewise.
        context: int64[n], the last tokens, at most `longest`.
        trust: how far each kind of level is trusted.
        asked: what is wanted.
    """
    longest = ranges.shape[1] - 1
    counts = _stored_counts(ranges)
    own_places, own_lengths = occurrences(own, context, longest, asked.samples)
    shared_places, shared_lengths = occurrences(shared, context, longest, asked.samples)
    count_lengths(own_lengths, counts[OWN])
    count_lengths(shared_lengths, counts[SHARED])
    levels = levels_of(counts, asked.shortest, asked.only_longest)
    if asked.weighs:
        weigh(levels, trust)
    allot(levels, asked.samples)
    rows = rows_for(levels, asked.depth)
    gather_from_text(own, OWN, own_places, own_lengths, levels, rows)
    gather_from_text(shared, SHARED, shared_places, shared_lengths, levels, rows)
    return levels, rows


class Lookup:
    """One sequence's place in the texts.

    Attributes:
        ids: int64[n], what was read of the sequence.
        ranges: int64[S, longest + 1, 2], where the last tokens occur in each stored segment, as `follow` keeps it.

    Args:
        segments: sorted texts.
        longest: the longest context that is looked up, in tokens.
        own: whether the sequence itself is searched.
    """

    def __init__(self, segments: Sequence[SuffixArrays], longest: int, *, own: bool = True) -> None:
        self._segments = list(segments)
        self._longest = longest
        self.ranges = np.zeros((len(segments), longest + 1, 2), np.int64)
        self._own = empty_text() if own else None
        self.ids: TokenIds = np.empty(0, np.int64)

    def read(self, ids: TokenIds) -> None:
        """Go on to the end of `ids`, int64[n], which begin with what was read before."""
        new = ids[len(self.ids) :]
        for text, ranges in zip(self._segments, self.ranges, strict=True):
            follow(text, ranges, ids[-self._longest :], len(new))
        if self._own is not None:
            self._own = with_room(self._own, len(new))
            append(self._own, new)
        self.ids = ids

    def stored_counts(self) -> npt.NDArray[np.int64]:
        """Return how often each length of context occurs in the segments, as `levels_of` takes it."""
        return _stored_counts(self.ranges)

    def ask(self, shared: RecentText | None, trust: Trust, asked: Question) -> tuple[Levels, Rows]:
        """Return which occurrences of the last tokens there are, and what followed them.

        Args:
            shared: what others have said; None is not searched.
            trust: how far each kind of level is trusted.
            asked: what is wanted.
        """
        own = NO_TEXT if self._own is None else self._own
        context = self.ids[-self._longest :]
        levels, rows = retrieve(self.ranges, own, NO_TEXT if shared is None else shared, context, trust, asked)
        self._gather_stored(levels, rows)
        return levels, rows

    def stored_rows(self, levels: Levels, depth: int) -> Rows:
        """Return rows for the levels, as allotted, those of the segments filled in."""
        rows = rows_for(levels, depth)
        self._gather_stored(levels, rows)
        return rows

    def _gather_stored(self, levels: Levels, rows: Rows) -> None:
        before = np.zeros(self._longest + 1, np.int64)
        for text, ranges in zip(self._segments, self.ranges, strict=True):
            gather_from_store(text, ranges, before, levels, rows)
