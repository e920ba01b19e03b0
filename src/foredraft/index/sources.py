"""What may follow a node of a draft, by every source that is cheap to ask.

Each source lists candidates: the target's own words, a table made ahead, the text itself, shared text, stored rows, a
neural draft. Each puts a candidate into a cell by what it knows of it. What a cell is worth, and how drafts are made of
candidates, is not known here (index/blend.py).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.own_words import I64, TOP, U8, OwnWords, context_key, find
from foredraft.index.recent_text import RecentText, newest_place

F64 = npt.NDArray[np.float64]

SOURCES = 7
UNLISTED = 0
"""The cell of a candidate that a source which knows the context does not list."""
ABSENT = 255
"""Stands for a cell where the source does not know the context."""
WORDS_3, WORDS_2, WORDS_1, OWN, SHARED, STORE, NEURAL = range(SOURCES)
"""The sources: words after three, two and one tokens, the text itself, shared text, stored texts, a neural draft."""
LONGEST = 16
"""Tokens of context that are compared."""
# our choices; the rates are fitted to these bins (scripts/fit_rates.py)
_PLACES, _ROOT_PLACES = 16, 64  # occurrences looked at after a node, and after the root
_LISTED = 64  # candidates after a node at most
_OF_TEXT, _OF_TABLE, _OF_OTHERS = 1, 28, 55  # first of 27 cells: three ranks, nine bins of probability
_SHARES = np.array([0.01, 0.03, 0.08, 0.15, 0.3, 0.5, 0.7, 0.9])  # bounds of bins of probabilities
_LENGTHS = np.array([3.0, 4.0, 6.0, 9.0, 16.0])  # of bins of matches, in tokens
MARKS = 7
"""Columns of marks, see `Listed`."""
_ROWS_LOW, _ROWS_HIGH, _PLACE, _LENGTH, _NODE = 0, 1, 2, 3, 6  # columns of marks; place and length twice: own, shared


class Rows(NamedTuple):
    """What followed in stored texts, rows in lexical order."""

    tokens: IntArray  # int32[R, D], -1 after the end of a text
    weights: FloatArray  # float32[R]
    lengths: IntArray  # int32[R], tokens of context that matched


class Foreseen(NamedTuple):
    """A neural draft."""

    tokens: IntArray  # int32[M]
    parents: IntArray  # int32[M]
    score: FloatArray  # float32[M]


NO_ROWS = Rows(np.zeros((0, 1), np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))
NOTHING_FORESEEN = Foreseen(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))


class Sources(NamedTuple):
    """What is asked."""

    words: OwnWords  # of the target, learned
    began: int  # what of them was learned later belongs to this text, see `OwnWords.clock`
    table: OwnWords  # made ahead; asked where nothing was learned in this text, before what was learned in others
    own: RecentText  # the text itself
    shared: RecentText  # what other requests wrote
    rows: Rows  # what followed in stored texts after the root
    foreseen: Foreseen  # by a neural drafter


class Listed(NamedTuple):
    """The candidates after one node, L of them at most.

    `marks` say where each source goes on after the candidate: its stored rows from and up to; its place in the text
    itself and the length of the match there; the same in shared text; its node in the neural draft. No rows, place -1
    and node -2 where it does not.
    """

    tokens: IntArray  # int32[L]
    cells: U8  # uint8[L, 7], what each source says
    marks: IntArray  # int32[L, 7]
    tally: IntArray  # int32[L, 3], occurrences in the text that is asked: how many, whether the newest, longest match
    made: I64  # int64[1], how many there are


@njit(cache=True)
def empty_list() -> Listed:
    """Return room for the candidates after one node."""
    return Listed(
        np.empty(_LISTED, np.int32), np.empty((_LISTED, SOURCES), np.uint8), np.empty((_LISTED, MARKS), np.int32),
        np.empty((_LISTED, 3), np.int32), np.zeros(1, np.int64),
    )  # fmt: skip


@njit(cache=True)
def _bin(value: float, bounds: F64) -> int:
    """Return how many of the ascending bounds are reached."""
    number = 0
    while number < len(bounds) and value >= bounds[number]:
        number += 1
    return number


@njit(cache=True)
def _candidate(listed: Listed, token: int) -> int:
    """Return the place of a token in the list, made if need be; -1 where there is no room."""
    count = listed.made[0]
    for i in range(count):
        if listed.tokens[i] == token:
            return i
    if count == len(listed.tokens):
        return -1
    listed.tokens[count] = token
    listed.cells[count, :] = ABSENT
    listed.marks[count, :] = 0
    listed.marks[count, _PLACE] = listed.marks[count, _PLACE + 2] = -1
    listed.marks[count, _NODE] = -2
    listed.tally[count, :] = 0
    listed.made[0] += 1
    return int(count)


@njit(cache=True)
def _list_words(sources: Sources, key: int, source: int, listed: Listed) -> bool:
    """List what the target said after a context, or else what the table says; say whether either knows it."""
    known, slot, cell = sources.words, find(sources.words, key), _OF_TEXT
    if slot < 0 or known.learned[slot] <= sources.began:
        of_table = find(sources.table, key)
        if of_table >= 0:
            known, slot, cell = sources.table, of_table, _OF_TABLE
        elif slot < 0:
            return False
        else:
            cell = _OF_OTHERS
    for i in range(TOP):
        parts = known.chances[slot, i]
        if parts == 0:
            break
        at = _candidate(listed, known.tokens[slot, i])
        if at >= 0:
            listed.cells[at, source] = cell + min(i, 2) * 9 + _bin(parts / 255.0, _SHARES)
    return True


@njit(cache=True)
def _matching(text: RecentText, place: int, context: I64) -> int:
    """Return how many tokens up to `place` are the context's last ones; at least two are."""
    length = 2
    while (
        length < LONGEST and length <= place and context[LONGEST - 1 - length] >= 0
        and text.symbols[place - length] == context[LONGEST - 1 - length]
    ):  # fmt: skip
        length += 1
    return length


