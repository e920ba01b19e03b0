"""The tri-gram table: which tokens followed each pair of tokens in a corpus, and how often, as sorted arrays.

Knows the arrays, how to open, check and look things up in them. Does not know how they were counted
(corpus/trigrams.py), how drafts are searched in them, or what a sequence has taught since.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.index.storage import FORMAT_VERSION, Store, check_fit, damaged, open_store

KIND = "trigram-table"
FULL_PROBABILITY = 65535
"""Probabilities are stored as uint16: `round(p * 65535)`, and at least 1."""
UNIGRAM_KEEP = 32
"""Successors kept of every single token, to back off to."""
COMMON_KEEP = 256
"""Tokens kept in the list of the most frequent ones overall."""
_REMEDY = "Build a table for this model: foredraft table build INPUT... --model MODEL --out FILE"

U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class TableArrays(NamedTuple):
    """The table itself, in the form that compiled functions take. V tokens, B bigrams, T kept tri-grams.

    Token arrays are uint16 when V <= 65536, else uint32.
    """

    first: U32  # [V+1], the bigrams that begin with token `a` are rows `first[a]` to `first[a+1]`
    second: TokenArray  # [B], each bigram's second token, strictly ascending within a first token
    offsets: U32  # [B+1], the successors of bigram row `r` are entries `offsets[r]` to `offsets[r+1]`
    totals: U32  # [B], how often the bigram was followed by a token, before pruning; saturating; at least 1
    tokens: TokenArray  # [T], successors, the most probable first, the lower token first among equal counts
    probabilities: U16  # [T], of those, relative to `totals`
    unigram_offsets: U32  # [V+1], the successors of the single token `b` are entries `[b]` to `[b+1]`
    unigram_totals: U32  # [V], how often the token was followed by a token; saturating
    unigram_tokens: TokenArray  # [U], as `tokens`
    unigram_probabilities: U16  # [U], as `probabilities`, relative to `unigram_totals`
    common_tokens: TokenArray  # [K], the most frequent tokens overall, the most frequent first
    common_probabilities: U16  # [K], relative to all tokens


@dataclass(frozen=True, slots=True)
class TrigramTable:
    """An open tri-gram table."""

    vocabulary: int  # no token in the table reaches it
    arrays: TableArrays
    tokenizer_hash: str  # of the tokenizer whose ids it holds; "" for an empty table, which suits any
    metadata: dict[str, Any]  # what the builder noted: documents, tokens, keep, ...
    path: Path | None


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """Return the dtype that tokens of such a vocabulary are stored in."""
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)


def array_dtypes(vocabulary: int) -> dict[str, np.dtype[Any]]:
    """Return each array's dtype, in file order."""
    wide = ("first", "offsets", "totals", "unigram_offsets", "unigram_totals")
    token, u16, u32 = token_dtype(vocabulary), np.dtype(np.uint16), np.dtype(np.uint32)
    return {
        name: u32 if name in wide else u16 if name.endswith("probabilities") else token for name in TableArrays._fields
    }


def empty_table(vocabulary: int) -> TrigramTable:
    """Return a table that knows nothing, for a drafter that only learns while it generates."""
    lengths = {"first": vocabulary + 1, "offsets": 1, "unigram_offsets": vocabulary + 1, "unigram_totals": vocabulary}
    arrays = {name: np.zeros(lengths.get(name, 0), dtype) for name, dtype in array_dtypes(vocabulary).items()}
    for array in arrays.values():
        array.flags.writeable = False
    return TrigramTable(vocabulary, TableArrays(**arrays), "", {}, None)


# --- opening and checking


def open_table(
    path: str | os.PathLike[str], tokenizer_hash: str | None = None, vocabulary: int | None = None
) -> TrigramTable:
    """Open a table by mapping it into memory.

    Raises:
        StoreError: no sound table, or one made with another tokenizer or for more tokens than `vocabulary`; None of
            either takes any.
    """
    store = open_store(path, KIND)
    check_fit(store.path, (store.tokenizer_hash, store.vocabulary), tokenizer_hash, vocabulary, _REMEDY)
    return _table(store)


def open_named_table(
    name: str, default: Callable[[], Path] | None, vocabulary: int, tokenizer_hash: str
) -> TrigramTable:
    """Open the table that a drafter's options name.

    Args:
        name: path of a table, "default", or "none".
        default: makes or finds the default table; None where there is none.
        vocabulary: how many tokens the model scores.
        tokenizer_hash: of the model's tokenizer; "" takes any table.

    Raises:
        StoreError: as `open_table` does.
    """
    if name == "default":
        name = str(default()) if default is not None else "none"
    return empty_table(vocabulary) if name == "none" else open_table(name, tokenizer_hash, vocabulary)


