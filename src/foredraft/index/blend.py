"""Blending: a best-first search for the most probable paths by all cheap sources together.

docs/explanation/auto.md tells how. The mixing is that of Mahoney, "Adaptive Weighing of Context Models for Lossless
Data Compression" (2005). Does not depend on where texts and rows come from, nor on how many nodes are worth verifying.
"""

import heapq
from importlib import resources
from typing import NamedTuple

import numpy as np
from numba import njit

from foredraft.graph.tree import I64, U8, FloatArray, IntArray
from foredraft.index.own_words import fill_context, int64, learn_rows
from foredraft.index.recent_text import append
from foredraft.index.sources import (
    ABSENT,
    LISTED,
    LONGEST,
    SHARES,
    SOURCES,
    UNLISTED,
    Candidates,
    Sources,
    bin_of,
    list_all,
)
from foredraft.sampling.noise import gumbel_value

# chosen
_MOST_SEEN = np.float32(1000.0)  # candidates of a cell, after which older ones fade
_STEP = np.float32(0.01)  # learning rate of the weights
_LEAST_SHARE = np.float32(0.002)  # least share of hits, and of misses, so that logits stay finite
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
    odds: FloatArray  # float32[7, 128], log(hits / misses) by source and cell, kept because logarithms take time


class Noise(NamedTuple):
    """The noise that the target's draws add, where it is known."""

    known: bool
    seed: np.uint64


def prior_rates(*, sampled: bool) -> Rates:
    """Return rates fitted on real texts (scripts/fit_rates.py), for sampling or for greedy decoding."""
    mode = "sampled" if sampled else "greedy"
    with resources.files("foredraft.index").joinpath("rates.npz").open("rb") as file, np.load(file) as kept:
        return rates_of(*(kept[f"{mode}_{name}"] for name in ("hits", "seen", "weights", "margins")))


def rates_of(hits: FloatArray, seen: FloatArray, weights: FloatArray, margins: FloatArray) -> Rates:
    """Return rates by their counts and weights."""
    return Rates(hits, seen, weights, margins, np.log(hits / (seen - hits)))


@njit(cache=True, error_model="numpy")
def chance(rates: Rates, cells: U8, known: int) -> float:
    """Return a candidate's probability by its cells, uint8[7]; `known` are the sources with the context, as bits."""
    total = rates.weights[known, SOURCES]
    for source in range(SOURCES):
        cell = cells[source]
        if cell != ABSENT:
            total += rates.weights[known, source] * rates.odds[source, cell]
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
        rates.weights[known, source] += _STEP * error * rates.odds[source, cell]
        hits, seen = rates.hits[source, cell], rates.seen[source, cell]
        keep = min(np.float32(1), _MOST_SEEN / (seen + 1))
        seen = (seen + 1) * keep
        hits = (hits + np.float32(chosen)) * keep
        hits = min(max(hits, _LEAST_SHARE * seen), (1 - _LEAST_SHARE) * seen)
        rates.seen[source, cell], rates.hits[source, cell] = seen, hits
        rates.odds[source, cell] = np.log(hits / (seen - hits))


@njit(cache=True, error_model="numpy")
def _correct_for_noise(rates: Rates, room: Candidates, start: int, seed: np.uint64, position: int) -> None:
    """Correct the probabilities, `room.score`, of the candidates from `start` on by the noise at their position.

    The target takes the token with the largest log-probability plus noise. A candidate's margin is its own sum minus
    the largest of its rivals'; all unlisted tokens together are one rival, with the mean noise. The probability is
    multiplied by the ratio of chosen to expected candidates in its bins of probability and margin, which go to
    `room.margin` as 11 * bin of probability + bin of margin.
    """
    stop, unlisted, first, second = room.made[0], np.float32(1), -1, -1
    tokens, score, margins, counts = room.tokens, room.score, room.margin, rates.margins
    sums = np.empty(stop, np.float32)
    for i in range(start, stop):
        unlisted -= score[i]
        sums[i] = np.log(score[i]) + gumbel_value(seed, position, tokens[i])
        if first < 0 or sums[i] > sums[first]:
            first, second = i, first
        elif second < 0 or sums[i] > sums[second]:
            second = i
    others = np.log(max(unlisted, _LEAST_UNLISTED)) + _MEAN_GUMBEL
    for i in range(start, stop):
        best = second if i == first else first
        margin = sums[i] - (max(sums[best], others) if best >= 0 else others)
        row, column = bin_of(float(score[i]), SHARES), bin_of(float(margin), _MARGINS)
        margins[i] = row * _COLUMNS + column
        ratio = counts[0, row, column] / counts[1, row, column]
        score[i] = min(score[i] * ratio, 1 - _LEAST_SHARE)


# --- the draft


