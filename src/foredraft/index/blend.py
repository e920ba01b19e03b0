"""Blending: a best-first search for the most probable paths by all cheap sources together.

After each node of the draft every source lists candidates, each in a cell of the source (index/sources.py). A cell's
probability is the share of its candidates that the target chose, counted where the target chose among them. The
probabilities of all sources that know the context are mixed in the logistic domain, by weights learned online (Mahoney,
"Adaptive Weighing of Context Models for Lossless Data Compression", 2005). If the target samples, its noise for each
position and token is known (sampling/noise.py), and candidates with more noise than their rivals get a higher
probability. A path's score is the product of these probabilities. Does not depend on where texts and rows come from,
nor on how many nodes are worth verifying.
"""

from importlib import resources
from typing import NamedTuple

import numpy as np
from numba import njit

from foredraft.graph.search import new_queue, pop, push
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.own_words import I64, U8, fill_context, learn_rows
from foredraft.index.recent_text import append
from foredraft.index.sources import (
    ABSENT,
    CURSORS,
    LONGEST,
    SHARES,
    SOURCES,
    UNLISTED,
    Listed,
    Sources,
    bin_of,
    empty_list,
    list_all,
    root_cursors,
)
from foredraft.sampling.noise import gumbel_value

CELLS = 128
"""Room for the cells of a source; the largest source has 109."""
# chosen
_MOST_SEEN = np.float32(1000.0)  # candidates of a cell, after which older ones fade
_STEP = np.float32(0.01)  # learning rate of the weights
_LEAST_SHARE = np.float32(0.002)  # least share of hits, and of misses, so that logits stay finite
_CANDIDATES = 32  # room per node of the draft; further candidates are dropped
_MARGINS = np.array([-4.0, -2.5, -1.5, -0.75, -0.25, 0.25, 0.75, 1.5, 2.5, 4.0])  # bounds of bins, in nats; chosen
_COLUMNS = len(_MARGINS) + 1  # bins of margins
_LEAST_UNLISTED = np.float32(0.02)  # least probability of all tokens that no source lists; chosen
_MEAN_GUMBEL = np.float32(0.5772)  # mean of a standard Gumbel value: Euler's constant


# --- rates


class Rates(NamedTuple):
    """The counts of all cells, and the mixing weights."""

    hits: FloatArray  # float32[7, 128], by source and cell: candidates that the target chose
    seen: FloatArray  # float32[7, 128], candidates among which the target chose
    weights: FloatArray  # float32[128, 8], by the set of sources that know a context, as bits; the last is the bias
    margins: FloatArray  # float32[2, 9, 11], by bins of probability and margin: candidates chosen, and expected


class Noise(NamedTuple):
    """The noise that the target's draws add, where it is known."""

    known: bool
    seed: np.uint64


NO_NOISE = Noise(known=False, seed=np.uint64(0))


def flat_rates() -> Rates:
    """Return uninformed rates: 0.4 / 2 in every cell, equal weights of 0.45, and no correction for noise; chosen."""
    return Rates(
        np.full((SOURCES, CELLS), 0.4, np.float32), np.full((SOURCES, CELLS), 2.0, np.float32),
        np.repeat(np.array([[0.45] * SOURCES + [0.0]], np.float32), 1 << SOURCES, axis=0),
        np.full((2, len(SHARES) + 1, _COLUMNS), 2.0, np.float32),
    )  # fmt: skip


def prior_rates(*, sampled: bool) -> Rates:
    """Return rates fitted on real texts (scripts/fit_rates.py), for sampling or for greedy decoding."""
    mode = "sampled" if sampled else "greedy"
    with resources.files("foredraft.index").joinpath("rates.npz").open("rb") as file, np.load(file) as kept:
        return Rates(*(kept[f"{mode}_{name}"] for name in Rates._fields))


@njit(cache=True, error_model="numpy")
def chance(rates: Rates, cells: U8, known: int) -> float:
    """Return a candidate's probability by its cells, uint8[7]; `known` are the sources with the context, as bits."""
    total = rates.weights[known, SOURCES]
    for source in range(SOURCES):
        cell = cells[source]
        if cell != ABSENT:
            hits, seen = rates.hits[source, cell], rates.seen[source, cell]
            total += rates.weights[known, source] * np.log(hits / (seen - hits))
    return float(np.float32(1) / (np.float32(1) + np.exp(-total)))


@njit(cache=True, error_model="numpy")
def credit(rates: Rates, cells: U8, known: int, chosen: bool) -> None:
    """Count a candidate among which the target chose, `chosen` or not, and update the weights."""
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