def _table(store: Store) -> TrigramTable:
    """Take the store's arrays as a table's, verifying names, dtypes and lengths but not their content."""
    vocabulary, arrays = store.vocabulary, store.arrays
    dtypes = array_dtypes(vocabulary)
    if vocabulary < 1 or {name: array.dtype for name, array in arrays.items()} != dtypes:
        raise damaged("table", store.path, "its arrays are not those of a tri-gram table")
    bigrams, trigrams = len(arrays["second"]), len(arrays["tokens"])
    lengths = {
        "first": vocabulary + 1,
        "offsets": bigrams + 1,
        "totals": bigrams,
        "probabilities": trigrams,
        "unigram_offsets": vocabulary + 1,
        "unigram_totals": vocabulary,
        "unigram_probabilities": len(arrays["unigram_tokens"]),
        "common_probabilities": len(arrays["common_tokens"]),
    }
    for name, length in lengths.items():
        if len(arrays[name]) != length:
            raise damaged("table", store.path, f"its array {name!r} has {len(arrays[name])} entries, not {length}")
    ends = {"first": bigrams, "offsets": trigrams, "unigram_offsets": len(arrays["unigram_tokens"])}
    for name, end in ends.items():
        if arrays[name][0] != 0 or arrays[name][-1] != end:
            raise damaged("table", store.path, f"its array {name!r} does not run from 0 to {end}")
    table = TableArrays(**{name: arrays[name] for name in dtypes})
    return TrigramTable(vocabulary, table, store.tokenizer_hash, dict(store.metadata), store.path)


def table_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe a table in JSON values: sizes, tokenizer, what its builder noted. Raises what `open_table` does."""
    table = open_table(path)
    arrays = table.arrays
    return {
        "path": str(path),
        "kind": KIND,
        "format_version": FORMAT_VERSION,
        "bytes": Path(path).stat().st_size,
        "vocabulary": table.vocabulary,
        "tokenizer_hash": table.tokenizer_hash,
        "bigrams": len(arrays.second),
        "trigrams": len(arrays.tokens),
        "bytes_per_trigram": arrays.tokens.itemsize + arrays.probabilities.itemsize,
        "bytes_per_bigram": arrays.second.itemsize + arrays.offsets.itemsize + arrays.totals.itemsize,
        "metadata": table.metadata,
    }


def check_table(path: str | os.PathLike[str]) -> TrigramTable:
    """Verify a table to the last byte; raises StoreError for a checksum, or what `TableArrays` says, that is wrong."""
    store = open_store(path, KIND, check=True)
    table = _table(store)
    arrays, size = table.arrays, table.vocabulary
    # The offsets come first: what is after them trusts offsets, and compiled code does not check bounds.
    for name in ("first", "offsets", "unigram_offsets"):
        array = getattr(arrays, name)
        if (array[1:] < array[:-1]).any():
            raise damaged("table", store.path, f"its array {name!r} is not in ascending order")
    rises = np.append(True, arrays.second[1:] > arrays.second[:-1])
    rises[arrays.first[:-1][arrays.first[:-1] < len(rises)]] = True  # a first token's bigrams begin anywhere
    if len(arrays.second) and not (rises.all() and arrays.second.max() < size):
        raise damaged("table", store.path, "its bigrams are not in ascending order")
    if len(arrays.totals) and not arrays.totals.min():
        raise damaged("table", store.path, "it has a bigram that never occurred")
    common = np.array([0, len(arrays.common_tokens)], np.uint32)
    rows = {
        "bigram row": (arrays.offsets, arrays.tokens, arrays.probabilities),
        "token": (arrays.unigram_offsets, arrays.unigram_tokens, arrays.unigram_probabilities),
        "list of common tokens, number": (common, arrays.common_tokens, arrays.common_probabilities),
    }
    for what, (offsets, tokens, probabilities) in rows.items():
        if (row := _first_bad_row(offsets, tokens, probabilities, size)) >= 0:
            raise damaged(
                "table",
                store.path,
                f"the successors of {what} {row} repeat, reach past the vocabulary of {size}, or are not sorted",
            )
    return table


@njit(cache=True)
def _first_bad_row(
    offsets: npt.NDArray[Any], tokens: npt.NDArray[Any], probabilities: npt.NDArray[Any], vocabulary: int
) -> int:
    """Return the first row with a repeated or too large token, a zero probability, or rising probabilities, or -1."""
    for row in range(len(offsets) - 1):
        start = np.int64(offsets[row])
        for i in range(start, np.int64(offsets[row + 1])):
            if tokens[i] >= vocabulary or probabilities[i] == 0:
                return row
            if i > start and probabilities[i] > probabilities[i - 1]:
                return row
            for j in range(start, i):
                if tokens[j] == tokens[i]:
                    return row
    return -1


# --- looking up


@njit(cache=True)
def bigram_row(first: npt.NDArray[Any], second: npt.NDArray[Any], a: int, b: int) -> int:
    """Return the row of the bigram `a, b`, or -1 where the corpus never had it.

    Safe for any `a` and `b`, and for damaged arrays: compiled code checks no bounds, so the range is clamped here.
    """
    if a < 0 or a + 1 >= len(first):
        return -1
    low = min(int(first[a]), len(second))
    end = min(int(first[a + 1]), len(second))
    high = end
    while low < high:
        middle = (low + high) // 2
        if np.int64(second[middle]) < b:  # signed, as `b` may be negative
            low = middle + 1
        else:
            high = middle
    if low < end and np.int64(second[low]) == b:
        return low
    return -1