@njit(cache=True)
def _tally(text: RecentText, place: int, length: int, newest: bool, column: int, listed: Listed) -> int:
    """Count one occurrence that ends at `place`; return 1, or 0 where nothing follows it."""
    if place + 1 >= text.length[0] or text.symbols[place + 1] < 0:
        return 0
    at = _candidate(listed, text.symbols[place + 1])
    if at < 0:
        return 0
    listed.tally[at, 0] += 1
    listed.tally[at, 1] |= newest
    if length > listed.tally[at, 2]:
        listed.tally[at, 2] = length
        listed.marks[at, column], listed.marks[at, column + 1] = place + 1, min(length + 1, LONGEST)
    return 1


@njit(cache=True)
def _list_places(text: RecentText, context: I64, mark: IntArray, visits: int, source: int, listed: Listed) -> bool:
    """List what followed the context's last two tokens or more in a text, at the newest places and the parent's."""
    if context[LONGEST - 2] < 0 or not text.length[0]:
        return False
    listed.tally[: listed.made[0], :] = 0
    column, total = _PLACE if source == OWN else _PLACE + 2, 0
    place = newest_place(text, context[LONGEST - 2], context[LONGEST - 1])
    for _ in range(visits):
        if place < 0:
            break
        total += _tally(text, place, _matching(text, place, context), total == 0, column, listed)
        place = text.previous[place]
    if mark[column] >= 0:  # may be one of those, which then counts twice
        total += _tally(text, mark[column], mark[column + 1], False, column, listed)
    for at in range(listed.made[0]):
        count, newest, length = listed.tally[at]
        if count:
            share, long = 0 if 3 * count < total else 1 if count < total else 2, _bin(float(length), _LENGTHS)
            listed.cells[at, source] = 1 + ((long * 3 + share) * 2 + min(count - 1, 1)) * 2 + newest
    return total > 0


@njit(cache=True)
def _list_rows(rows: Rows, mark: IntArray, depth: int, listed: Listed) -> bool:
    """List what the stored rows that go on to the parent go on with."""
    low, high = mark[_ROWS_LOW], mark[_ROWS_HIGH]
    if depth >= rows.tokens.shape[1]:
        return False
    while low < high and rows.tokens[low, depth] < 0:
        low += 1  # rows that have ended come first
    total = np.float32(0)
    for row in range(low, high):
        total += rows.weights[row]
    many = 0 if high - low == 1 else 1 if high - low < 5 else 2
    end = low
    while end < high:
        begin, token, weight, longest = end, rows.tokens[end, depth], np.float32(0), 0
        while end < high and rows.tokens[end, depth] == token:
            weight, longest = weight + rows.weights[end], max(longest, rows.lengths[end])
            end += 1
        at = _candidate(listed, token)
        if at >= 0:
            listed.marks[at, _ROWS_LOW], listed.marks[at, _ROWS_HIGH] = begin, end
            length = min(_bin(float(longest + depth), _LENGTHS), 3)
            listed.cells[at, STORE] = 1 + (_bin(float(weight / total), _SHARES) * 4 + length) * 3 + many
    return bool(high > low)


@njit(cache=True)
def _list_foreseen(foreseen: Foreseen, parent: int, listed: Listed) -> bool:
    """List the children of a node of the neural draft, -1 for its root."""
    above, found = float(foreseen.score[parent]) if parent >= 0 else 1.0, False
    for node in range(parent + 1, len(foreseen.tokens)):
        if foreseen.parents[node] != parent:
            continue
        found, at = True, _candidate(listed, foreseen.tokens[node])
        if at >= 0:
            listed.marks[at, _NODE] = node
            listed.cells[at, NEURAL] = 1 + _bin(float(foreseen.score[node]) / max(above, 1e-9), _SHARES)
    return found


@njit(cache=True)
def list_all(sources: Sources, context: I64, mark: IntArray, depth: int, listed: Listed) -> int:
    """List what may follow a context; return the sources that know it, as bits."""
    listed.made[0] = 0
    known = 0
    a, b, c = context[LONGEST - 3], context[LONGEST - 2], context[LONGEST - 1]
    if a >= 0:
        known |= _list_words(sources, context_key(a, b, c), WORDS_3, listed) << WORDS_3
    if b >= 0:
        known |= _list_words(sources, context_key(-1, b, c), WORDS_2, listed) << WORDS_2
    known |= _list_words(sources, context_key(-1, -1, c), WORDS_1, listed) << WORDS_1
    visits = _PLACES if depth else _ROOT_PLACES
    known |= _list_places(sources.own, context, mark, visits, OWN, listed) << OWN
    known |= _list_places(sources.shared, context, mark, visits, SHARED, listed) << SHARED
    known |= _list_rows(sources.rows, mark, depth, listed) << STORE
    if mark[_NODE] >= -1:
        known |= _list_foreseen(sources.foreseen, mark[_NODE], listed) << NEURAL
    for source in range(SOURCES):
        if known >> source & 1:
            for i in range(listed.made[0]):
                if listed.cells[i, source] == ABSENT:
                    listed.cells[i, source] = UNLISTED
    return known


@njit(cache=True)
def root_mark(sources: Sources) -> IntArray:
    """Return where the sources go on after the root, int32[7], see `Listed`."""
    return np.array([0, len(sources.rows.tokens), -1, 0, -1, 0, -1], np.int32)
