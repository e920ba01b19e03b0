"""Successors of pairs and of single tokens learned from a sequence, with weights, in a table of fixed size.

Does not depend on the static table, nor on the search.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from foredraft.graph.tree import I64, FloatArray, IntArray
from foredraft.index.own_words import NO_TOKEN, context_key, fill_context, find, slot_for

# chosen
ROW_WIDTH = 12  # successors per context; a new one replaces the weakest
MOST_SLOTS = 1 << 16  # contexts stored at most, about 8 MB; then those learned longest ago are replaced


class LearnedArrays(NamedTuple):
    """The learned successors, as arrays for compiled functions. S slots, a power of two, at least 8."""

    keys: I64  # int64[S], `context_key(-1, a, b)` for the context (a, b); 0 where the slot is free
    learned: I64  # int64[S], last use of the context, by `clock`
    tokens: IntArray  # int32[S, 12], successors, unordered
    weights: FloatArray  # float32[S, 12], their weights; 0 after the last one
    totals: FloatArray  # float32[S], total weight learned in the context, replaced successors included
    clock: I64  # int64[1], learning events so far


def empty_learned(slots: int = MOST_SLOTS) -> LearnedArrays:
    """Return an empty table of `slots` contexts; unused slots take no memory."""
    return LearnedArrays(
        np.zeros(slots, np.int64), np.zeros(slots, np.int64), np.zeros((slots, ROW_WIDTH), np.int32),
        np.zeros((slots, ROW_WIDTH), np.float32), np.zeros(slots, np.float32), np.zeros(1, np.int64),
    )  # fmt: skip


@njit(cache=True)
def learned_row(arrays: LearnedArrays, a: int, b: int) -> int:
    """Return the slot of the context (a, b), or -1 if it was not learned; `a` is NO_TOKEN for `b` alone."""
    return find(arrays.keys, context_key(NO_TOKEN, a, b))


@njit(cache=True)
def learn(arrays: LearnedArrays, a: int, b: int, token: int, weight: float, cap: float) -> None:
    """Add `weight` to that of `token` after the context (a, b), up to `cap`; a new one replaces the weakest."""
    is_new, place = learned_row(arrays, a, b) < 0, 0
    slot = slot_for(arrays, context_key(NO_TOKEN, a, b))
    if is_new:
        for j in range(ROW_WIDTH):
            arrays.weights[slot, j] = 0.0
        arrays.totals[slot] = 0.0
    for j in range(ROW_WIDTH):
        if arrays.weights[slot, j] == 0 or arrays.tokens[slot, j] == token:
            place = j
            break
        if arrays.weights[slot, j] < arrays.weights[slot, place]:
            place = j
    if arrays.tokens[slot, place] != token:
        arrays.tokens[slot, place] = token
        arrays.weights[slot, place] = 0.0
    arrays.weights[slot, place] = min(arrays.weights[slot, place] + weight, cap)
    arrays.totals[slot] += weight


@njit(cache=True)
def learn_text(arrays: LearnedArrays, ids: I64, start: int) -> None:
    """Learn every token of `ids` from index `start` on, after the two tokens before it and after the last one alone."""
    for i in range(max(start, 1), len(ids)):
        learn(arrays, NO_TOKEN, ids[i - 1], ids[i], 1.0, np.inf)
        if i >= 2:
            learn(arrays, ids[i - 2], ids[i - 1], ids[i], 1.0, np.inf)


@njit(cache=True)
def learn_distributions(
    arrays: LearnedArrays, tokens: IntArray, parents: IntArray, ids: I64, top: IntArray, chances: FloatArray,
    weight: float,
) -> None:  # fmt: skip
    """Learn the target's distributions after the rows of a draft, each with the weight of `weight` observations.

    Draft, text and distributions are those of `learn_rows`.
    """
    context = np.empty(2, np.int64)
    for row in range(len(top)):
        fill_context(context, tokens, parents, row - 1, ids)
        for j in range(top.shape[1]):
            learn(arrays, context[0], context[1], top[row, j], weight * chances[row, j], np.inf)
