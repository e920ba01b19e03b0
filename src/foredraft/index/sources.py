"""The candidates after a node of a draft, listed by every cheap source.

The sources are the target's own words, a prebuilt table, the text itself, shared text, rows of a datastore, and a
neural draft. Each source puts a candidate into one of its cells: a bin of ranks, probabilities or counts. Does not
depend on the probability of a cell, nor on the search (index/blend.py).
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from foredraft.contracts import TOP
from foredraft.graph.tree import F64, I64, U8, FloatArray, IntArray
from foredraft.index.own_words import NO_TOKEN, OwnWords, context_key, find, int64
from foredraft.index.recent_text import RecentText, newest_place

SOURCES = 7
WORDS_3, WORDS_2, WORDS_1, OWN, SHARED, STORE, NEURAL = range(SOURCES)
"""The sources: own words after three, two and one tokens, the text itself, shared text, datastores, a neural draft."""
UNLISTED = 0  # the cell of a candidate that a source does not list although it knows the context
ABSENT = 255  # the cell of any candidate in a source that does not know the context
LONGEST = 16  # tokens of context compared at most
# chosen; changing the bins requires fitting the rates again (scripts/fit_rates.py)
_PLACES, _ROOT_PLACES = 16, 64  # occurrences read after a node, and after the root
LISTED = 64  # candidates after a node at most (chosen)
_CANDIDATES = 32  # room per node of the draft (chosen); further candidates are dropped
_OF_TEXT, _OF_TABLE, _OF_OTHERS = 1, 28, 55  # first of 27 cells each: three ranks times nine bins of probability
SHARES = np.array([0.01, 0.03, 0.08, 0.15, 0.3, 0.5, 0.7, 0.9])  # bounds of the bins of probability
_LENGTHS = np.array([3.0, 4.0, 6.0, 9.0, 16.0])  # bounds of the bins of match length, in tokens
CURSORS = 7  # columns of `Candidates.cursors`
_ROWS_LOW, _ROWS_HIGH, _PLACE, _LENGTH, _NODE = 0, 1, 2, 3, 6  # columns; place and length for own, then for shared


class Rows(NamedTuple):
    """Continuations found in datastores, rows in lexical order."""

    tokens: IntArray  # int32[R, D], -1 after the end of a text
    weights: FloatArray  # float32[R]
    lengths: IntArray  # int32[R], matching tokens of context


class NeuralDraft(NamedTuple):
    """The draft of a neural drafter, a tree of M nodes."""

    tokens: IntArray  # int32[M]
    parents: IntArray  # int32[M]
    score: FloatArray  # float32[M]


NO_ROWS = Rows(np.zeros((0, 1), np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))
NO_NEURAL_DRAFT = NeuralDraft(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))


class Sources(NamedTuple):
    """All sources."""

    words: OwnWords  # learned from the target
    began: int  # `OwnWords.clock` at the start of this text
    table: OwnWords  # prebuilt; used if nothing was learned in this text, before what was learned in other texts
    own: RecentText  # the text itself
    shared: RecentText  # of other requests
    rows: Rows  # continuations of the root in datastores
    neural: NeuralDraft  # of the root


class Candidates(NamedTuple):
    """The candidates that a search considers, C at most, and the draft that it chooses from them, N nodes at most.

    `cursors` say where each source continues after a candidate: first and last + 1 of its rows; its place in the text
    itself and the length of the match there; the same in shared text; its node in the neural draft. Without a
    continuation there are no rows, the place is -1 and the node is -2.
    """

    tokens: IntArray  # int32[C]
    parents: IntArray  # int32[C], the candidate before, -1 for the root; only drafted ones are parents
    depths: IntArray  # int32[C]
    score: FloatArray  # float32[C]
    cells: U8  # uint8[C, 7], the cell in each source
    known: IntArray  # int32[C], the sources that know the context, as bits
    cursors: IntArray  # int32[C, 7]
    expected: FloatArray  # float32[C], the probability after the parent, without what the noise says
    margin: IntArray  # int32[C], the cell in `Rates.margins`; -1 without noise
    nodes: IntArray  # int32[C], the number in the draft of a drafted candidate
    drafted: IntArray  # int32[N], the candidate of each node
    made: I64  # int64[2], number of candidates, and of nodes


def room_to_draft(most: int) -> Candidates:
    """Return room for a draft of at most `most` nodes, and for its candidates."""
    room = (most + 2) * _CANDIDATES + LISTED
    return Candidates(
        np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.float32),
        np.empty((room, SOURCES), np.uint8), np.empty(room, np.int32), np.empty((room, CURSORS), np.int32),
        np.empty(room, np.float32), np.empty(room, np.int32), np.empty(room, np.int32), np.empty(most, np.int32),
        np.zeros(2, np.int64),
    )  # fmt: skip


@njit(cache=True)
def bin_of(value: float, bounds: F64) -> int:
    """Return how many of the ascending bounds `value` reaches."""
    return int(np.searchsorted(bounds, value, side="right"))


@njit(cache=True)
def _candidate(room: Candidates, start: int, token: int) -> int:
    """Return a token's index among the candidates from `start` on, added if new; -1 if there are too many."""
    tokens, made = room.tokens, room.made
    cells, cursors = room.cells, room.cursors
    at = made[0]
    for i in range(start, at):
        if tokens[i] == token:
            return i
    if at == start + LISTED:
        return -1
    tokens[at] = token
    for column in range(SOURCES):  # not as slices: numba's check of shapes takes seconds to compile
        cells[at, column] = ABSENT
    for column in range(CURSORS):
        cursors[at, column] = 0
    cursors[at, _PLACE] = cursors[at, _PLACE + 2] = -1
    cursors[at, _NODE] = -2
    made[0] += 1
    return int(at)


