"""An index of tree nodes by the last tau tokens of their paths.

Near the root, a path's tau-gram reaches back into the text before the tree. The hash table compares the tokens
themselves, so collisions do no harm. Does not depend on what equal nodes are used for.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.tree import IntArray

_BEFORE_THE_TEXT = -1
"""Symbol before the text's first token; no token equals it."""


class Grams(NamedTuple):
    """The nodes that end in each tau-gram. Changed in place.

    A place is a node, or -1 for the root, -2 for the token before it, and so on back through the text.
    """

    tokens: IntArray  # int32[R], of the nodes; shared with the caller, who fills it
    parents: IntArray  # int32[R], shared too
    tail: IntArray  # int32[<= tau], the end of the text before the tree; its last token is the root
    tau: int  # length of a gram in tokens, at least 1
    slots: IntArray  # int32[2^k], the first node of each gram by open addressing, -1 where free
    newest: IntArray  # int32[2^k], its last node
    later: IntArray  # int32[R], the next node with the same gram, or -1


def index_grams(tokens: IntArray, parents: IntArray, context: npt.NDArray[np.integer], tau: int) -> Grams:
    """Return an empty index; the nodes' `tokens` and `parents`, int32[R], may be filled later.

    `context`, int[n], is the text before the tree, the root last; its last `tau` tokens are enough.
    """
    room = len(tokens)
    slots = 1 << max(4, (2 * room).bit_length())
    tail = context[max(0, len(context) - tau) :].astype(np.int32)
    return Grams(
        tokens, parents, tail, tau, np.full(slots, -1, np.int32), np.empty(slots, np.int32), np.full(room, -1, np.int32)
    )


@njit(cache=True)
def _token_at(grams: Grams, place: int) -> int:
    if place >= 0:
        return int(grams.tokens[place])
    back = len(grams.tail) + place
    return int(grams.tail[back]) if back >= 0 else _BEFORE_THE_TEXT


@njit(cache=True)
def _before(grams: Grams, place: int) -> int:
    return int(grams.parents[place]) if place >= 0 else place - 1


@njit(cache=True)
def _is_gram_of(grams: Grams, node: int, parent: int, token: int) -> bool:
    """Return whether `node` ends in the gram that ends with `token` after the place `parent`."""
    if grams.tokens[node] != token:
        return False
    one, other = int(grams.parents[node]), parent
    for _ in range(grams.tau - 1):
        if one == other:
            return True
        if _token_at(grams, one) != _token_at(grams, other):
            return False
        one, other = _before(grams, one), _before(grams, other)
    return True


@njit(cache=True)
def _slot(grams: Grams, parent: int, token: int) -> int:
    """Return the slot of a gram, or the free slot where it belongs."""
    mixed, place = int(token) + 1, parent
    for _ in range(grams.tau - 1):  # both factors stay below 2^31, so nothing overflows
        mixed = ((mixed & 0x7FFFFFFF) * 0x2545F491 + _token_at(grams, place) + 1) & 0x7FFFFFFF
        place = _before(grams, place)
    mixed = (mixed & 0x7FFFFFFF) * 0x2545F491 & 0x7FFFFFFFFFFFFFFF
    mask = len(grams.slots) - 1
    slot = (mixed ^ mixed >> 19) & mask
    while grams.slots[slot] >= 0 and not _is_gram_of(grams, grams.slots[slot], parent, token):
        slot = (slot + 1) & mask
    return slot


@njit(cache=True)
def first_occurrence(grams: Grams, parent: int, token: int) -> int:
    """Return the first remembered node that ends in the gram that ends with `token` after the place `parent`, or -1.

    The others follow by `grams.later`, in the order in which they were remembered.
    """
    return int(grams.slots[_slot(grams, parent, token)])


@njit(cache=True)
def remember(grams: Grams, node: int) -> None:
    """Add a node, whose token and parent are filled in, after the nodes with the same gram."""
    slot = _slot(grams, int(grams.parents[node]), int(grams.tokens[node]))
    if grams.slots[slot] < 0:
        grams.slots[slot] = node
    else:
        grams.later[grams.newest[slot]] = node
    grams.newest[slot] = node
