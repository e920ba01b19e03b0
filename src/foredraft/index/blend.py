"""Blending: the most probable paths by all sources that are cheap to ask, in one best-first search.

After each node of the draft every source lists what may follow, in cells (index/sources.py). A cell's chance is the
share of its candidates that the target chose, counted wherever the target came to choose among them. The chances of the
sources that know a context are mixed in the logistic domain, by weights that are learned with each choice (Mahoney,
"Adaptive Weighing of Context Models for Lossless Data Compression", 2005), and a path's score is the product of such
chances. Knows arrays; not where texts and rows come from, nor how many nodes are worth verifying.
"""

from importlib import resources
from typing import NamedTuple

import numpy as np
from numba import njit

from foredraft.graph.search import pop, sift_up
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.own_words import I64, U8, fill_context, learn_rows
from foredraft.index.recent_text import append
from foredraft.index.sources import (
    ABSENT,
    LONGEST,
    MARKS,
    SOURCES,
    UNLISTED,
    Sources,
    empty_list,
    list_all,
    root_mark,
)

CELLS = 128
"""Of a source, more than any has."""
_MOST_SEEN = np.float32(1000.0)  # candidates of a cell, beyond which older ones count for less
_STEP = np.float32(0.01)  # of the weights, along the gradient; our choice, as the others
_LEAST_SHARE = np.float32(0.002)  # of hits, and of misses, so that logarithms stay finite
_CANDIDATES = 32  # that there is room for, for each node of the draft; further ones are dropped


# --- rates


class Rates(NamedTuple):
    """What was counted."""

    hits: FloatArray  # float32[7, 128], candidates of a source's cell that the target chose
    seen: FloatArray  # float32[7, 128], candidates of the cell among which it chose
    weights: FloatArray  # float32[128, 8], by the set of sources that know a context, as bits; the last is a constant


def flat_rates() -> Rates:
    """Return the rates of somebody who has seen nothing."""
    return Rates(
        np.full((SOURCES, CELLS), 0.4, np.float32), np.full((SOURCES, CELLS), 2.0, np.float32),
        np.repeat(np.array([[0.45] * SOURCES + [0.0]], np.float32), 1 << SOURCES, axis=0),
    )  # fmt: skip


def prior_rates(*, sampled: bool) -> Rates:
    """Return rates fitted on real texts (scripts/fit_rates.py), for sampling or for greedy decoding."""
    mode = "sampled" if sampled else "greedy"
    with resources.files("foredraft.index").joinpath("rates.npz").open("rb") as file, np.load(file) as kept:
        return Rates(*(kept[f"{mode}_{name}"] for name in Rates._fields))


@njit(cache=True, error_model="numpy")
def chance(rates: Rates, cells: U8, known: int) -> float:
    """Return a candidate's chance by its cells, uint8[7]; `known` is the set of sources that know the context."""
    total = rates.weights[known, SOURCES]
    for source in range(SOURCES):
        cell = cells[source]
        if cell != ABSENT:
            hits, seen = rates.hits[source, cell], rates.seen[source, cell]
            total += rates.weights[known, source] * np.log(hits / (seen - hits))
    return float(np.float32(1) / (np.float32(1) + np.exp(-total)))


@njit(cache=True, error_model="numpy")
def credit(rates: Rates, cells: U8, known: int, chosen: bool) -> None:
    """Count a candidate among which the target chose, and whether it chose this one."""
    error = np.float32(chosen) - np.float32(chance(rates, cells, known))
    rates.weights[known, SOURCES] += _STEP * error
    for source in range(SOURCES):
        cell = cells[source]
        if cell == ABSENT:
            continue
        hits, seen = rates.hits[source, cell], rates.seen[source, cell]
        rates.weights[known, source] += _STEP * error * np.log(hits / (seen - hits))
        keep = min(np.float32(1), _MOST_SEEN / (seen + 1))
        seen = (seen + 1) * keep
        hits = (hits + np.float32(chosen)) * keep
        rates.seen[source, cell] = seen
        rates.hits[source, cell] = min(max(hits, _LEAST_SHARE * seen), (1 - _LEAST_SHARE) * seen)


# --- the draft


class Nodes(NamedTuple):
    """Nodes of a draft, or candidates for one: N at most."""

    tokens: IntArray  # int32[N]
    parents: IntArray  # int32[N]
    score: FloatArray  # float32[N]
    cells: U8  # uint8[N, 7], what each source says
    known: IntArray  # int32[N], the sources that know the context, as bits
    marks: IntArray  # int32[N, 7], see `Listed`


@njit(cache=True)
def room_for(count: int) -> Nodes:
    """Return room for so many nodes."""
    return Nodes(
        np.empty(count, np.int32), np.empty(count, np.int32), np.empty(count, np.float32),
        np.empty((count, SOURCES), np.uint8), np.empty(count, np.int32), np.empty((count, MARKS), np.int32),
    )  # fmt: skip


@njit(cache=True)
def _copy(source: Nodes, i: int, target: Nodes, j: int) -> None:
    target.tokens[j], target.parents[j], target.score[j] = source.tokens[i], source.parents[i], source.score[i]
    target.cells[j], target.known[j], target.marks[j] = source.cells[i], source.known[i], source.marks[i]


