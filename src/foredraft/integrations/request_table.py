"""Requests without names: which text of the last steps does each row of a batch go on with?

vLLM tells a proposer no request ids, and rows move. So a request is known by its content: the text that is a prefix of
the row's. Knows token arrays; not what is drafted for them.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.tree import IntArray

I64 = npt.NDArray[np.int64]

PATIENCE = 64
"""Steps for which a text is kept that no row goes on with: preempted requests come back, finished ones do not."""


class RequestTable:
    """The texts of the requests that are being written, each in a slot.

    Args:
        slots: texts at most; at least as many as a batch has rows.
        longest: tokens of a text at most.
    """

    def __init__(self, slots: int, longest: int) -> None:
        # not touched before it is used, so that it costs what the texts cost
        self._texts: IntArray = np.empty((slots, longest), np.int32)
        self._lengths = np.zeros(slots, np.int64)
        self._seen = np.full(slots, -1, np.int64)
        self._hints = np.full(slots, -1, np.int64)
        self._step = 0

    def find(self, token_ids: IntArray, lengths: I64, rows: I64) -> tuple[I64, I64, list[int]]:
        """Return the slots of the rows, and take up what is new in them.

        Args:
            token_ids: int32[B, L], a row a request.
            lengths: int64[B], tokens of each row that count.
            rows: int64[R], the rows that are wanted; R is at most the number of slots.

        Returns:
            slots int64[R]; known int64[R], how many tokens of the row the slot has had before, 0 for a new request; and
            the slots that were given up or taken over, whose state is to be dropped before the rows' is used.
        """
        self._step += 1
        slots = find_slots(self._texts, self._lengths, token_ids, lengths, rows, self._hints)
        self._seen[slots[slots >= 0]] = self._step
        late = np.flatnonzero((self._lengths > 0) & (self._seen < self._step - PATIENCE))
        self._lengths[late] = 0
        dropped = late.tolist()
        new = np.flatnonzero(slots < 0)
        if len(new):
            # free slots first, then the ones not gone on with for longest
            order = np.argsort(np.where(self._lengths > 0, self._seen, -1), kind="stable")[: len(new)]
            dropped += order[self._lengths[order] > 0].tolist()
            slots[new] = order
            self._lengths[order] = 0
            self._seen[order] = self._step
        known = self._lengths[slots].copy()
        take_up(self._texts, self._lengths, token_ids, lengths, rows, slots)
        self._hints[:] = -1
        self._hints[rows] = slots
        return slots, known, dropped


@njit(cache=True)
def _goes_on(text: IntArray, length: int, ids: IntArray, room: int) -> bool:
    """Return whether the text's first `length` tokens, at least one, are those of `ids`, compared from the end."""
    place = length - 1 if length <= room else 0
    while place >= 0 and text[place] == ids[place]:
        place -= 1
    return 0 < length <= room and place < 0


@njit(cache=True)
def find_slots(texts: IntArray, known: I64, token_ids: IntArray, lengths: I64, rows: I64, hints: I64) -> I64:
    """Return for each of `rows` the slot whose text it goes on with, int64[R]; -1 for none. No slot is given twice.

    The slot that a row had in the last step, `hints[row]`, is asked first; then the longest text that fits is taken.

    Args:
        texts: int32[S, L].
        known: int64[S], tokens of each text; 0 for a free slot.
        token_ids: int32[B, L].
        lengths: int64[B].
        rows: int64[R].
        hints: int64[S], S at least the number of rows; -1 for none.
    """
    found = np.full(len(rows), -1, np.int64)
    claimed = np.zeros(len(texts), np.bool_)
    for i in range(len(rows)):
        row = rows[i]
        slot = hints[row]
        if slot >= 0 and not claimed[slot] and _goes_on(texts[slot], known[slot], token_ids[row], lengths[row]):
            found[i] = slot
            claimed[slot] = True
    for i in range(len(rows)):
        row = rows[i]
        if found[i] >= 0:
            continue
        for slot in range(len(texts)):
            better = found[i] < 0 or known[slot] > known[found[i]]
            if better and not claimed[slot] and _goes_on(texts[slot], known[slot], token_ids[row], lengths[row]):
                found[i] = slot
        if found[i] >= 0:
            claimed[found[i]] = True
    return found


@njit(cache=True)
def take_up(texts: IntArray, known: I64, token_ids: IntArray, lengths: I64, rows: I64, slots: I64) -> None:
    """Copy what is new in each of `rows` into its slot's text."""
    for i in range(len(rows)):
        row, slot = rows[i], slots[i]
        for place in range(known[slot], lengths[row]):
            texts[slot, place] = token_ids[row, place]
        known[slot] = lengths[row]
