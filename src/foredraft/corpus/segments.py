"""From shards of token ids to the segments of a datastore.

Knows where shards may be cut and how many tokens a segment may have. Does not know how a segment is sorted or written
(index/datastore.py), or how shards are made. A segment depends on the shards alone, wherever it is built.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foredraft.corpus.shards import KIND
from foredraft.errors import UsageError
from foredraft.index.datastore import Progress, SegmentEntry, write_segment
from foredraft.index.storage import open_store
from foredraft.index.suffix_array import Symbols

SEGMENT_TOKENS = 64 << 20
"""Sorting takes 12 bytes of memory a token (18 for vocabularies beyond 65,535), so this is 0.8 GB."""
_STEP = 1 << 20


class Stretch(NamedTuple):
    """Whole documents of a shard: its symbols from `start` to `stop`."""

    shard: Path
    start: int
    stop: int


def build_segment(
    stretches: Sequence[Stretch],
    folder: Path,
    tokenizer_hash: str,
    vocabulary: int,
    progress: Progress | None = None,
) -> SegmentEntry:
    """Sort and write the documents of `stretches` as one segment file; otherwise as `write_segment`.

    Raises:
        StoreError: a shard is damaged, or the folder cannot be written to.
    """
    texts = [_symbols(shard)[start:stop] for shard, start, stop in stretches]
    return write_segment(folder, texts, tokenizer_hash=tokenizer_hash, vocabulary=vocabulary, progress=progress)


def plan_segments(shards: Sequence[Path], separator: int, most: int = SEGMENT_TOKENS) -> Iterator[list[Stretch]]:
    """Yield which documents make up each segment: as many as fit into `most` symbols, in order.

    A document longer than that has a segment of its own. Shards without documents are passed over.

    Args:
        shards: finished shards, in order.
        separator: stands after every document.
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
        ends = _document_ends(_symbols(shard), separator)
        start = 0
        while len(ends) and start < ends[-1]:
            fitting = int(np.searchsorted(ends, start + most - size, "right"))
            first = int(np.searchsorted(ends, start, "right"))
            if fitting > first or not group:
                stop = int(ends[max(fitting - 1, first)])
                group.append(Stretch(shard, start, stop))
                size, start = size + stop - start, stop
            if start < ends[-1]:
                yield group
                group, size = [], 0
    if group:
        yield group


def _symbols(shard: Path) -> Symbols:
    """Return a shard's symbols, mapped into memory."""
    return open_store(shard, KIND, check=False).arrays["tokens"]


def _document_ends(symbols: Symbols, separator: int) -> npt.NDArray[np.int64]:
    """Return the places after each separator; found in steps, so that no mask of a whole shard is made."""
    steps = range(0, len(symbols), _STEP)
    return np.concatenate([[0], *(np.flatnonzero(symbols[at : at + _STEP] == separator) + at + 1 for at in steps)])[1:]
