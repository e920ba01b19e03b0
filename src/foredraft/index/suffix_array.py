"""Suffix arrays of token arrays: sorting, searching, verifying.

A text here is a sequence of documents, each followed by the separator, a symbol above every token. A suffix array lists
the places of all tokens (not of separators) in the lexicographic order of the suffixes that begin there and end at the
next separator; equal suffixes may come in any order. Does not depend on files.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pydivsufsort
from numba import njit

from foredraft.errors import UsageError
from foredraft.graph.tree import I64, IntArray

Symbols = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Places = IntArray | I64
Item = TypeVar("Item")

_CHUNK = 1 << 22  # elements of a piece: 16 to 32 MB; chosen


class SuffixArrays(NamedTuple):
    """A sorted text, as arrays for compiled functions: n symbols, of which d are separators."""

    symbols: Symbols  # uint16[n] or uint32[n], tokens below V, and V for the separator
    suffixes: Places  # int32[n - d] or int64[n - d], places of tokens in the order of their suffixes
    first: I64  # int64[V + 1], entries `first[t]` to `first[t + 1]` are the suffixes that begin with token t


def symbol_dtype(vocabulary: int) -> np.dtype[Any]:
    """Return the narrowest dtype for tokens below `vocabulary` and for the separator, `vocabulary`."""
    return np.dtype(np.uint16 if vocabulary <= np.iinfo(np.uint16).max else np.uint32)


def sorted_suffixes(texts: Sequence[Symbols], vocabulary: int) -> tuple[Places, I64]:
    """Return `suffixes` and `first` of the texts as one, as in `SuffixArrays`; the separator is `vocabulary`.

    Sorts with libdivsufsort, the fastest suffix sorter with wheels for all systems. It sorts bytes, so symbols are
    passed most significant byte first, and places inside a symbol are dropped afterwards. It takes 5 bytes of memory
    per byte (2 per symbol for vocabularies of 255 to 65,535). Raises UsageError for a symbol above the separator.
    """
    first = _first_entries(texts, vocabulary)
    width = max(1, (vocabulary.bit_length() + 7) // 8)
    data = np.empty((sum(map(len, texts)), width), np.uint8)
    filled = 0
    for piece in pieces(texts):
        if (largest := int(piece.max())) > vocabulary:
            raise UsageError(f"The text holds token {largest}, which is not below the vocabulary of {vocabulary}.")
        data[filled : filled + len(piece)] = piece.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 4 - width :]
        filled += len(piece)
    if not first[-1]:
        return np.empty(0, np.int32), first
    entries = pydivsufsort.divsufsort(data.reshape(-1))
    del data
    _symbol_places(entries, width)
    return entries[: first[-1]], first  # suffixes that begin with the separator come last


def _first_entries(texts: Sequence[Symbols], vocabulary: int) -> I64:
    """Return the number of tokens in the texts below each token and below the separator, int64[V + 1]."""
    counts = np.zeros(vocabulary, np.int64)
    for piece in pieces(texts):
        counts += np.bincount(piece, minlength=vocabulary)[:vocabulary]
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def pieces(arrays: Iterable[npt.NDArray[Any]]) -> Iterator[npt.NDArray[Any]]:
    """Yield the arrays one after the other, in pieces of 2^22 elements."""
    for array in arrays:
        for start in range(0, len(array), _CHUNK):
            yield array[start : start + _CHUNK]


def grouped(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Yield groups of neighbours whose sizes add up to at most `most`; a larger item is its own group."""
    group: list[Item] = []
    total = 0
    for item in items:
        if group and total + size(item) > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group


@njit(cache=True)
def _symbol_places(entries: Places, width: int) -> None:
    """Convert byte places to symbol places, in place, and drop those inside a symbol."""
    kept = 0
    for i in range(len(entries)):
        if entries[i] % width == 0:
            entries[kept] = entries[i] // width
            kept += 1


# --- looking up


@njit(cache=True)
def _lower_bound(text: SuffixArrays, low: int, high: int, offset: int, token: int) -> int:
    """Return the first entry of `[low, high)` whose symbol at `offset` is not below `token`, or `high`."""
    while low < high:
        middle = (low + high) // 2
        place = np.int64(text.suffixes[middle]) + offset
        sound = 0 <= place < len(text.symbols)  # a damaged file may hold any place
        if not sound or np.int64(text.symbols[place]) < token:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def follow(text: SuffixArrays, ranges: I64, context: I64, new: int) -> None:
    """Advance `ranges` to the end of a context: the entries where each of its suffixes occurs.

    Each new token narrows the range of each suffix to that of the suffix one longer, with two binary searches.

    Row L of `ranges`, int64[longest + 1, 2], holds the entries that begin with the context's last L tokens; zeros at
    first. `context`, int64[k], has at least the last `longest` tokens, or all; `new` of them are new, if not more.
    Tokens outside the vocabulary do not occur.
    """
    longest = len(ranges) - 1
    if new >= longest:
        ranges[:], new = 0, longest
    for token in context[max(len(context) - new, 0) :]:
        if not 0 <= token < len(text.first) - 1:
            ranges[:] = 0
            continue
        for length in range(longest, 1, -1):
            low, high = ranges[length - 1]
            ranges[length, 0] = _lower_bound(text, low, high, length - 1, token)
            ranges[length, 1] = _lower_bound(text, ranges[length, 0], high, length - 1, token + 1)
        low = max(text.first[token], 0)  # a damaged file may hold any number
        ranges[1, 0], ranges[1, 1] = low, max(low, min(text.first[token + 1], len(text.suffixes)))


# --- checking


@njit(cache=True)
def is_sorted(text: SuffixArrays) -> bool:
    """Return whether `text` is a suffix array; takes memory of one int64 per symbol.

    Every token's place must occur once, and of two neighbours the first must begin with the smaller token, or both with
    the same one and the rest of the first be sorted before the rest of the second.
    """
    n, separator = len(text.symbols), len(text.first) - 1
    rank = np.full(n, n, np.int64)  # in `suffixes`, by place; n for separators, which are above every token
    for entry in range(len(text.suffixes)):
        place = text.suffixes[entry]
        if not 0 <= place < n or rank[place] < n or text.symbols[place] >= separator:
            return False
        rank[place] = entry
    if len(text.suffixes) + np.count_nonzero(text.symbols == separator) != n:
        return False
    for entry in range(len(text.suffixes) - 1):
        a, b = text.suffixes[entry], text.suffixes[entry + 1]
        x, y = text.symbols[a], text.symbols[b]
        # the last symbol is a separator, so both have a next place
        if x > y or (x == y and rank[a + 1] > rank[b + 1]):
            return False
    return True


def first_matches(text: SuffixArrays) -> bool:
    """Return whether `first` matches the symbols."""
    return np.array_equal(text.first, _first_entries([text.symbols], len(text.first) - 1))
