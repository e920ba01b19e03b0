"""The tri-gram table: the successors of each pair of tokens in a corpus with their counts, as sorted arrays.

Opens, verifies and searches tables. Does not depend on how they are counted (corpus/trigrams.py), nor on drafts.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.index.storage import FORMAT_VERSION, Store, check_fit, damaged, open_store

KIND = "trigram-table"
FULL_PROBABILITY = 65535  # probabilities are stored as uint16: `round(p * 65535)`, at least 1
UNIGRAM_KEEP = 32  # successors stored per single token, for back-off; chosen
_REMEDY = "Build a table for this model: foredraft table build INPUT... --model MODEL --out FILE"

U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class TableArrays(NamedTuple):
    """The table, as arrays for compiled functions. V tokens, B bigrams, T stored tri-grams.

    Token arrays are uint16 when V <= 65536, else uint32.
    """

    first: U32  # [V+1], rows `first[a]` to `first[a+1]` are the bigrams that begin with token `a`
    second: TokenArray  # [B], second tokens of bigrams, strictly ascending within a first token
    offsets: U32  # [B+1], entries `offsets[r]` to `offsets[r+1]` are the successors of bigram row `r`
    totals: U32  # [B], count of all successors of the bigram, pruned ones included; saturating; at least 1
    tokens: TokenArray  # [T], successors by descending count, then ascending token
    probabilities: U16  # [T], of the successors, relative to `totals`
    unigram_offsets: U32  # [V+1], entries `[b]` to `[b+1]` are the successors of the single token `b`
    unigram_totals: U32  # [V], count of all successors of the token; saturating
    unigram_tokens: TokenArray  # [U], like `tokens`
    unigram_probabilities: U16  # [U], like `probabilities`, relative to `unigram_totals`


def array_dtypes(vocabulary: int) -> dict[str, np.dtype[Any]]:
    """Return each array's dtype, in file order."""
    wide = ("first", "offsets", "totals", "unigram_offsets", "unigram_totals")
    u16, u32 = np.dtype(np.uint16), np.dtype(np.uint32)
    token = u16 if vocabulary <= 1 << 16 else u32
    return {
        name: u32 if name in wide else u16 if name.endswith("probabilities") else token for name in TableArrays._fields
    }


def empty_table(vocabulary: int) -> TableArrays:
    """Return an empty table, for drafters that only learn during generation."""
    lengths = {"first": vocabulary + 1, "offsets": 1, "unigram_offsets": vocabulary + 1, "unigram_totals": vocabulary}
    arrays = {name: np.zeros(lengths.get(name, 0), dtype) for name, dtype in array_dtypes(vocabulary).items()}
    for array in arrays.values():
        array.flags.writeable = False
    return TableArrays(**arrays)


# --- opening and checking


def open_table(
    path: str | os.PathLike[str], tokenizer_hash: str | None = None, vocabulary: int | None = None, *,
    check: bool | None = None,
) -> TableArrays:  # fmt: skip
    """Memory-map a table; `check` is `open_store`'s, and True also verifies all properties that `TableArrays` lists.

    Compiled code that does not check bounds may read a table only if `check` is True. Raises StoreError for a file that
    is not a sound table, or of another tokenizer or a larger vocabulary; None accepts any.
    """
    store = open_store(path, KIND, check=check)
    check_fit(store.path, (store.tokenizer_hash, store.vocabulary), tokenizer_hash, vocabulary, _REMEDY)
    arrays = _table(store)
    if check:
        _check_contents(store.path, arrays)
    return arrays


def open_named_table(
    name: str, default: Callable[[], Path] | None, vocabulary: int, tokenizer_hash: str, *, check: bool | None = None
) -> TableArrays:
    """Open the table `name`, or "default", or "none" for an empty one; raises what `open_table` does.

    `default` builds or finds the default table; None if there is none.
    """
    if name == "default":
        name = str(default()) if default is not None else "none"
    return empty_table(vocabulary) if name == "none" else open_table(name, tokenizer_hash, vocabulary, check=check)