@njit(cache=True)
def _list_words(words: OwnWords, slot: int, cell: int, source: int, room: Candidates, start: int) -> None:
    """List the successors in a slot of own words or of a table, in the cells from `cell` on."""
    tokens, chances, cells = words.tokens, words.chances, room.cells
    for i in range(TOP):
        parts = chances[slot, i]
        if parts == 0:
            break
        at = _candidate(room, start, tokens[slot, i])
        if at >= 0:
            cells[at, source] = cell + min(i, 2) * 9 + bin_of(parts / 255.0, SHARES)


@njit(cache=True)
def _tally(
    symbols: IntArray, place: int, length: int, newest: int, column: int, tally: IntArray, room: Candidates, start: int
) -> int:
    """Count one occurrence that ends at `place`, 1 for the `newest`; return 1, or 0 if nothing follows it."""
    if place + 1 >= len(symbols) or symbols[place + 1] < 0:
        return 0
    at = _candidate(room, start, symbols[place + 1])
    if at < 0:
        return 0
    tally[at - start, 0] += 1
    tally[at - start, 1] |= newest
    if length > tally[at - start, 2]:
        tally[at - start, 2] = length
        room.cursors[at, column], room.cursors[at, column + 1] = place + 1, min(length + 1, LONGEST)
    return 1


@njit(cache=True)
def _list_places(
    text: RecentText, context: I64, parent: IntArray, visits: int, source: int, room: Candidates, start: int
) -> bool:
    """List what followed the context's last two tokens or more in a text, at the newest places and the parent's.

    `parent`, int32[7], are the cursors of the node that the candidates come after.
    """
    symbols, column = text.symbols[: text.length[0]], _PLACE + 2 * (source - OWN)
    if context[LONGEST - 2] < 0 or not len(symbols):
        return False
    tally = np.zeros((LISTED, 3), np.int32)  # of each candidate: occurrences, whether one is the newest, longest match
    place, total = newest_place(text, context[LONGEST - 2], context[LONGEST - 1]), 0
    for _ in range(visits):
        if place < 0:
            break
        length = int64(2)  # tokens up to `place` that match the end of the context
        while length < min(LONGEST, place + 1) and symbols[place - length] == context[LONGEST - 1 - length] >= 0:
            length += 1
        total += _tally(symbols, place, length, int64(total == 0), column, tally, room, start)
        place = int64(text.previous[place])
    if parent[column] >= 0:  # may be one of these places, and then counts twice
        at, length = int64(parent[column]), int64(parent[column + 1])
        total += _tally(symbols, at, length, int64(0), column, tally, room, start)
    for at in range(start, room.made[0]):
        count, newest, length = tally[at - start]
        if count:
            share, long = 0 if 3 * count < total else 1 if count < total else 2, bin_of(float(length), _LENGTHS)
            room.cells[at, source] = 1 + ((long * 3 + share) * 2 + min(count - 1, 1)) * 2 + newest
    return total > 0


