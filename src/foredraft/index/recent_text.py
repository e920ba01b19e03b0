"""A text that grows while it is searched: one sequence, or all shared sequences.

Every place links to the last place before it that ends in the same two tokens, so a search visits the occurrences of a
context newest first. Does not depend on what the occurrences are used for.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from foredraft.graph.tree import I64, IntArray

END = -1  # symbol between two sequences; no token equals it
_VISITS = 8  # places visited at most per place to return; chosen


class RecentText(NamedTuple):
    """A text and its links. Changed in place; `with_room` makes a larger one."""

    symbols: IntArray  # int32[room], tokens and `END`
    previous: IntArray  # int32[room], the last place before each that ends in the same two symbols, or -1
    keys: I64  # int64[2^k], keys of pairs, by open addressing; -1 where free
    newest: IntArray  # int32[2^k], the last place of each pair
    length: I64  # int64[1], number of symbols


def empty_text(room: int = 1024) -> RecentText:
    """Return an empty text with room for `room` symbols."""
    slots = 1 << max(4, (2 * room - 1).bit_length())
    return RecentText(
        np.empty(room, np.int32), np.empty(room, np.int32), np.full(slots, -1, np.int64), np.empty(slots, np.int32),
        np.zeros(1, np.int64),
    )  # fmt: skip


NO_TEXT = empty_text(1)
"""An empty text that is never written."""


def with_room(text: RecentText, more: int) -> RecentText:
    """Return `text` if it has room for `more` symbols, else a copy of at least twice its size."""
    length = int(text.length[0])
    if length + more <= len(text.symbols):
        return text
    larger = empty_text(max(2 * len(text.symbols), length + more))
    if length:
        add(larger, text.symbols[:length].astype(np.int64))
    return larger


def add(text: RecentText, tokens: I64) -> None:
    """Call `append` from code that is not compiled, with `tokens` read-only or not: numba compiles once for both."""
    tokens = tokens.view()
    tokens.flags.writeable = False
    append(text, tokens)


@njit(cache=True)
def _pair_key(first: int, second: int) -> int:
    """Return the key of two tokens, at least 0."""
    return int(np.int64(first) << 32 | np.int64(second))


@njit(cache=True)
def _slot_of(keys: I64, key: int) -> int:
    """Return the slot of `key` in `keys`, int64[2^k] with -1 where free, or the free slot where it belongs."""
    mask = len(keys) - 1
    # multiplicative hashing with xxHash's primes; below 2**63, so interpreted code gives the same
    slot = (((key >> 32) * 0x27D4EB2F ^ (key & 0xFFFFFFFF) * 0x165667B1) >> 20) & mask
    while keys[slot] >= 0 and keys[slot] != key:
        slot = (slot + 1) & mask
    return slot


@njit(cache=True)
def newest_place(text: RecentText, first: int, second: int) -> int:
    """Return the last place that ends in two tokens, or -1."""
    slot = _slot_of(text.keys, _pair_key(first, second))
    return int(text.newest[slot]) if text.keys[slot] >= 0 else -1


@njit(cache=True)
def append(text: RecentText, tokens: I64) -> None:
    """Add `tokens`, int64[k]; there must be room for them."""
    for token in tokens:
        at = int(text.length[0])
        text.symbols[at] = token
        text.previous[at] = -1
        text.length[0] = at + 1
        if at == 0 or token < 0 or text.symbols[at - 1] < 0:
            continue
        key = _pair_key(text.symbols[at - 1], token)
        slot = _slot_of(text.keys, key)
        if text.keys[slot] >= 0:
            text.previous[at] = text.newest[slot]
        text.keys[slot] = key
        text.newest[slot] = at


@njit(cache=True)
def occurrences(text: RecentText, context: I64, longest: int, most: int) -> tuple[IntArray, IntArray]:
    """Return where the last two tokens or more of `context`, int64[n], occurred before another token, newest first.

    These are the place after each match, int32[K], K at most `most`, and the tokens that match there, int32[K], 2 to
    `longest`.
    """
    places, lengths = np.empty(most, np.int32), np.empty(most, np.int32)
    found, n = 0, len(context)
    if n < 2 or context[n - 1] < 0 or context[n - 2] < 0:
        return places[:0], lengths[:0]
    place = newest_place(text, context[n - 2], context[n - 1])
    for _ in range(_VISITS * most):
        if place < 0 or found == most:
            break
        if place + 1 < text.length[0] and text.symbols[place + 1] != END:
            length = 2
            while length < min(longest, n, place + 1) and text.symbols[place - length] == context[n - 1 - length]:
                length += 1
            places[found], lengths[found] = place + 1, length
            found += 1
        place = int(text.previous[place])
    return places[:found], lengths[:found]
