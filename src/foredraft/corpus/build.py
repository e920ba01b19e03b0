"""Count a corpus into a tri-gram table, in bounded memory.

Tokens are taken a block at a time; every few million, the tri-grams are sorted, counted and put on disk as a sorted
run beside the output; at the end the runs are merged a range of keys at a time. Knows symbols (tokens and the separator
behind each document) and the table's arrays. Does not know files of text, models, or what the table is used for.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
from numba import njit
from tokenizers import Tokenizer

from foredraft.corpus.documents import Document
from foredraft.corpus.fingerprint import tokenizer_hash
from foredraft.corpus.runs import I64, U32, U64, Run, group_bounds, group_sums, merged, spill
from foredraft.corpus.tokens import SymbolBlock, separated, tokenize_documents
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


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How far a build is.

    Attributes:
        phase: reading, then merging.
        done: reading: bytes consumed, as in `SymbolBlock.consumed`; merging: records merged.
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


class BuildOptions(TypedDict, total=False):
    """The options of `count_trigrams`, which says what they are."""

    keep: int
    least: int
    eos_token_id: int | None
    overwrite: bool
    metadata: Mapping[str, Any] | None
    progress: Callable[[BuildProgress], None] | None
    chunk_tokens: int
    merge_records: int


def build_trigram_table(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    vocabulary: int,
    out: str | os.PathLike[str],
    **options: Unpack[BuildOptions],
) -> BuildReport:
    """Tokenise documents and count their tri-grams, as `count_trigrams` does.

    Args:
        documents: from `read_documents` or `text_documents`.
        tokenizer: turns them into ids.
        vocabulary: no id reaches it.
        out: the file to write.
        options: those of `count_trigrams`; `eos_token_id` is appended to every document that does not end in it.
    """
    blocks = separated(tokenize_documents(documents, tokenizer), vocabulary, options.get("eos_token_id"))
    return count_trigrams(blocks, tokenizer_hash(tokenizer), vocabulary, out, **options)


def count_trigrams(
    blocks: Iterable[SymbolBlock],
    tokenizer_hash: str,
    vocabulary: int,
    out: str | os.PathLike[str],
    *,
    keep: int = 12,
    least: int = 1,
    eos_token_id: int | None = None,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
    chunk_tokens: int = 4 << 20,
    merge_records: int = 4 << 20,
) -> BuildReport:
    """Count the documents' tri-grams and write them as a table; none spans two documents.

    The file depends on the documents and `keep` alone, not on `chunk_tokens` and `merge_records`, nor on where the
    blocks are cut. On any failure, the old file stays and the temporary files go.

    Args:
        blocks: from `separated` or `shard_blocks`.
        tokenizer_hash: of the tokenizer that the ids are of.
        vocabulary: the separator; no id reaches it.
        out: the file to write; `<out>.lock` and, while building, `<out>.building` lie beside it.
        keep: the most successors kept of a bigram, 1 to 255.
        least: bigrams that were followed by a token fewer times are left out.
        eos_token_id: noted in the file: what was appended to documents that did not end in it; None for none.
        overwrite: replace a file that exists.
        metadata: JSON values to note in the file.
        progress: called now and then; may raise to stop.
        chunk_tokens: tokens counted in memory before they are put on disk; about 40 bytes each.
        merge_records: distinct tri-grams merged in memory; about 60 bytes each.

    Raises:
        UsageError: an argument out of range, or documents without any token.
        StoreError: `out` exists, is being written by another process, or cannot be written.
    """
    _check_arguments(vocabulary, keep, least, eos_token_id)
    tell = progress or (lambda _: None)
    bits = vocabulary.bit_length()
    stride = max(1, min(4096, merge_records // 16))
    token_counts = np.zeros(vocabulary + 1, np.int64)
    runs: list[Run] = []
    with StoreWriter(
        out, KIND, tokenizer_hash=tokenizer_hash, vocabulary=vocabulary, metadata=metadata, overwrite=overwrite
    ) as writer:
        for symbols in _chunks(_told(blocks, vocabulary, tell), chunk_tokens):
            token_counts += np.bincount(symbols[2 if runs else 0 :], minlength=vocabulary + 1)
            runs.append(spill(writer.folder, len(runs), *_count_trigrams(symbols, vocabulary, bits), stride))
        read, tokens = int(token_counts[vocabulary]), int(token_counts[:vocabulary].sum())
        if not tokens:
            raise UsageError("The inputs hold no text, so there is nothing to count. Give files with text in them.")
        table = _TableWriter(writer, vocabulary, bits, keep, least)
        done, total = 0, sum(run.length for run in runs)
        for keys, counts, records in merged(runs, bits, max(1, merge_records // stride)):
            table.add(keys, counts)
            done += records
            tell(BuildProgress("merging", done, total, tokens))
        table.finish(token_counts[:vocabulary])
        writer.metadata |= {
            "documents": read,
            "tokens": tokens,
            "distinct_trigrams": table.distinct,
            "keep": keep,
            "least": least,
            "eos_token_id": eos_token_id,
        }
    path = Path(out)
    return BuildReport(
        path, read, tokens, table.distinct, writer.length("second"), writer.length("tokens"), path.stat().st_size
    )


def _check_arguments(vocabulary: int, keep: int, least: int, eos_token_id: int | None) -> None:
    if not 1 <= vocabulary <= MAX_VOCABULARY:
        raise UsageError(f"A table holds vocabularies of 1 to {MAX_VOCABULARY} tokens; {vocabulary} were given.")
    if not 1 <= keep <= MAX_KEEP:
        raise UsageError(f"keep is {keep}; give the number of successors to keep of a bigram, 1 to {MAX_KEEP}.")
    if least < 1:
        raise UsageError(f"least is {least}; give how often a bigram must occur to be kept, at least 1.")
    if eos_token_id is not None and not 0 <= eos_token_id < vocabulary:
        raise UsageError(f"eos_token_id is {eos_token_id}, which is not below the vocabulary of {vocabulary}.")


# --- from symbols to sorted runs


def _told(
    blocks: Iterable[SymbolBlock], vocabulary: int, tell: Callable[[BuildProgress], None]
) -> Iterator[SymbolBlock]:
    """Pass the blocks on, telling of progress."""
    tokens, consumed, told = 0, 0, -_TOLD_BYTES
    for block in blocks:
        yield block
        tokens, consumed = tokens + int(np.count_nonzero(block.symbols != vocabulary)), block.consumed
        if consumed - told >= _TOLD_BYTES:
            told = consumed
            tell(BuildProgress("reading", told, None, tokens))
    tell(BuildProgress("reading", consumed, None, tokens))


def _chunks(blocks: Iterable[SymbolBlock], chunk_tokens: int) -> Iterator[npt.NDArray[Any]]:
    """Join the blocks to chunks.

    Every chunk but the first begins with the last two symbols of the one before, so that each window of three symbols
    lies in exactly one chunk.
    """
    held: list[npt.NDArray[Any]] = [np.empty(0, np.uint16)]
    size = 0
    for block in blocks:
        held.append(block.symbols)
        size += len(block.symbols)
        if size >= max(3, chunk_tokens):
            chunk = np.concatenate(held)
            yield chunk
            held, size = [chunk[-2:].copy()], 2
    yield np.concatenate(held)


def _count_trigrams(symbols: npt.NDArray[Any], end: int, bits: int) -> tuple[U64, U32]:
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
    bounds = group_bounds(keys)
    return keys[bounds[:-1]], np.diff(bounds).astype(np.uint32)


# --- from sorted runs to the table


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
    return np.maximum(np.rint(counts * FULL_PROBABILITY / totals), 1).astype(np.uint16)  # halves stay exact


class _TableWriter:
    """Appends merged counts to a store as a table's arrays, in one pass."""

    def __init__(self, writer: StoreWriter, vocabulary: int, bits: int, keep: int, least: int) -> None:
        self.writer, self.vocabulary, self.bits, self.keep, self.least = writer, vocabulary, bits, keep, least
        self.distinct = 0
        self.row_counts, self.unigram_lengths, self.unigram_totals = np.zeros((3, vocabulary), np.int64)
        self.held_pairs, self.held_counts = np.empty(0, np.uint64), np.empty(0, np.int64)
        for name, dtype in array_dtypes(vocabulary).items():
            writer.append(name, np.zeros(1 if name == "offsets" else 0, dtype))

    def add(self, keys: U64, counts: I64) -> None:
        """Add merged keys, ascending from call to call; all keys of a bigram come in one call."""
        shift, mask = np.uint64(self.bits), np.uint64((1 << self.bits) - 1)
        pairs = keys >> shift
        bounds = group_bounds(pairs)
        self._add_pairs(pairs[bounds[:-1]], group_sums(counts, bounds))
        followed = (keys & mask) != self.vocabulary
        keys, counts, pairs = keys[followed], counts[followed], pairs[followed]
        self.distinct += len(keys)
        bounds = group_bounds(pairs)
        totals = group_sums(counts, bounds)
        often = totals >= self.least
        entries = np.repeat(often, np.diff(bounds))
        keys, counts, pairs, totals = keys[entries], counts[entries], pairs[entries], totals[often]
        bounds = group_bounds(pairs)
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
        bounds = group_bounds(firsts[:ready])
        totals = group_sums(counts[:ready], bounds)
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