def _table(store: Store) -> TableArrays:
    """Return a store's arrays, after checking names, dtypes and lengths but not contents."""
    vocabulary, arrays = store.vocabulary, store.arrays  # older tables hold two more arrays
    dtypes = array_dtypes(vocabulary)
    if vocabulary < 1 or {name: arrays[name].dtype for name in dtypes if name in arrays} != dtypes:
        raise damaged("table", store.path, "its arrays are not those of a tri-gram table")
    bigrams, trigrams = len(arrays["second"]), len(arrays["tokens"])
    lengths = {
        "first": vocabulary + 1, "offsets": bigrams + 1, "totals": bigrams, "probabilities": trigrams,
        "unigram_offsets": vocabulary + 1, "unigram_totals": vocabulary,
        "unigram_probabilities": len(arrays["unigram_tokens"]),
    }  # fmt: skip
    for name, length in lengths.items():
        if len(arrays[name]) != length:
            raise damaged("table", store.path, f"its array {name!r} has {len(arrays[name])} entries, not {length}")
    ends = {"first": bigrams, "offsets": trigrams, "unigram_offsets": len(arrays["unigram_tokens"])}
    for name, end in ends.items():
        if arrays[name][0] != 0 or arrays[name][-1] != end:
            raise damaged("table", store.path, f"its array {name!r} does not run from 0 to {end}")
    return TableArrays(*(arrays[name] for name in dtypes))


def table_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe a table in JSON values: sizes, tokenizer, metadata. Raises what `open_table` does."""
    store = open_store(path, KIND)
    arrays = _table(store)
    return {
        "path": str(path), "kind": KIND, "format_version": FORMAT_VERSION, "bytes": store.path.stat().st_size,
        "vocabulary": store.vocabulary, "tokenizer_hash": store.tokenizer_hash,
        "bigrams": len(arrays.second), "trigrams": len(arrays.tokens),
        "bytes_per_trigram": arrays.tokens.itemsize + arrays.probabilities.itemsize,
        "bytes_per_bigram": arrays.second.itemsize + arrays.offsets.itemsize + arrays.totals.itemsize,
        "metadata": store.metadata,
    }  # fmt: skip


def _check_contents(path: Path, arrays: TableArrays) -> None:
    size = len(arrays.first) - 1
    # Offsets are verified first, as the later checks rely on them and compiled code does not check bounds.
    for name in ("first", "offsets", "unigram_offsets"):
        array = getattr(arrays, name)
        if (array[1:] < array[:-1]).any():
            raise damaged("table", path, f"its array {name!r} is not in ascending order")
    rises = np.append(True, arrays.second[1:] > arrays.second[:-1])
    begins = arrays.first[:-1]
    rises[begins[begins < len(rises)]] = True  # a first token's bigrams may begin with any second token
    if len(arrays.second) and not (rises.all() and arrays.second.max() < size):
        raise damaged("table", path, "its bigrams are not in ascending order")
    if len(arrays.totals) and not arrays.totals.min():
        raise damaged("table", path, "it has a bigram that never occurred")
    rows = {
        "bigram row": (arrays.offsets, arrays.tokens, arrays.probabilities),
        "token": (arrays.unigram_offsets, arrays.unigram_tokens, arrays.unigram_probabilities),
    }
    for what, (offsets, tokens, probabilities) in rows.items():
        if (row := _first_bad_row(offsets, tokens, probabilities, size)) >= 0:
            how = f"the successors of {what} {row} repeat, reach past the vocabulary of {size}, or are not sorted"
            raise damaged("table", path, how)


@njit(cache=True)
def _first_bad_row(
    offsets: npt.NDArray[Any], tokens: npt.NDArray[Any], probabilities: npt.NDArray[Any], vocabulary: int
) -> int:
    """Return the first row with a repeated or too large token, a zero probability, or rising probabilities; else -1."""
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
    """Return the row of the bigram `a, b`, or -1 if it is not in the table; safe for damaged arrays."""
    if a < 0 or a + 1 >= len(first):
        return -1
    low, high = min(int(first[a]), len(second)), min(int(first[a + 1]), len(second))
    row = low + int(np.searchsorted(second[low:high], np.int64(b)))  # signed, as `b` may be negative
    return row if row < high and np.int64(second[row]) == b else -1
