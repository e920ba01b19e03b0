"""Where a sequence's last tokens occur, followed as it grows: in stored segments, in itself, in shared text.

Knows the texts that are searched; not how far their answers are trusted, nor what is drafted from them.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foredraft.contracts import TokenIds
from foredraft.graph.tree import IntArray
from foredraft.index.recent_text import RecentText, append, empty_text, occurrences, with_room
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


class Lookup:
    """One sequence's place in the texts.

    Attributes:
        ids: int64[n], what was read of the sequence.

    Args:
        segments: sorted texts.
        longest: the longest context that is looked up, in tokens.
        own: whether the sequence itself is searched.
    """

    def __init__(self, segments: Sequence[SuffixArrays], longest: int, *, own: bool = True) -> None:
        self._segments = segments
        self._longest = longest
        self._ranges = np.zeros((len(segments), longest + 1, 2), np.int64)
        self._own = empty_text() if own else None
        self._found: list[tuple[int, RecentText, IntArray, IntArray]] = []
        self.ids: TokenIds = np.empty(0, np.int64)

    def read(self, ids: TokenIds) -> None:
        """Go on to the end of `ids`, int64[n], which begin with what was read before."""
        new = ids[len(self.ids) :]
        for text, ranges in zip(self._segments, self._ranges, strict=True):
            follow(text, ranges, new[-self._longest :])
        if self._own is not None:
            self._own = with_room(self._own, len(new))
            append(self._own, new)
        self.ids = ids

    def stored_counts(self) -> npt.NDArray[np.int64]:
        """Return how often each length of context occurs in the segments, as `levels_of` takes it."""
        counts = np.zeros((3, self._longest + 1), np.int64)
        counts[STORE] = (self._ranges[:, :, 1] - self._ranges[:, :, 0]).sum(axis=0)
        return counts

    def levels(self, shared: RecentText | None, most: int, shortest: int, only_longest: bool = False) -> Levels:
        """Return which occurrences of the last tokens there are.

        Args:
            shared: what others have said; None is not searched.
            most: occurrences at most that are looked at in a recent text.
            shortest: the shortest context.
            only_longest: no other than the longest that occurs anywhere.
        """
        counts = self.stored_counts()
        context, self._found = self.ids[-self._longest :], []
        for source, text in ((OWN, self._own), (SHARED, shared)):
            if text is not None:
                places, lengths = occurrences(text, context, self._longest, most)
                count_lengths(lengths, counts[source])
                self._found.append((source, text, places, lengths))
        return levels_of(counts, shortest, only_longest)

    def rows(self, levels: Levels, samples: int, depth: int) -> Rows:
        """Return what followed at the levels that `levels` gave, `depth` tokens of it, in about `samples` rows."""
        allot(levels, samples)
        rows = self.stored_rows(levels, depth)
        for source, text, places, lengths in self._found:
            gather_from_text(text, source, places, lengths, levels, rows)
        return rows

    def stored_rows(self, levels: Levels, depth: int) -> Rows:
        """Return rows for the levels, as allotted, those of the segments filled in."""
        rows = rows_for(levels, depth)
        before = np.zeros(self._longest + 1, np.int64)
        for text, ranges in zip(self._segments, self._ranges, strict=True):
            gather_from_store(text, ranges, before, levels, rows)
        return rows
