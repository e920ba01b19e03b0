"""Count a corpus into a tri-gram table, in bounded memory.

Every few million tokens, the tri-grams are sorted, counted and written to disk as a sorted run; at the end the runs are
merged one range of keys at a time. Works on symbols (tokens and the separator after each document) and the table's
arrays. Does not depend on text files, or on what the table is used for.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.errors import StoreError, UsageError
from foredraft.graph.tree import I64
from foredraft.index.datastore import Progress
from foredraft.index.storage import StoreWriter, write_store
from foredraft.index.suffix_array import Symbols
from foredraft.index.trigram import FULL_PROBABILITY, KIND, UNIGRAM_KEEP, array_dtypes

U64 = npt.NDArray[np.uint64]

MAX_VOCABULARY = (1 << 21) - 1  # a key packs three tokens, or two and the end-of-document mark, into 63 bits
MAX_ENTRIES = (1 << 32) - 1  # offsets are uint32
_SATURATED = (1 << 32) - 1
_RECORD = np.dtype([("key", np.uint64), ("count", np.uint32)])  # of a sorted run on disk, which fits in memory


def count_trigrams(
    blocks: Iterable[Symbols], tokenizer_hash: str, vocabulary: int, out: str | os.PathLike[str], *, keep: int = 12,
    eos_token_id: int | None = None, overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None, progress: Progress | None = None, at_once: int = 4 << 20,
) -> None:  # fmt: skip
    """Count the documents' tri-grams and write them as a table; none spans two documents.

    `blocks` are from `tokenize` or `shard_symbols`; `vocabulary` is their separator, and all ids are below it. Of a
    bigram, at most `keep` successors are stored, 1 to 255. The arrays do not depend on the block boundaries;
    `eos_token_id` and `metadata`, JSON values, are recorded beside them.

    `progress` is called with the number of tri-grams merged, and may raise to stop. `at_once` tokens are counted, and
    as many distinct tri-grams merged, in memory, at about 60 bytes each. UsageError for an argument out of range, or
    documents without any token; StoreError for too many tri-grams, and as `write_store`.
    """
    if not 1 <= vocabulary <= MAX_VOCABULARY:
        raise UsageError(f"A table holds vocabularies of 1 to {MAX_VOCABULARY} tokens; {vocabulary} were given.")
    if not 1 <= keep <= 255:  # counts of successors must fit a byte
        raise UsageError(f"keep is {keep}; give the number of successors to keep of a bigram, 1 to 255.")
    bits = vocabulary.bit_length()
    read = tokens = 0
    runs: list[Path] = []
    with write_store(
        out, KIND, tokenizer_hash=tokenizer_hash, vocabulary=vocabulary, metadata=metadata, overwrite=overwrite
    ) as writer:
        for symbols in _chunks(blocks, at_once):
            new = symbols[2 if runs else 0 :]
            ends = int(np.count_nonzero(new == vocabulary))
            read, tokens = read + ends, tokens + len(new) - ends
            runs.append(writer.folder / f"run-{len(runs)}")
            _write_run(runs[-1], symbols, vocabulary, bits)
        if not tokens:
            raise UsageError("The inputs hold no text, so there is nothing to count. Give files with text in them.")
        table = _TableWriter(writer, vocabulary, bits, keep)
        done, total = 0, sum(map(_length, runs))
        for keys, counts, records in _merged(runs, bits, at_once):
            table.add(keys, counts)
            if writer.length("tokens") > MAX_ENTRIES:
                raise StoreError(
                    f"{out} would keep more than {MAX_ENTRIES} tri-grams, the most a table holds. Use less text, or "
                    f"keep fewer than {keep} successors."
                )
            done += records
            if progress is not None:
                progress("merging", done, total)
        table.finish()
        writer.metadata |= {
            "documents": read, "tokens": tokens, "distinct_trigrams": table.distinct,
            "keep": keep, "eos_token_id": eos_token_id,
        }  # fmt: skip


def _chunks(blocks: Iterable[Symbols], length: int) -> Iterator[npt.NDArray[Any]]:
    """Yield the blocks in chunks that begin with the last two symbols before: each window of three is in one chunk."""
    held: list[npt.NDArray[Any]] = [np.empty(0, np.uint16)]
    for block in blocks:
        held.append(block)
        if sum(map(len, held)) >= max(3, length):
            chunk = np.concatenate(held)
            yield chunk
            held = [chunk[-2:].copy()]
    yield np.concatenate(held)


def _write_run(path: Path, symbols: npt.NDArray[Any], end: int, bits: int) -> None:
    """Count all windows whose first two symbols are tokens, and write their distinct keys, sorted, with the counts.

    The key of `a, b, c` is `a << 2 * bits | b << bits | c`. A last symbol `end` means that a document ended with
    `a, b`: not a tri-gram, but an occurrence of `b` after `a`.
    """
    inside = symbols != end
    wide = symbols.astype(np.uint64)
    shift = np.uint64(bits)
    keys = ((wide[:-2] << shift | wide[1:-1]) << shift | wide[2:])[inside[:-2] & inside[1:-1]]
    keys, counts = np.unique(keys, return_counts=True)
    records = np.empty(len(keys), _RECORD)
    records["key"], records["count"] = keys, counts
    with path.open("wb") as file:  # tofile() does not report a full disk as such
        file.write(records.view(np.uint8).data)


def _merged(runs: Sequence[Path], bits: int, at_once: int) -> Iterator[tuple[U64, I64, int]]:
    """Merge the runs one range of keys at a time, never cutting between keys that differ in the lowest `bits` only.

    The ranges are chosen from samples of the runs, so they hold about `at_once` records for any text. Yields sorted
    distinct keys, their counts over all runs, and the number of records merged.
    """
    # runs are read, not mapped: mapped pages would count as this process's memory until the system reclaims them
    shift, stride = np.uint64(bits), max(1, min(4096, at_once // 16))
    samples = np.sort(np.concatenate([np.fromfile(run, _RECORD)["key"][::stride].copy() for run in runs]))
    every = max(1, at_once // stride)
    bounds = np.unique(samples[every::every] >> shift << shift)
    splits = [[0, *np.searchsorted(np.fromfile(run, _RECORD)["key"], bounds), _length(run)] for run in runs]
    for starts, stops in itertools.pairwise(zip(*splits, strict=True)):
        parts = [
            np.fromfile(run, _RECORD, stop - start, offset=start * _RECORD.itemsize)
            for run, start, stop in zip(runs, starts, stops, strict=True)
        ]
        records = np.concatenate(parts)
        records = records[np.argsort(records["key"])]
        keys, _, counts = _groups(records["key"], records["count"])
        yield keys, counts, len(records)


def _length(run: Path) -> int:
    return run.stat().st_size // _RECORD.itemsize


def _groups(keys: U64, counts: npt.NDArray[Any]) -> tuple[U64, I64, I64]:
    """Return the distinct values of sorted keys, where each begins and the last ends, and the sum of its counts."""
    starts = np.append(True, keys[1:] != keys[:-1])[: len(keys)]
    bounds = np.append(np.flatnonzero(starts), len(keys))
    return keys[bounds[:-1]], bounds, np.add.reduceat(counts, bounds[:-1], dtype=np.int64)


class _TableWriter:
    """Appends merged counts to a store as a table's arrays, in one pass."""

    def __init__(self, writer: StoreWriter, vocabulary: int, bits: int, keep: int) -> None:
        self.writer, self.vocabulary, self.keep = writer, vocabulary, keep
        self.shift, self.mask = np.uint64(bits), np.uint64((1 << bits) - 1)
        self.dtype = array_dtypes(vocabulary)["tokens"]
        self.distinct = 0
        self.row_counts, self.unigram_lengths, self.unigram_totals = np.zeros((3, vocabulary), np.int64)
        self.held_pairs, self.held_counts = np.empty(0, np.uint64), np.empty(0, np.int64)
        for name, dtype in array_dtypes(vocabulary).items():
            writer.append(name, np.zeros(1 if name == "offsets" else 0, dtype))

    def add(self, keys: U64, counts: I64) -> None:
        """Add merged keys, ascending across calls; all keys of a bigram must be in one call."""
        pairs = keys >> self.shift
        distinct, _, totals = _groups(pairs, counts)
        self._add_pairs(distinct, totals)
        followed = (keys & self.mask) != self.vocabulary
        keys, counts, pairs = keys[followed], counts[followed], pairs[followed]
        self.distinct += len(keys)
        rows, bounds, totals = _groups(pairs, counts)
        self.row_counts += np.bincount((rows >> self.shift).astype(np.int64), minlength=self.vocabulary)
        self.writer.append("second", (rows & self.mask).astype(self.dtype))
        self.writer.append("totals", np.minimum(totals, _SATURATED).astype(np.uint32))
        before = self.writer.length("tokens")
        lengths = self._append_successors("", bounds, keys & self.mask, counts, totals, self.keep)
        self.writer.append("offsets", (before + np.cumsum(lengths)).astype(np.uint32))

    def _append_successors(self, prefix: str, bounds: I64, tokens: U64, counts: I64, totals: I64, keep: int) -> I64:
        """Append each row's most frequent successors; return the number kept for each row."""
        lengths = np.minimum(np.diff(bounds), keep)
        rows = np.repeat(np.arange(len(lengths)), np.diff(bounds))
        order = np.lexsort((-counts, rows))  # row by row, ties in the order of the tokens
        kept = order[np.arange(len(counts)) - bounds[rows] < keep]
        self.writer.append(prefix + "tokens", tokens[kept].astype(self.dtype))
        shares = np.rint(counts[kept] * FULL_PROBABILITY / totals[rows[kept]])  # halves stay exact
        self.writer.append(prefix + "probabilities", np.maximum(shares, 1).astype(np.uint16))
        return lengths

    def _add_pairs(self, pairs: U64, counts: I64, last: bool = False) -> None:
        """Append the successors of every single token that is complete, and keep the remaining pairs for later."""
        pairs, counts = np.concatenate([self.held_pairs, pairs]), np.concatenate([self.held_counts, counts])
        firsts = pairs >> self.shift
        ready = len(pairs) if last or not len(pairs) else int(np.searchsorted(firsts, firsts[-1]))
        self.held_pairs, self.held_counts = pairs[ready:], counts[ready:]
        distinct, bounds, totals = _groups(firsts[:ready], counts[:ready])
        rows, seconds = distinct.astype(np.int64), pairs[:ready] & self.mask
        self.unigram_totals[rows] = totals
        self.unigram_lengths[rows] = self._append_successors(
            "unigram_", bounds, seconds, counts[:ready], totals, UNIGRAM_KEEP
        )

    def finish(self) -> None:
        """Append the arrays known only at the end."""
        self._add_pairs(np.empty(0, np.uint64), np.empty(0, np.int64), last=True)
        self.writer.append("first", np.concatenate([[0], np.cumsum(self.row_counts)]).astype(np.uint32))
        self.writer.append("unigram_offsets", np.concatenate([[0], np.cumsum(self.unigram_lengths)]).astype(np.uint32))
        self.writer.append("unigram_totals", np.minimum(self.unigram_totals, _SATURATED).astype(np.uint32))
