"""Own words: a cache of the target's next-token distributions by the last three, two and one tokens.

After each verified row, accepted or not, the target's most probable tokens are stored under the row's last tokens. The
newest distribution replaces the older one (as in Token Recycling, Luo et al. 2024, with longer contexts). A tri-gram
table can be converted to the same form. Does not depend on how drafts are made of the distributions.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from foredraft.contracts import TOP
from foredraft.errors import StoreError
from foredraft.graph.tree import I64, U8, FloatArray, IntArray
from foredraft.index.storage import check_fit, open_store, write_store
from foredraft.index.trigram import FULL_PROBABILITY, TableArrays

# contexts stored, at 56 bytes each: room at first (2^14 take as long), and at most; then those learned longest ago are
# replaced; chosen
_FIRST_SLOTS, MOST_SLOTS = 1 << 16, 1 << 20
_WAYS = 8  # slots of a context: one cache line of keys
_BITS = 21  # bits of a token in a key
_KIND = "own-words"
int64: Any = np.int64
"""In compiled code, types an argument: numba compiles a function again for constants and for other widths."""
NO_TOKEN: Any = int64(-1)
"""In a context, before its first token."""


class OwnWords(NamedTuple):
    """The cache, as arrays for compiled functions. S slots, a power of two, at least 8; `enlarged` makes more."""

    keys: I64  # int64[S], see `context_key`; 0 where the slot is free
    learned: I64  # int64[S], last update of the context, by `clock`
    tokens: IntArray  # int32[S, 8], by descending probability
    chances: U8  # uint8[S, 8], probabilities times 255; 0 after the last token
    clock: I64  # int64[1], updates so far


def empty_words(slots: int = _FIRST_SLOTS) -> OwnWords:
    """Return an empty cache of `slots` contexts."""
    return OwnWords(
        np.zeros(slots, np.int64), np.zeros(slots, np.int64), np.zeros((slots, TOP), np.int32),
        np.zeros((slots, TOP), np.uint8), np.zeros(1, np.int64),
    )  # fmt: skip


NO_WORDS = empty_words(_WAYS)
"""An empty cache that is never written."""


@njit(cache=True)
def context_key(a: Any, b: Any, c: Any) -> int:
    """Return the key of the context (a, b, c), above 0; shorter contexts begin with -1."""
    return int((np.int64(a + 1) << (2 * _BITS)) | (np.int64(b + 1) << _BITS) | np.int64(c + 1))


@njit(cache=True)
def _first_slot(keys: I64, key: int) -> int:
    mixed = (key & 0x7FFFFFFF) * 0x1E3779B1 ^ (key >> 31) * 0x05EBCA6B  # below 2^61
    return ((mixed ^ mixed >> 29) & (len(keys) // _WAYS - 1)) * _WAYS


@njit(cache=True)
def find(keys: I64, key: int) -> int:
    """Return the slot of a context by the `keys` of `OwnWords` or of similar arrays, or -1."""
    first = _first_slot(keys, key)
    for slot in range(first, first + _WAYS):
        if keys[slot] == key:
            return slot
    return -1


@njit(cache=True)
def slot_for(words: Any, key: int) -> int:
    """Return the slot of a context, if needed taken from the one updated longest ago, and mark it as updated.

    `words` are `OwnWords`, or other arrays with `keys`, `learned` and `clock`.
    """
    first = _first_slot(words.keys, key)
    taken = first
    for slot in range(first, first + _WAYS):
        if words.keys[slot] == key or words.keys[slot] == 0:
            taken = slot
            break
        if words.learned[slot] < words.learned[taken]:
            taken = slot
    words.clock[0] += 1
    words.keys[taken], words.learned[taken] = key, words.clock[0]
    return taken


def enlarged(words: OwnWords) -> OwnWords:
    """Return `words` if at most half of the slots are in use, or there are the most; else a copy in twice as many.

    A cache starts small because memory is cleared at its first use, 4 KiB at a time, and contexts lie far apart.
    """
    slots = len(words.keys)
    if slots >= MOST_SLOTS or 2 * np.count_nonzero(words.keys) <= slots:
        return words
    larger = empty_words(2 * slots)
    _move_words(larger, words)
    return larger


@njit(cache=True)
def _move_words(larger: OwnWords, words: OwnWords) -> None:
    """Copy everything to an empty cache of twice the slots, where two lines take the 8 contexts of one."""
    larger.clock[0] = words.clock[0]
    for slot in range(len(words.keys)):
        if words.keys[slot] != 0:
            to = _first_slot(larger.keys, words.keys[slot])
            while larger.keys[to] != 0:
                to += 1
            larger.keys[to], larger.learned[to] = words.keys[slot], words.learned[slot]
            larger.tokens[to], larger.chances[to] = words.tokens[slot], words.chances[slot]


@njit(cache=True)
def _keep(words: OwnWords, key: int, tokens: IntArray, probabilities: FloatArray) -> None:
    """Store a distribution: tokens int32[K] and probabilities float32[K], descending."""
    slot, stored, chances = slot_for(words, key), words.tokens, words.chances
    for i in range(TOP):
        kept = i < len(tokens) and probabilities[i] > 0  # false for NaN
        stored[slot, i] = tokens[i] if kept else 0
        chances[slot, i] = np.uint8(max(np.rint(255 * probabilities[i]), 1)) if kept else 0


@njit(cache=True)
def fill_context(context: I64, tokens: IntArray, parents: IntArray, node: int, ids: I64) -> None:
    """Fill `context` with the last tokens of the path to `node` (-1 for the root) of a draft after `ids`.

    `tokens` and `parents`, int32[N], are the draft's. Places before the text get -1.
    """
    back = len(ids) - 1
    for place in range(len(context) - 1, -1, -1):
        if node >= 0:
            context[place] = tokens[node]
            node = parents[node]
        else:
            context[place] = ids[back] if back >= 0 else -1
            back -= 1


@njit(cache=True)
def learn_rows(
    words: OwnWords, tokens: IntArray, parents: IntArray, ids: I64, top: IntArray, chances: FloatArray
) -> None:  # fmt: skip
    """Store the distributions after the rows of a verified draft, each under its last three, two and one tokens.

    The draft is `tokens` and `parents`, int32[N], after `ids`, int64[n]. Rows are the root's and then the nodes':
    `top`, int32[N + 1, K], are tokens by descending probability, and `chances`, float32[N + 1, K], probabilities.
    """
    context = np.empty(3, np.int64)
    for i in range(len(top)):
        fill_context(context, tokens, parents, i - 1, ids)
        a, b, c = context
        for first in range(2, -1, -1):
            if context[first] >= 0:
                key = context_key(a if first == 0 else NO_TOKEN, b if first < 2 else NO_TOKEN, c)
                _keep(words, key, top[i], chances[i])


def words_of_table(table: TableArrays) -> OwnWords:
    """Convert a tri-gram table's successors of pairs and of single tokens to this form."""
    contexts = len(table.second) + int(np.count_nonzero(np.diff(table.unigram_offsets)))
    words = empty_words(1 << (max(_WAYS, min(contexts * 3 // 2, MOST_SLOTS)) - 1).bit_length())
    _take_table(words, table)
    return words


@njit(cache=True)
def _take_table(words: OwnWords, table: TableArrays) -> None:
    """Store each context's most frequent successors; if slots are full, the more frequent contexts stay."""
    pairs = table.offsets, table.totals, table.tokens, table.probabilities
    singles = table.unigram_offsets, table.unigram_totals, table.unigram_tokens, table.unigram_probabilities
    for token in range(len(table.unigram_offsets) - 1):
        _take_row(words, context_key(NO_TOKEN, NO_TOKEN, token), singles, int64(token))
        for row in range(table.first[token], table.first[token + 1]):
            _take_row(words, context_key(NO_TOKEN, token, table.second[row]), pairs, int64(row))


@njit(cache=True)
def _take_row(words: OwnWords, key: int, stored: Any, row: int) -> None:
    """Store one row of a table's offsets, totals, tokens and probabilities; `learned` is the context's count here."""
    offsets, totals, tokens, probabilities = stored
    low, high, seen = offsets[row], offsets[row + 1], min(totals[row], 0x7FFFFFFF)
    slot = _first_slot(words.keys, key)
    for other in range(slot, slot + _WAYS):
        if words.learned[other] < words.learned[slot]:
            slot = other
    if low == high or words.learned[slot] >= seen:
        return
    words.keys[slot], words.learned[slot] = key, seen
    for i in range(TOP):
        kept = low + i < high
        words.tokens[slot, i] = tokens[low + i] if kept else 0
        parts = np.rint(255 * np.float64(probabilities[low + i]) / FULL_PROBABILITY) if kept else 0.0
        words.chances[slot, i] = np.uint8(max(parts, 1)) if kept else 0


def save_words(path: Path, words: OwnWords, tokenizer_hash: str, vocabulary: int) -> None:
    """Write the used slots to `path`, oldest first; on failure raises StoreError and leaves the old file."""
    used = np.flatnonzero(words.keys)
    used = used[np.argsort(words.learned[used])]
    with write_store(path, _KIND, tokenizer_hash=tokenizer_hash, vocabulary=vocabulary, overwrite=True) as writer:
        for name in ("keys", "tokens", "chances"):
            writer.append(name, getattr(words, name)[used].ravel())


def load_words(path: Path, tokenizer_hash: str) -> OwnWords:
    """Read a file of `save_words`; raises StoreError if it is damaged or belongs to another tokenizer."""
    store = open_store(path, _KIND, check=True)
    check_fit(path, (store.tokenizer_hash, 0), tokenizer_hash, None, "Use another memory for this model.")
    try:
        keys = store.arrays["keys"].astype(np.int64)
        tokens = store.arrays["tokens"].reshape(-1, TOP).astype(np.int32)
        chances = store.arrays["chances"].reshape(-1, TOP).astype(np.uint8)
        if not len(keys) == len(tokens) == len(chances) or (len(keys) and keys.min() <= 0):
            raise ValueError("its arrays do not fit each other")
    except (KeyError, ValueError) as error:
        raise StoreError(f"{path} is damaged ({error}). Delete it to start afresh.") from error
    words = empty_words(max(_FIRST_SLOTS, min(1 << (2 * len(keys)).bit_length(), MOST_SLOTS)))
    _take_words(words, keys, tokens, chances)
    return words


@njit(cache=True)
def _take_words(words: OwnWords, keys: I64, tokens: IntArray, chances: U8) -> None:
    for i in range(len(keys)):
        slot = slot_for(words, keys[i])
        words.tokens[slot], words.chances[slot] = tokens[i], chances[i]
