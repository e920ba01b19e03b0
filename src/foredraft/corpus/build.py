"""Count a corpus into a tri-gram table, in bounded memory.

Text is taken a piece at a time; every few million tokens, the tri-grams are sorted, counted and put on disk as a
sorted run beside the output; at the end the runs are merged a range of keys at a time. Knows documents, tokens and
the table's arrays. Does not know files' formats (corpus/shards.py), models, or what the table is used for.
"""

import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from numba import njit
from tokenizers import Tokenizer

from foredraft.corpus.fingerprint import tokenizer_hash
from foredraft.corpus.shards import Document, TokenPiece, tokenize_documents
from foredraft.errors import StoreError, UsageError
from foredraft.index.storage import StoreWriter
from foredraft.index.trigram import COMMON_KEEP, FULL_PROBABILITY, KIND, UNIGRAM_KEEP, array_dtypes, token_dtype

MAX_VOCABULARY = (1 << 21) - 1
"""Three tokens and a mark for "end of document" are packed into 63 bits."""
MAX_ENTRIES = (1 << 32) - 1
"""Offsets are uint32."""
MAX_KEEP = 255
_SATURATED = (1 << 32) - 1
_TOLD_BYTES = 1 << 18
_NOT_LIBRARY = frozenset(
    ["test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "turtledemo"]
)

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How far a build is.

    Attributes:
        phase: reading, then merging.
        done: reading: bytes consumed, as in `Document.consumed`; merging: records merged.
        total: merging: records to merge; reading: None, as only the caller knows the inputs.
        tokens: tokens read so far.
    """

    phase: Literal["reading", "merging"]
    done: int
    total: int | None
    tokens: int


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What was built: documents and tokens read, distinct tri-grams met, rows and entries kept, bytes of the file."""

    path: Path
    documents: int
    tokens: int
    distinct_trigrams: int
    bigrams: int
    trigrams: int
    bytes: int


def standard_library_sources() -> list[Path]:
    """Return the Python files of the running interpreter's standard library, without its tests: about 13 MB of text."""
    found = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return found


def build_trigram_table(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    vocabulary: int,
    out: str | os.PathLike[str],
    *,
    keep: int = 12,
    eos_token_id: int | None = None,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
    chunk_tokens: int = 4 << 20,
    merge_records: int = 4 << 20,
) -> BuildReport:
    """Count the documents' tri-grams and write them as a table; none spans two documents.

    The file depends on the documents and `keep` alone, not on `chunk_tokens` and `merge_records`. On any failure, the
    old file stays and the temporary files go.

    Args:
        documents: from `read_documents` or `text_documents`.
        tokenizer: turns them into ids.
        vocabulary: no id reaches it.
        out: the file to write; `<out>.lock` and, while building, `<out>.building` lie beside it.
        keep: the most successors kept of a bigram, 1 to 255.
        eos_token_id: appended to every document that does not end in it; None for none.
        overwrite: replace a file that exists.
        metadata: JSON values to note in the file.
        progress: called now and then; may raise to stop.
        chunk_tokens: tokens counted in memory before they are put on disk; about 40 bytes each.
        merge_records: distinct tri-grams merged in memory; about 60 bytes each.

    Raises:
        UsageError: an argument out of range, a token past the vocabulary, or documents without any token.
        StoreError: `out` exists, is being written by another process, or cannot be written.
    """
    _check_arguments(vocabulary, keep, eos_token_id)
    tell = progress or (lambda _: None)
    bits = vocabulary.bit_length()
    stride = max(1, min(4096, merge_records // 16))
    token_counts = np.zeros(vocabulary + 1, np.int64)
    runs: list[_Run] = []
    with StoreWriter(
        out,
        KIND,
        tokenizer_hash=tokenizer_hash(tokenizer),
        vocabulary=vocabulary,
        metadata=metadata,
        overwrite=overwrite,
    ) as writer:
        pieces = _told(tokenize_documents(documents, tokenizer), vocabulary, tell)
        for symbols in _symbol_chunks(pieces, vocabulary, eos_token_id, chunk_tokens):
            token_counts += np.bincount(symbols[2 if runs else 0 :], minlength=vocabulary + 1)
            runs.append(_spill(writer.folder, len(runs), *_count_trigrams(symbols, vocabulary, bits), stride))
        read, tokens = int(token_counts[vocabulary]), int(token_counts[:vocabulary].sum())
        if not tokens:
            raise UsageError("The inputs hold no text, so there is nothing to count. Give files with text in them.")
        table = _TableWriter(writer, vocabulary, bits, keep)
        done, total = 0, sum(run.length for run in runs)
        for keys, counts, records in _merged(runs, bits, max(1, merge_records // stride)):
            table.add(keys, counts)
            done += records
            tell(BuildProgress("merging", done, total, tokens))
        table.finish(token_counts[:vocabulary])
        writer.metadata |= {
            "documents": read,
            "tokens": tokens,
            "distinct_trigrams": table.distinct,
            "keep": keep,
            "eos_token_id": eos_token_id,
        }
    path = Path(out)
    return BuildReport(
        path, read, tokens, table.distinct, writer.length("second"), writer.length("tokens"), path.stat().st_size
    )


def _check_arguments(vocabulary: int, keep: int, eos_token_id: int | None) -> None:
    if not 1 <= vocabulary <= MAX_VOCABULARY:
        raise UsageError(f"A table holds vocabularies of 1 to {MAX_VOCABULARY} tokens; {vocabulary} were given.")
    if not 1 <= keep <= MAX_KEEP:
        raise UsageError(f"keep is {keep}; give the number of successors to keep of a bigram, 1 to {MAX_KEEP}.")
    if eos_token_id is not None and not 0 <= eos_token_id < vocabulary:
        raise UsageError(f"eos_token_id is {eos_token_id}, which is not below the vocabulary of {vocabulary}.")


# --- from documents to sorted runs


def _told(pieces: Iterable[TokenPiece], vocabulary: int, tell: Callable[[BuildProgress], None]) -> Iterator[TokenPiece]:
    """Pass the pieces on, refusing tokens past the vocabulary, and telling of progress."""
    tokens, consumed, told = 0, 0, -_TOLD_BYTES
    for piece in pieces:
        highest = int(piece.ids.max(initial=0))
        if highest >= vocabulary:
            raise UsageError(
                f"The tokenizer gave the id {highest}, and the vocabulary is {vocabulary}. Give at least {highest + 1}."
            )
        yield piece
        tokens, consumed = tokens + len(piece.ids), piece.consumed
        if consumed - told >= _TOLD_BYTES:
            told = consumed
            tell(BuildProgress("reading", told, None, tokens))
    tell(BuildProgress("reading", consumed, None, tokens))


def _symbol_chunks(pieces: Iterable[TokenPiece], end: int, eos: int | None, chunk_tokens: int) -> Iterator[U32]:
    """Yield the documents' tokens, each document followed by the symbol `end`, as uint32 chunks.

    Every chunk but the first begins with the last two symbols of the one before, so that each window of three symbols
    lies in exactly one chunk.
    """
    held: list[U32] = []
    size, last = 0, -1  # the last token of the document in progress, -1 before its first
    for piece in pieces:
        held.append(piece.ids)
        last = int(piece.ids[-1]) if len(piece.ids) else last
        if piece.complete and last >= 0:
            held.append(np.array([end] if eos is None or last == eos else [eos, end], np.uint32))
            last = -1
        size += len(piece.ids) + 2
        if size >= chunk_tokens and sum(map(len, held)) >= 3:
            chunk = np.concatenate(held)
            yield chunk
            held, size = [chunk[-2:].copy()], 2
    held.append(np.array([] if last < 0 else [end], np.uint32))
    yield np.concatenate(held)


def _count_trigrams(symbols: U32, end: int, bits: int) -> tuple[U64, U32]:
    """Return the sorted distinct keys of all windows whose first two symbols are tokens, and how often each occurs.

    The key of `a, b, c` is `a << 2 * bits | b << bits | c`. A last symbol `end` marks where a document ended with
    `a, b`: not a tri-gram, but an occurrence of `b` behind `a`.
    """
    if len(symbols) < 3:
        return np.empty(0, np.uint64), np.empty(0, np.uint32)
    inside = symbols != end
    wide = symbols.astype(np.uint64)
    shift = np.uint64(bits)
    keys = ((wide[:-2] << shift | wide[1:-1]) << shift | wide[2:])[inside[:-2] & inside[1:-1]]
    keys.sort()
    bounds = _group_bounds(keys)
    return keys[bounds[:-1]], np.diff(bounds).astype(np.uint32)


def _group_bounds(keys: U64) -> I64:
    """Return where each group of equal neighbours starts, and the length behind the last: int64[groups + 1]."""
    changes = np.flatnonzero(keys[1:] != keys[:-1]) + 1
    return np.concatenate([[0], changes, [len(keys)]]).astype(np.int64) if len(keys) else np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class _Run:
    """Sorted distinct keys (uint64) and their counts (uint32) on disk, with every `stride`-th key in memory."""

    keys: Path
    counts: Path
    length: int
    stride: int
    sample: U64

    def read(self, start: int, bound: np.uint64 | None) -> tuple[U64, U32]:
        """Return the records from number `start` up to the first whose key is not below `bound`."""
        stop = self.length
        if bound is not None:
            stop = min(stop, int(np.searchsorted(self.sample, bound)) * self.stride)
        if stop <= start:
            return np.empty(0, np.uint64), np.empty(0, np.uint32)
        # Read, not mapped: mapped pages would count as this process's memory until the system takes them back.
        keys = np.fromfile(self.keys, np.uint64, stop - start, offset=start * 8)
        if bound is not None:
            keys = keys[: np.searchsorted(keys, bound)]
        return keys, np.fromfile(self.counts, np.uint32, len(keys), offset=start * 4)


def _spill(folder: Path, number: int, keys: U64, counts: U32, stride: int) -> _Run:
    """Put a run on disk."""
    run = _Run(folder / f"run-{number}.keys", folder / f"run-{number}.counts", len(keys), stride, keys[::stride].copy())
    for path, array in ((run.keys, keys), (run.counts, counts)):
        with path.open("wb") as file:  # not tofile(), whose error on a full disk does not say that it is full
            file.write(array.data)
    return run


# --- from sorted runs to the table


def _merged(runs: list[_Run], bits: int, samples_at_once: int) -> Iterator[tuple[U64, I64, int]]:
    """Merge the runs a range of keys at a time, never cutting between two keys of one bigram.

    The ranges are chosen from the runs' samples, so they hold about equally many records whatever the text was.

    Yields:
        Sorted distinct keys, their counts over all runs, and how many records went into them.
    """
    shift = np.uint64(bits)
    samples = np.sort(np.concatenate([run.sample for run in runs]))
    bounds = np.unique(samples[samples_at_once::samples_at_once] >> shift << shift)
    starts = [0] * len(runs)
    for bound in [*bounds, None]:
        parts = [run.read(start, bound) for run, start in zip(runs, starts, strict=True)]
        starts = [start + len(keys) for start, (keys, _) in zip(starts, parts, strict=True)]
        keys = np.concatenate([keys for keys, _ in parts])
        order = np.argsort(keys)
        keys = keys[order]
        groups = _group_bounds(keys)
        yield keys[groups[:-1]], _group_sums(np.concatenate([c for _, c in parts])[order], groups), len(keys)


def _group_sums(counts: npt.NDArray[Any], bounds: I64) -> I64:
    """Return the sum of each group: int64[groups]."""
    if len(bounds) == 1:
        return np.empty(0, np.int64)
    return np.add.reduceat(counts, bounds[:-1], dtype=np.int64)


@njit(cache=True)
def _keep_most_frequent(
    bounds: I64, tokens: I64, counts: I64, kept_bounds: I64, kept_tokens: I64, kept_counts: I64
) -> None:
    """Fill each row of `kept_*` with the row's most frequent tokens, the lower token first among equals.

    Rows of `tokens` ascend. A row of `kept_*` has room for at least 1 and for no more tokens than the row has.
    """
    for row in range(len(bounds) - 1):
        start, end = kept_bounds[row], kept_bounds[row]
        for i in range(bounds[row], bounds[row + 1]):
            if end < kept_bounds[row + 1]:
                end += 1
            elif counts[i] <= kept_counts[end - 1]:
                continue
            at = end - 1
            while at > start and kept_counts[at - 1] < counts[i]:
                kept_tokens[at], kept_counts[at] = kept_tokens[at - 1], kept_counts[at - 1]
                at -= 1
            kept_tokens[at], kept_counts[at] = tokens[i], counts[i]


def _probabilities(counts: I64, totals: I64) -> npt.NDArray[np.uint16]:
    """Return `counts / totals` as the table stores it."""
    return np.maximum(np.rint(counts * (FULL_PROBABILITY / totals)), 1).astype(np.uint16)


class _TableWriter:
    """Appends merged counts to a store as a table's arrays, in one pass."""

    def __init__(self, writer: StoreWriter, vocabulary: int, bits: int, keep: int) -> None:
        self.writer, self.vocabulary, self.bits, self.keep = writer, vocabulary, bits, keep
        self.distinct = 0
        self.row_counts, self.unigram_lengths, self.unigram_totals = np.zeros((3, vocabulary), np.int64)
        self.held_pairs, self.held_counts = np.empty(0, np.uint64), np.empty(0, np.int64)
        for name, dtype in array_dtypes(vocabulary).items():
            writer.append(name, np.zeros(1 if name == "offsets" else 0, dtype))

    def add(self, keys: U64, counts: I64) -> None:
        """Add merged keys, ascending from call to call; all keys of a bigram come in one call."""
        shift, mask = np.uint64(self.bits), np.uint64((1 << self.bits) - 1)
        pairs = keys >> shift
        bounds = _group_bounds(pairs)
        self._add_pairs(pairs[bounds[:-1]], _group_sums(counts, bounds))
        followed = (keys & mask) != self.vocabulary
        keys, counts, pairs = keys[followed], counts[followed], pairs[followed]
        self.distinct += len(keys)
        bounds = _group_bounds(pairs)
        totals = _group_sums(counts, bounds)
        rows = pairs[bounds[:-1]]
        self.row_counts += np.bincount((rows >> shift).astype(np.int64), minlength=self.vocabulary)
        self.writer.append("second", (rows & mask).astype(token_dtype(self.vocabulary)))
        self.writer.append("totals", np.minimum(totals, _SATURATED).astype(np.uint32))
        before = self.writer.length("tokens")
        lengths = self._append_successors("", bounds, keys & mask, counts, totals, self.keep)
        if self.writer.length("tokens") > MAX_ENTRIES:
            raise StoreError(
                f"{self.writer.path} would keep more than {MAX_ENTRIES} tri-grams, the most a table holds. "
                f"Use less text, or keep fewer than {self.keep} successors."
            )
        self.writer.append("offsets", (before + np.cumsum(lengths)).astype(np.uint32))

    def _append_successors(self, prefix: str, bounds: I64, tokens: U64, counts: I64, totals: I64, keep: int) -> I64:
        """Append each row's most frequent successors; return how many each row kept."""
        lengths = np.minimum(np.diff(bounds), keep)
        kept_bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        kept_tokens, kept_counts = np.empty(kept_bounds[-1], np.int64), np.empty(kept_bounds[-1], np.int64)
        _keep_most_frequent(bounds, tokens.astype(np.int64), counts, kept_bounds, kept_tokens, kept_counts)
        self.writer.append(prefix + "tokens", kept_tokens.astype(token_dtype(self.vocabulary)))
        self.writer.append(prefix + "probabilities", _probabilities(kept_counts, np.repeat(totals, lengths)))
        return lengths

    def _add_pairs(self, pairs: U64, counts: I64, last: bool = False) -> None:
        """Append the successors of every single token that is complete, and hold the others' pairs back."""
        shift = np.uint64(self.bits)
        pairs, counts = np.concatenate([self.held_pairs, pairs]), np.concatenate([self.held_counts, counts])
        firsts = pairs >> shift
        ready = len(pairs) if last or not len(pairs) else int(np.searchsorted(firsts, firsts[-1]))
        self.held_pairs, self.held_counts = pairs[ready:], counts[ready:]
        bounds = _group_bounds(firsts[:ready])
        totals = _group_sums(counts[:ready], bounds)
        first = firsts[bounds[:-1]].astype(np.int64)
        seconds = pairs[:ready] & np.uint64((1 << self.bits) - 1)
        self.unigram_totals[first] = totals
        self.unigram_lengths[first] = self._append_successors(
            "unigram_", bounds, seconds, counts[:ready], totals, UNIGRAM_KEEP
        )

    def finish(self, token_counts: I64) -> None:
        """Append what is known only at the end; `token_counts` is int64[V], how often each token occurs."""
        self._add_pairs(np.empty(0, np.uint64), np.empty(0, np.int64), last=True)
        self.writer.append("first", np.concatenate([[0], np.cumsum(self.row_counts)]).astype(np.uint32))
        self.writer.append("unigram_offsets", np.concatenate([[0], np.cumsum(self.unigram_lengths)]).astype(np.uint32))
        self.writer.append("unigram_totals", np.minimum(self.unigram_totals, _SATURATED).astype(np.uint32))
        order = np.argsort(-token_counts, kind="stable")[:COMMON_KEEP]
        common = order[token_counts[order] > 0]
        self.writer.append("common_tokens", common.astype(token_dtype(self.vocabulary)))
        self.writer.append(
            "common_probabilities", _probabilities(token_counts[common], np.full(len(common), token_counts.sum()))
        )