@njit(cache=True)
def blend(sources: Sources, rates: Rates, room: Candidates, ids: I64, size: tuple[int, int, int], noise: Noise) -> None:
    """Draft the most probable paths, best first, in `room`.

    `ids`, int64[n], is the text; the root is its last token, and without noise the last `LONGEST` tokens suffice.
    `size` is most nodes, greatest depth, and vocabulary.
    """
    most, deepest, vocabulary = size
    # not unpacked, and at most three a line, as Python unpacks four: numba 0.68 drops the last write to an unpacked
    # array from functions with a comprehension
    tokens, parents, depths = room.tokens, room.parents, room.depths
    score, cells, made_of = room.score, room.cells, room.made
    expected, margin = room.expected, room.margin
    context, queue = np.empty(LONGEST, np.int64), [(np.float32(0), 0) for _ in range(0)]
    best, made, count, depth = int64(-1), 0, 0, int64(0)
    above, cursors = np.float32(1), np.array([0, len(sources.rows.tokens), -1, 0, -1, 0, -1], np.int32)  # the root's
    while True:
        if depth < deepest:
            fill_context(context, tokens, parents, best, ids)
            made_of[0] = made
            known = list_all(sources, context, cursors, depth, room)
            for i in range(made, made_of[0]):
                expected[i] = score[i] = chance(rates, cells[i], known)
                margin[i] = -1
            if noise.known:
                _correct_for_noise(rates, room, made, noise.seed, len(ids) + depth)
            stop = min(made_of[0], len(tokens) - LISTED)
            for i in range(made, stop):
                parents[i], depths[i], room.known[i] = best, depth + 1, known
                score[i] *= above
                if 0 <= tokens[i] < vocabulary:
                    heapq.heappush(queue, (-score[i], i))
            made = stop
        if count == most or not queue:
            made_of[0], made_of[1] = made, count
            return
        best = heapq.heappop(queue)[1]
        room.drafted[count], room.nodes[best] = best, count
        count += 1
        depth, above, cursors = depths[best], score[best], room.cursors[best]


@njit(cache=True)
def learn_choices(rates: Rates, room: Candidates, written: I64) -> None:
    """Count the candidates among which the target chose, drafted or not; `written`, int64[k], are its tokens."""
    tokens, parents, margin, counts = room.tokens, room.parents, room.margin, rates.margins
    reached = np.full(room.made[0], -1, np.int64)  # depth of the candidates on the written path
    for i in range(len(reached)):
        depth = 0 if parents[i] < 0 else reached[parents[i]]
        if depth < 0 or depth >= len(written):
            continue
        chosen = tokens[i] == written[depth]
        if chosen:
            reached[i] = depth + 1
        credit(rates, room.cells[i], int64(room.known[i]), chosen)
        if margin[i] >= 0:
            row, column = divmod(margin[i], _COLUMNS)
            keep = min(np.float32(1), _MOST_SEEN / (counts[1, row, column] + 1))
            counts[0, row, column] = (counts[0, row, column] + np.float32(chosen)) * keep
            counts[1, row, column] = (counts[1, row, column] + room.expected[i]) * keep


class TopTokens(NamedTuple):
    """The target's most probable tokens after rows of a verified draft."""

    tokens: IntArray  # int32[N], the draft's
    parents: IntArray  # int32[N]
    best: IntArray  # int32[N + 1, K], of the root's row and then the nodes', tokens by descending probability
    chances: FloatArray  # float32[N + 1, K], their probabilities


_NONE = np.zeros(0, np.int32)
NO_TOP_TOKENS = TopTokens(_NONE, _NONE, np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32))


@njit(cache=True)
def advance(
    sources: Sources, rates: Rates, room: Candidates, ids: I64, read: int, top: TopTokens,
    size: tuple[int, int, int], noise: Noise, learns: bool,
) -> tuple[IntArray, IntArray, FloatArray, U8]:  # fmt: skip
    """Learn from the last draft, read the new tokens, and draft.

    It is one call because passing arrays to compiled code takes 40 microseconds when a pass has evicted the caches.

    `room` and `top` are those of the last draft, when the sequence `ids`, int64[n], had `read` tokens. With `learns`,
    rates, own words and own text are updated; `size` is that of `blend`, with 0 nodes to draft nothing. Returns tokens
    int32[N], parents int32[N], score float32[N], source uint8[N].
    """
    if learns:
        learn_choices(rates, room, ids[read:])
        learn_rows(sources.words, top.tokens, top.parents, ids[:read], top.best, top.chances)
        append(sources.own, ids[read:])
    room.made[0] = room.made[1] = 0
    if size[0] > 0:
        blend(sources, rates, room, ids, size, noise)
    drafted = room.drafted[: room.made[1]]
    parents, source = np.empty(len(drafted), np.int32), np.zeros(len(drafted), np.uint8)
    for node, candidate in enumerate(drafted):
        above = room.parents[candidate]
        parents[node] = room.nodes[above] if above >= 0 else -1
        most = np.float32(-1)
        for number, cell in enumerate(room.cells[candidate]):  # the source with the highest probability
            if cell not in (ABSENT, UNLISTED) and rates.hits[number, cell] > most * rates.seen[number, cell]:
                source[node], most = number, rates.hits[number, cell] / rates.seen[number, cell]
    return room.tokens[drafted], parents, room.score[drafted], source