@njit(cache=True, error_model="numpy")
def _correct_for_noise(
    rates: Rates, listed: Listed, chances: FloatArray, cells: IntArray, seed: np.uint64, position: int
) -> None:
    """Correct the probabilities of the listed candidates, given the noise at their position.

    The target takes the token with the largest log-probability plus noise. A candidate's margin is its own sum minus
    the largest of its rivals'; all unlisted tokens together are one rival, with the mean noise. The probability is
    multiplied by the ratio of chosen to expected candidates in its bins of probability and margin.

    Args:
        rates: their `margins`.
        listed: L candidates.
        chances: float32[L], corrected in place.
        cells: int32[L], set to the candidates' cells of `margins`: 11 * bin of probability + bin of margin.
        seed: of the noise.
        position: of the candidates in the sequence.
    """
    count, unlisted, first, second = listed.made[0], np.float32(1), -1, -1
    sums = np.empty(count, np.float32)
    for i in range(count):
        unlisted -= chances[i]
        sums[i] = np.log(chances[i]) + gumbel_value(seed, position, listed.tokens[i])
        if first < 0 or sums[i] > sums[first]:
            first, second = i, first
        elif second < 0 or sums[i] > sums[second]:
            second = i
    others = np.log(max(unlisted, _LEAST_UNLISTED)) + _MEAN_GUMBEL
    for i in range(count):
        best = second if i == first else first
        margin = sums[i] - (max(sums[best], others) if best >= 0 else others)
        row, column = bin_of(float(chances[i]), SHARES), bin_of(float(margin), _MARGINS)
        cells[i] = row * _COLUMNS + column
        ratio = rates.margins[0, row, column] / rates.margins[1, row, column]
        chances[i] = min(chances[i] * ratio, 1 - _LEAST_SHARE)


# --- the draft


class Nodes(NamedTuple):
    """Nodes of a draft, or candidates, N at most."""

    tokens: IntArray  # int32[N]
    parents: IntArray  # int32[N]
    score: FloatArray  # float32[N]
    cells: U8  # uint8[N, 7], the cell in each source
    known: IntArray  # int32[N], the sources that know the context, as bits
    cursors: IntArray  # int32[N, 7], see `Listed`
    expected: FloatArray  # float32[N], the probability after the parent, without what the noise says
    margin: IntArray  # int32[N], the cell in `Rates.margins`; -1 without noise
    made: I64  # int64[1], how many there are


@njit(cache=True)
def room_for(count: int) -> Nodes:
    """Return room for `count` nodes."""
    return Nodes(
        np.empty(count, np.int32), np.empty(count, np.int32), np.empty(count, np.float32),
        np.empty((count, SOURCES), np.uint8), np.empty(count, np.int32), np.empty((count, CURSORS), np.int32),
        np.empty(count, np.float32), np.empty(count, np.int32), np.zeros(1, np.int64),
    )  # fmt: skip


def room_to_draft(most: int) -> tuple[Nodes, Nodes]:
    """Return room for a draft of at most `most` nodes, and for its candidates."""
    return room_for(most), room_for((most + 2) * _CANDIDATES)


@njit(cache=True)
def blend(
    sources: Sources, rates: Rates, room: tuple[Nodes, Nodes], ids: I64, size: tuple[int, int, int], noise: Noise
) -> None:
    """Draft the most probable paths, best first.

    Args:
        sources: list the candidates.
        rates: give their probabilities.
        room: receives the draft, and all candidates that were considered.
        ids: int64[n], the text; the root is the last token. Without noise its last `LONGEST` tokens suffice.
        size: most nodes, greatest depth, and vocabulary.
        noise: of the target's draws.
    """
    most, deepest, vocabulary = size
    nodes, waiting = room
    listed, context = empty_list(), np.empty(LONGEST, np.int64)
    chances, margins = np.empty(len(listed.tokens), np.float32), np.full(len(listed.tokens), -1, np.int32)
    expected = np.empty(len(listed.tokens), np.float32)
    queue, depths = new_queue(waiting.score), np.empty(most, np.int32)
    count, node, depth, above = 0, -1, 0, np.float32(1)
    cursors = root_cursors(sources)
    while True:
        if depth < deepest:
            fill_context(context, nodes.tokens, nodes.parents, node, ids)
            known = list_all(sources, context, cursors, depth, listed)
            for i in range(listed.made[0]):
                expected[i] = chances[i] = chance(rates, listed.cells[i], known)
            if noise.known:
                _correct_for_noise(rates, listed, chances, margins, noise.seed, len(ids) + depth)
            for i in range(listed.made[0]):
                if queue.counts[0] == len(waiting.tokens) or not 0 <= listed.tokens[i] < vocabulary:
                    continue
                at = push(queue, above * chances[i])
                waiting.expected[at], waiting.margin[at] = expected[i], margins[i]
                waiting.tokens[at], waiting.parents[at] = listed.tokens[i], node
                waiting.cells[at], waiting.known[at] = listed.cells[i], known
                waiting.cursors[at] = listed.cursors[i]
        best = pop(queue) if count < most else -1
        if best < 0:
            nodes.made[0], waiting.made[0] = count, queue.counts[0]
            return
        node, count = count, count + 1
        parent, above, cursors = waiting.parents[best], waiting.score[best], waiting.cursors[best]
        nodes.tokens[node], nodes.parents[node], nodes.score[node] = waiting.tokens[best], parent, above
        nodes.cells[node], nodes.known[node], nodes.cursors[node] = waiting.cells[best], waiting.known[best], cursors
        depth = depths[node] = 1 if parent < 0 else depths[parent] + 1