@njit(cache=True)
def _list_rows(rows: Rows, parent: IntArray, depth: int, room: Candidates, start: int) -> bool:
    """List what follows in the rows that contain the parent's path."""
    tokens, weights, lengths = rows
    low, high = parent[_ROWS_LOW], parent[_ROWS_HIGH]
    if depth >= tokens.shape[1]:
        return False
    while low < high and tokens[low, depth] < 0:
        low += 1  # ended rows come first
    total = np.float32(0)
    for row in range(low, high):
        total += weights[row]
    many = 0 if high - low == 1 else 1 if high - low < 5 else 2
    end = low
    while end < high:
        begin, token, weight, longest = end, tokens[end, depth], np.float32(0), 0
        while end < high and tokens[end, depth] == token:
            weight, longest = weight + weights[end], max(longest, lengths[end])
            end += 1
        at = _candidate(room, start, token)
        if at >= 0:
            room.cursors[at, _ROWS_LOW], room.cursors[at, _ROWS_HIGH] = begin, end
            length = min(bin_of(float(longest + depth), _LENGTHS), 3)
            room.cells[at, STORE] = 1 + (bin_of(float(weight / total), SHARES) * 4 + length) * 3 + many
    return bool(high > low)


@njit(cache=True)
def _list_neural(neural: NeuralDraft, parent: int, room: Candidates, start: int) -> bool:
    """List the children of a node of the neural draft, -1 for its root."""
    tokens, parents, score = neural
    above, found = float(score[parent]) if parent >= 0 else 1.0, False
    for node in range(parent + 1, len(tokens)):
        if parents[node] != parent:
            continue
        found, at = True, _candidate(room, start, tokens[node])
        if at >= 0:
            room.cursors[at, _NODE] = node
            room.cells[at, NEURAL] = 1 + bin_of(float(score[node]) / max(above, 1e-9), SHARES)
    return found


@njit(cache=True)
def list_all(sources: Sources, context: I64, parent: IntArray, depth: int, room: Candidates) -> int:
    """Add the candidates after a context, 64 at most, to `room`; return the sources that know it, as bits.

    `parent`, int32[7], are the cursors of the node that they come after, which is at `depth`.
    """
    start, known, words, table = room.made[0], 0, sources.words, sources.table
    a, b, c = context[LONGEST - 3], context[LONGEST - 2], context[LONGEST - 1]
    # a loop, and constants as int64: numba compiles a function again for each constant that it is called with
    for source in range(WORDS_3, WORDS_1 + 1):
        if context[LONGEST - 3 + source] < 0:
            continue
        key = context_key(a if source == WORDS_3 else NO_TOKEN, b if source < WORDS_1 else NO_TOKEN, c)
        slot, of_table, cell = find(words.keys, key), -1, int64(_OF_TEXT)
        if slot < 0 or words.learned[slot] <= sources.began:
            of_table, cell = find(table.keys, key), int64(_OF_OTHERS)
        if of_table >= 0:
            _list_words(table, of_table, int64(_OF_TABLE), source, room, start)
        elif slot >= 0:
            _list_words(words, slot, cell, source, room, start)
        known |= (slot >= 0 or of_table >= 0) << source
    visits = _PLACES if depth else _ROOT_PLACES
    known |= _list_places(sources.own, context, parent, visits, int64(OWN), room, start) << OWN
    known |= _list_places(sources.shared, context, parent, visits, int64(SHARED), room, start) << SHARED
    known |= _list_rows(sources.rows, parent, depth, room, start) << STORE
    if parent[_NODE] >= -1:
        known |= _list_neural(sources.neural, parent[_NODE], room, start) << NEURAL
    for i in range(start, room.made[0]):
        for source in range(SOURCES):
            if known >> source & 1 and room.cells[i, source] == ABSENT:
                room.cells[i, source] = UNLISTED
    return known