@njit(cache=True)
def blend(sources: Sources, rates: Rates, nodes: Nodes, ids: I64, size: tuple[int, int, int]) -> int:
    """Draft the most probable paths into `nodes`, best first; return how many there are.

    Args:
        sources: what is asked.
        rates: what its answers are worth.
        nodes: room for the draft.
        ids: int64[n], the text, or its last `LONGEST` tokens; the root is the last one.
        size: nodes at most; no node deeper than; no token at or above.
    """
    most, deepest, vocabulary = size
    waiting, listed, context = room_for((most + 2) * _CANDIDATES), empty_list(), np.empty(LONGEST, np.int64)
    heap, depths = np.empty(len(waiting.tokens), np.int32), np.empty(most, np.int32)
    count, made, size_of_heap, node, depth, above = 0, 0, 0, -1, 0, np.float32(1)
    mark = root_mark(sources)
    while True:
        if depth < deepest:
            fill_context(context, nodes.tokens, nodes.parents, node, ids)
            known = list_all(sources, context, mark, depth, listed)
            for i in range(listed.made[0]):
                if made == len(heap) or not 0 <= listed.tokens[i] < vocabulary:
                    continue
                waiting.tokens[made], waiting.parents[made] = listed.tokens[i], node
                waiting.score[made] = above * np.float32(chance(rates, listed.cells[i], known))
                waiting.cells[made], waiting.known[made] = listed.cells[i], known
                waiting.marks[made] = listed.marks[i]
                heap[size_of_heap] = made
                made, size_of_heap = made + 1, size_of_heap + 1
                sift_up(heap, size_of_heap, waiting.score)
        if count == most or size_of_heap == 0:
            return count
        best = pop(heap, size_of_heap, waiting.score)
        size_of_heap, node, count = size_of_heap - 1, count, count + 1
        _copy(waiting, best, nodes, node)
        parent, above, mark = nodes.parents[node], nodes.score[node], nodes.marks[node]
        depth = depths[node] = 1 if parent < 0 else depths[parent] + 1


@njit(cache=True)
def main_source(rates: Rates, cells: U8) -> int:
    """Return the source that gives a node the highest chance by itself."""
    found, most = 0, np.float32(-1)
    for source in range(SOURCES):
        cell = cells[source]
        if cell not in (ABSENT, UNLISTED) and rates.hits[source, cell] > most * rates.seen[source, cell]:
            found, most = source, rates.hits[source, cell] / rates.seen[source, cell]
    return found


@njit(cache=True)
def learn_choices(rates: Rates, nodes: Nodes, count: int, written: I64) -> None:
    """Count the first `count` nodes, as far as the target chose among them: `written`, int64[k], is what it wrote."""
    depths = np.full(count, -1, np.int64)  # of the nodes on the written path
    for node in range(count):
        parent = nodes.parents[node]
        depth = 0 if parent < 0 else depths[parent]
        if depth < 0 or depth >= len(written):
            continue
        chosen = nodes.tokens[node] == written[depth]
        if chosen:
            depths[node] = depth + 1
        credit(rates, nodes.cells[node], nodes.known[node], chosen)


class Told(NamedTuple):
    """What the target says next, after rows of a verified draft."""

    tokens: IntArray  # int32[N], the draft's
    parents: IntArray  # int32[N]
    rows: IntArray  # int32[S], 0 for the root, i + 1 for node i
    top: IntArray  # int32[S, K], the most probable tokens, falling
    chances: FloatArray  # float32[S, K], their probabilities


_NONE = np.zeros(0, np.int32)
NOTHING_TOLD = Told(_NONE, _NONE, _NONE, np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32))


@njit(cache=True)
def advance(
    sources: Sources, rates: Rates, nodes: Nodes, ids: I64, last: tuple[int, int, int], told: Told,
    size: tuple[int, int, int], learns: bool,
) -> tuple[IntArray, IntArray, FloatArray, U8]:  # fmt: skip
    """Learn what became of the last draft, read what was written, and draft after it, in one compiled call.

    One call, as handing arrays to compiled code takes 40 microseconds where a pass has emptied the caches.

    Args:
        sources: what is asked; words and the text itself are learned.
        rates: likewise.
        nodes: the last draft, which the next one replaces.
        ids: int64[n], the sequence.
        last: the last draft's nodes, the length of the sequence then, and how much of it the text has.
        told: of the last draft.
        size: see `blend`; no node drafts nothing.
        learns: whether anything is learned.

    Returns:
        The draft: tokens int32[N], parents int32[N], score float32[N], source uint8[N].
    """
    count, at, read = last
    if learns:
        learn_choices(rates, nodes, count, ids[at:])
        learn_rows(sources.words, told.tokens, told.parents, ids[:at], told.rows, told.top, told.chances)
        append(sources.own, ids[read:])
    made = blend(sources, rates, nodes, ids, size) if size[0] > 0 else 0
    source = np.empty(made, np.uint8)
    for node in range(made):
        source[node] = main_source(rates, nodes.cells[node])
    return nodes.tokens[:made].copy(), nodes.parents[:made].copy(), nodes.score[:made].copy(), source
