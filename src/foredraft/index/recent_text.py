"""A text that grows while it is searched: what a sequence, or every sequence so far, has said.

Every place is chained to the last place before it that ended in the same two tokens, so that the occurrences of a
context are met newest first. Knows tokens; not whose they are, nor what is drafted from them.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.tree import IntArray

I64 = npt.NDArray[np.int64]

END = -1
"""Stands between two sequences; no token equals it."""
_VISITS = 8
"""Places visited for each one that may be returned, before the search gives up on older ones."""


class RecentText(NamedTuple):
    """A text and its chains. Changed in place; `with_room` makes a larger one.

    Attributes:
        symbols: int32[room], tokens and `END`.
        previous: int32[room], for each place, the last one before it that ends in the same two symbols, or -1.
        keys: int64[2^k], the pairs met, by open addressing; -1 where free.
        newest: int32[2^k], the last place of each pair.
        length: int64[1], how many symbols there are.
    """

    symbols: IntArray
    previous: IntArray
    keys: I64
    newest: IntArray
    length: I64


def empty_text(room: int = 1024) -> RecentText:
    """Return a text without symbols that has room for `room`."""
    slots = 1 << max(4, (2 * room - 1).bit_length())
    return RecentText(
        np.empty(room, np.int32),
        np.empty(room, np.int32),
        np.full(slots, -1, np.int64),
        np.empty(slots, np.int32),
        np.zeros(1, np.int64),
    )


NO_TEXT = empty_text(1)
"""Stands for a text that is not searched."""


def with_room(text: RecentText, more: int) -> RecentText:
    """Return `text`, or a copy of twice its room or more, that takes `more` symbols."""
    length = int(text.length[0])
    if length + more <= len(text.symbols):
        return text
    larger = empty_text(max(2 * len(text.symbols), length + more))
    if length:
        append(larger, text.symbols[:length].astype(np.int64))
    return larger


@njit(cache=True)
def _key(first: int, second: int) -> int:
    return int(np.int64(first) << 32 | np.int64(second))


@njit(cache=True)
def _slot(keys: I64, first: int, second: int) -> int:
    """Return where the pair of two tokens is, or belongs."""
    mask = len(keys) - 1
    key = _key(first, second)
    mixed = np.int64(first) * 0x9E3779B1 ^ np.int64(second) * 0x85EBCA6B
    slot = int(mixed ^ mixed >> 29) & mask
    while keys[slot] >= 0 and keys[slot] != key:
        slot = (slot + 1) & mask
    return slot


@njit(cache=True)
def newest_place(text: RecentText, first: int, second: int) -> int:
    """Return the last place that ends in two tokens, or -1."""
    slot = _slot(text.keys, first, second)
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
        slot = _slot(text.keys, text.symbols[at - 1], token)
        if text.keys[slot] >= 0:
            text.previous[at] = text.newest[slot]
        text.keys[slot] = _key(text.symbols[at - 1], token)
        text.newest[slot] = at


@njit(cache=True)
def occurrences(text: RecentText, context: I64, longest: int, most: int) -> tuple[IntArray, IntArray]:
    """Return where the context's last two tokens or more occurred and went on, newest first.

    Args:
        text: searched.
        context: int64[n], the tokens behind which something is wanted.
        longest: matches are measured up to this many tokens.
        most: at most so many are returned.

    Returns:
        The place behind each match, int32[K], and how many tokens match there, int32[K], 2 to `longest`.
    """
    places, lengths = np.empty(most, np.int32), np.empty(most, np.int32)
    found, n = 0, len(context)
    if n < 2 or context[n - 1] < 0 or context[n - 2] < 0:
        return places[:0], lengths[:0]
    slot = _slot(text.keys, context[n - 2], context[n - 1])
    place = int(text.newest[slot]) if text.keys[slot] >= 0 else -1
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