@njit(cache=True)
def main_source(rates: Rates, cells: U8) -> int:
    """Return the source whose cell gives a node the highest probability."""
    found, most = 0, np.float32(-1)
    for source in range(SOURCES):
        cell = cells[source]
        if cell not in (ABSENT, UNLISTED) and rates.hits[source, cell] > most * rates.seen[source, cell]:
            found, most = source, rates.hits[source, cell] / rates.seen[source, cell]
    return found


@njit(cache=True)
def learn_choices(rates: Rates, room: tuple[Nodes, Nodes], written: I64) -> None:
    """Count the candidates among which the target chose, drafted or not; `written`, int64[k], are its tokens."""
    nodes, candidates = room
    depths = np.full(nodes.made[0], -1, np.int64)  # of the nodes on the written path
    for node in range(nodes.made[0]):
        parent = nodes.parents[node]
        depth = 0 if parent < 0 else depths[parent]
        if 0 <= depth < len(written) and nodes.tokens[node] == written[depth]:
            depths[node] = depth + 1
    for i in range(candidates.made[0]):
        parent = candidates.parents[i]
        depth = 0 if parent < 0 else depths[parent]
        if depth < 0 or depth >= len(written):
            continue
        chosen = candidates.tokens[i] == written[depth]
        credit(rates, candidates.cells[i], candidates.known[i], chosen)
        if candidates.margin[i] >= 0:
            row, column = divmod(candidates.margin[i], _COLUMNS)
            keep = min(np.float32(1), _MOST_SEEN / (rates.margins[1, row, column] + 1))
            rates.margins[0, row, column] = (rates.margins[0, row, column] + np.float32(chosen)) * keep
            rates.margins[1, row, column] = (rates.margins[1, row, column] + candidates.expected[i]) * keep


class TopTokens(NamedTuple):
    """The target's most probable tokens after rows of a verified draft."""

    tokens: IntArray  # int32[N], the draft's
    parents: IntArray  # int32[N]
    rows: IntArray  # int32[S], 0 for the root, i + 1 for node i
    best: IntArray  # int32[S, K], tokens by descending probability
    chances: FloatArray  # float32[S, K], their probabilities


_NONE = np.zeros(0, np.int32)
NO_TOP_TOKENS = TopTokens(_NONE, _NONE, _NONE, np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32))


@njit(cache=True)
def advance(
    sources: Sources, rates: Rates, room: tuple[Nodes, Nodes], ids: I64, last: tuple[int, int], top: TopTokens,
    size: tuple[int, int, int], noise: Noise, learns: bool,
) -> tuple[IntArray, IntArray, FloatArray, U8]:  # fmt: skip
    """Learn from the last draft, read the new tokens, and draft, in one compiled call.

    It is one call because passing arrays to compiled code takes 40 microseconds when a pass has evicted the caches.

    Args:
        sources: list the candidates; `words` and `own` are updated.
        rates: give their probabilities; updated.
        room: the last draft and its candidates, replaced by the next ones.
        ids: int64[n], the sequence.
        last: length of the sequence at the last draft, and tokens that `sources.own` has.
        top: of the last draft.
        size: see `blend`; with 0 nodes nothing is drafted.
        noise: see `blend`.
        learns: whether to learn.

    Returns:
        The draft: tokens int32[N], parents int32[N], score float32[N], source uint8[N].
    """
    at, read = last
    nodes, candidates = room
    if learns:
        learn_choices(rates, room, ids[at:])
        learn_rows(sources.words, top.tokens, top.parents, ids[:at], top.rows, top.best, top.chances)
        append(sources.own, ids[read:])
    nodes.made[0] = candidates.made[0] = 0
    if size[0] > 0:
        blend(sources, rates, room, ids, size, noise)
    made = nodes.made[0]
    source = np.empty(made, np.uint8)
    for node in range(made):
        source[node] = main_source(rates, nodes.cells[node])
    return nodes.tokens[:made].copy(), nodes.parents[:made].copy(), nodes.score[:made].copy(), source
