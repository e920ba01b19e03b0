"""Successors of pairs and of single tokens learned from a sequence, with fading weights, in a hash table.

Does not depend on the static table, nor on the search.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from foredraft.contracts import TokenIds, Verdict
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.recent_text import I64, pair_key, slot_of

# chosen
ROW_WIDTH = 12  # successors per context; a new one replaces the weakest
FIRST_SLOTS = 1 << 12  # slots of a new table
MOST_SLOTS = 1 << 17  # slots of the largest table, about 13 MB; then the contexts seen longest ago are dropped
STRETCH = MOST_SLOTS // 8  # tokens of a long text learned at once; the table has room for them

NO_TOKEN = -1
"""The first token of a context of a single token."""
_EMPTY = -1  # key of a free slot


class LearnedArrays(NamedTuple):
    """The hash table, as arrays for compiled functions. S slots, a power of two, at most half of them used."""

    keys: I64  # int64[S], `pair_key(a + 1, b)` for the context (a, b), or -1 where the slot is free
    tokens: IntArray  # int32[S, 12], successors, unordered
    weights: FloatArray  # float32[S, 12], their weights; 0 after the last one
    totals: FloatArray  # float32[S], total weight learned in the context, replaced successors included
    met: I64  # int64[S], last use of the context, by `clock`
    clock: I64  # int64[2], learning events so far, and slots in use


def empty_learned(slots: int = FIRST_SLOTS) -> LearnedArrays:
    """Return an empty table; `slots` is a power of two."""
    return LearnedArrays(
        np.full(slots, _EMPTY, np.int64), np.zeros((slots, ROW_WIDTH), np.int32),
        np.zeros((slots, ROW_WIDTH), np.float32), np.zeros(slots, np.float32), np.zeros(slots, np.int64),
        np.zeros(2, np.int64),
    )  # fmt: skip


@njit(cache=True)
def learned_row(keys: I64, a: int, b: int) -> int:
    """Return the slot of the context (a, b), or -1 if it was not learned; `a` is -1 for `b` alone."""
    slot = slot_of(keys, pair_key(int(a) + 1, b))
    return slot if keys[slot] != _EMPTY else -1


@njit(cache=True)
def _opened(arrays: LearnedArrays, a: int, b: int, keep: float) -> int:
    """Return the slot of the context (a, b), added if new, after multiplying its weights by `keep`."""
    key = pair_key(int(a) + 1, b)
    slot = slot_of(arrays.keys, key)
    if arrays.keys[slot] == _EMPTY:
        arrays.keys[slot] = key
        arrays.clock[1] += 1
    arrays.clock[0] += 1
    arrays.met[slot] = arrays.clock[0]
    if keep != 1.0:
        for j in range(ROW_WIDTH):
            if arrays.weights[slot, j] == 0:
                break
            arrays.weights[slot, j] *= keep
        arrays.totals[slot] *= keep
    return slot


@njit(cache=True)
def _add_weight(arrays: LearnedArrays, slot: int, token: int, weight: float, cap: float) -> None:
    """Add `weight` to a successor in `slot`; a new one replaces the weakest."""
    place = 0
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
def learn(arrays: LearnedArrays, a: int, b: int, token: int, weight: float, keep: float, cap: float) -> None:
    """Multiply all weights after the context (a, b) by `keep`, and add `weight` to that of `token`, up to `cap`.

    There must be room: see `with_room`.
    """
    _add_weight(arrays, _opened(arrays, a, b, keep), token, weight, cap)


@njit(cache=True)
def learn_text(arrays: LearnedArrays, ids: I64, start: int, weight: float, keep: float, cap: float) -> None:
    """Learn every token of `ids` from index `start` on, after the two tokens before it and after the last one alone."""
    for i in range(max(start, 1), len(ids)):
        learn(arrays, NO_TOKEN, ids[i - 1], ids[i], weight, keep, cap)
        if i >= 2:
            learn(arrays, ids[i - 2], ids[i - 1], ids[i], weight, keep, cap)


@njit(cache=True)
def _rehashed(old: LearnedArrays, new: LearnedArrays, oldest: int) -> None:
    for slot in range(len(old.keys)):
        if old.keys[slot] != _EMPTY and old.met[slot] >= oldest:
            place = slot_of(new.keys, old.keys[slot])
            new.keys[place], new.totals[place], new.met[place] = old.keys[slot], old.totals[slot], old.met[slot]
            new.tokens[place], new.weights[place] = old.tokens[slot], old.weights[slot]
            new.clock[1] += 1
    new.clock[0] = old.clock[0]


def with_room(arrays: LearnedArrays, contexts: int, most_slots: int = MOST_SLOTS) -> LearnedArrays:
    """Return a table with the contents of `arrays` and room for `contexts` more; `arrays` itself if it has room.

    The table doubles up to `most_slots`; then the older half of the contexts is dropped. `contexts` is at most half of
    `most_slots`.
    """
    assert contexts <= most_slots // 2, "no table of this size can hold them"
    used, slots = int(arrays.clock[1]), len(arrays.keys)
    if 2 * (used + contexts) <= slots:
        return arrays
    while 2 * (used + contexts) > slots and slots < most_slots:
        slots *= 2
    oldest = 0
    if 2 * (used + contexts) > slots:
        kept = max(0, min(used // 2, slots // 2 - contexts))
        met = np.sort(arrays.met[arrays.keys != _EMPTY])
        oldest = int(met[-kept]) if kept else int(arrays.clock[0]) + 1
    larger = empty_learned(slots)
    if used:
        _rehashed(arrays, larger, oldest)
    return larger


def read_text(arrays: LearnedArrays, ids: I64, start: int, keep: float) -> LearnedArrays:
    """Learn `ids`, int64[n], from index `start` on, with weight 1; return `arrays` or a larger table."""
    for begin in range(start, len(ids), STRETCH):
        end = min(begin + STRETCH, len(ids))
        arrays = with_room(arrays, 2 * (end - begin))
        learn_text(arrays, ids[:end], begin, 1.0, keep, np.inf)
    return arrays


@njit(cache=True)
def learn_distributions(
    arrays: LearnedArrays, tokens: IntArray, parents: IntArray, rows: IntArray, before: int, root: int,
    top_tokens: IntArray, top_probabilities: FloatArray, weight: float, keep: float,
) -> None:  # fmt: skip
    """Learn the target's distributions after some rows of a draft, each with the weight of `weight` observations.

    The draft is `tokens` and `parents`, int32[N], after the tokens `before` (or -1) and `root`. `rows`, int32[S], are 0
    for the root and i + 1 for node i; `top_tokens`, int32[S, K], have probabilities `top_probabilities`, float32[S, K].
    Earlier weights in a context are multiplied by `keep`. There must be room for S more contexts.
    """
    for row in range(len(rows)):
        node, a, b = rows[row] - 1, before, root
        if node >= 0:
            a, b = root if parents[node] < 0 else tokens[parents[node]], tokens[node]
        slot = _opened(arrays, a, b, keep)
        for j in range(top_tokens.shape[1]):
            _add_weight(arrays, slot, top_tokens[row, j], weight * top_probabilities[row, j], np.inf)


def learn_verdict(arrays: LearnedArrays, verdict: Verdict, ids: TokenIds, weight: float, keep: float) -> LearnedArrays:
    """Learn the target's distributions in a verdict, if any; return `arrays` or a larger table.

    `ids`, int64[n], is the sequence, at least up to the draft's root, `ids[verdict.at]`.
    """
    draft, top, chances = verdict.draft, verdict.top_tokens, verdict.top_probabilities
    if top is None or chances is None:
        return arrays
    rows = np.arange(len(draft) + 1, dtype=np.int32) if verdict.top_rows is None else verdict.top_rows
    before = int(ids[verdict.at - 1]) if verdict.at > 0 else NO_TOKEN
    arrays, root = with_room(arrays, len(rows)), int(ids[verdict.at])
    learn_distributions(arrays, draft.tokens, draft.parents, rows, before, root, top, chances, weight, keep)
    return arrays
