"""From shards of token ids to the segments of a datastore.

Knows where shards may be cut and how many tokens a segment may have. Does not know how a segment is sorted or written
(index/datastore.py), or how shards are made. A segment depends on the shards alone, wherever it is built.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foredraft.corpus.shards import KIND
from foredraft.errors import UsageError
from foredraft.index.datastore import Progress, SegmentEntry, write_segment
from foredraft.index.storage import open_store
from foredraft.index.suffix_array import Symbols

SEGMENT_TOKENS = 64 << 20
"""Sorting takes 12 bytes of memory a token (18 for vocabularies beyond 65,535), so this is 0.8 GB."""
_STEP = 1 << 20


@dataclass(frozen=True, slots=True)
class Stretch:
    """Whole documents of a shard: its symbols from `start` to `stop`."""

    shard: Path
    start: int
    stop: int

    def symbols(self) -> Symbols:
        """Return the symbols, mapped into memory.

        Raises:
            StoreError: the shard is missing or damaged.
        """
        return open_store(self.shard, KIND, check=False).arrays["tokens"][self.start : self.stop]


@dataclass(frozen=True, slots=True)
class SegmentBuilder:
    """Builds the segments of one store; picklable, so that other processes can.

    Attributes:
        folder: the store.
        tokenizer_hash: of the tokenizer whose ids the shards hold.
        vocabulary: its size.
    """

    folder: Path
    tokenizer_hash: str
    vocabulary: int

    def __call__(self, stretches: Sequence[Stretch], progress: Progress | None = None) -> SegmentEntry:
        """Sort and write the documents of `stretches` as one segment file.

        Raises:
            UsageError: there is no token in them.
            StoreError: a shard is damaged, or the folder cannot be written to.
        """
        return write_segment(
            self.folder,
            [stretch.symbols() for stretch in stretches],
            tokenizer_hash=self.tokenizer_hash,
            vocabulary=self.vocabulary,
            progress=progress,
        )


def plan_segments(shards: Sequence[Path], separator: int, most: int = SEGMENT_TOKENS) -> Iterator[list[Stretch]]:
    """Yield which documents make up each segment: as many as fit into `most` symbols, in order.

    A document longer than that has a segment of its own. Shards without documents are passed over.

    Args:
        shards: finished shards, in order.
        separator: stands behind every document.
        most: tokens and separators of a segment.

    Raises:
        UsageError: `most` is below 1.
        StoreError: a shard is missing or damaged.
    """
    if most < 1:
        raise UsageError(f"A segment is to have at most {most} tokens; give a number of at least 1.")
    group: list[Stretch] = []
    size = 0
    for shard in shards:
        symbols = open_store(shard, KIND, check=False).arrays["tokens"]
        start = 0
        while start < len(symbols):
            stop = _last_end(symbols, separator, start, min(start + most - size, len(symbols)))
            if stop == start and not group:
                stop = _next_end(symbols, separator, start)
            if stop > start:
                group.append(Stretch(shard, start, stop))
                size += stop - start
                start = stop
            if start < len(symbols):
                yield group
                group, size = [], 0
    if group:
        yield group


def _last_end(symbols: Symbols, separator: int, start: int, stop: int) -> int:
    """Return the place behind the last separator of `symbols[start:stop]`, or `start` if there is none."""
    while stop > start:
        low = max(start, stop - _STEP)
        ends = np.flatnonzero(symbols[low:stop] == separator)
        if len(ends):
            return low + int(ends[-1]) + 1
        stop = low
    return start


def _next_end(symbols: Symbols, separator: int, start: int) -> int:
    """Return the place behind the first separator from `start` on; the end of the shard if there is none."""
    for low in range(start, len(symbols), _STEP):
        ends = np.flatnonzero(symbols[low : low + _STEP] == separator)
        if len(ends):
            return low + int(ends[0]) + 1
    return len(symbols)
