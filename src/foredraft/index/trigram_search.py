"""Drafts from tri-grams: the successors of a pair of tokens, and two searches for the most probable paths.

Successors are interpolated from a prebuilt table and learned counts, or added up as the paper does. Best-first search
returns the most probable paths. Monte Carlo tree search is the paper's: Adaptix, "Draft Maker" (equations 2 and 3), and
ADED, appendix H, Algorithm 1. Its reward is the tri-gram probability that the paper means; the paper's code looks up
another pair. Does not depend on budgets.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.search import above_bar, bar_height, new_bar, new_queue, pop, push, raise_bar
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.learned import NO_TOKEN, ROW_WIDTH, LearnedArrays, learned_row
from foredraft.index.trigram import FULL_PROBABILITY, TableArrays, bigram_row

MOST_SUCCESSORS = 64
"""Successors of a context at most; further ones are dropped. The size of the outputs of `successors`; chosen."""
_BACKED_OFF = 12  # successors of a single token read from the table; chosen


class Trust(NamedTuple):
    """Interpolation constants, in observations: with as many, a source weighs as much as all less specific ones.

    A source with n observations of the context gets the share n / (n + constant) of what the more specific sources
    leave: Jelinek-Mercer interpolation with Witten-Bell-like weights, from pairs to single tokens.
    """

    learned_pair: float
    table_pair: float
    learned_single: float  # of the last token alone
    table_single: float
    paper: int  # 1 for the paper's rule: tri-gram probability plus learned increments only
    cap: float  # the paper's maxProb: limit of that sum


BLENDED = Trust(learned_pair=2.0, table_pair=10.0, learned_single=1.0, table_single=5.0, paper=0, cap=0.0)
"""Chosen by replay of recorded answers; see docs/results/log.md."""


@njit(cache=True)
def _add(tokens: IntArray, scores: FloatArray, count: int, token: int, score: float) -> int:
    for i in range(count):
        if tokens[i] == token:
            scores[i] += score
            return count
    if count < len(tokens) and token < 0x80000000:  # a damaged table may exceed int32
        tokens[count], scores[count] = token, score
        count += 1
    return count


@njit(cache=True)
def _add_learned(
    learned: LearnedArrays, slot: int, trust: float, left: float, tokens: IntArray, scores: FloatArray, count: int
) -> tuple[int, float]:
    """Add the learned successors in `slot`, if not -1; return the new count, and what is left of the probability."""
    total = np.float64(learned.totals[slot]) if slot >= 0 else 0.0
    if not total > 0:
        return count, left
    share = total / (total + trust)
    for j in range(ROW_WIDTH):
        if learned.weights[slot, j] > 0:
            weight = left * share * learned.weights[slot, j] / total
            count = _add(tokens, scores, count, learned.tokens[slot, j], weight)
    return count, left * (1.0 - share)


@njit(cache=True)
def _add_row(
    row: npt.NDArray[Any], probabilities: npt.NDArray[Any], start: int, end: int, weight: float, least: float,
    tokens: IntArray, scores: FloatArray, count: int,
) -> int:  # fmt: skip
    """Add the table's successors `row[start:end]` with `weight`, down to the first one below `least`."""
    for entry in range(start, min(end, len(row))):
        score = weight * probabilities[entry] / FULL_PROBABILITY
        if score < least:  # they come in descending order
            break
        count = _add(tokens, scores, count, row[entry], score)
    return count


@njit(cache=True)
def successors(
    table: TableArrays, learned: LearnedArrays, trust: Trust, a: int, b: int, least: float, tokens: IntArray,
    scores: FloatArray,
) -> int:  # fmt: skip
    """Collect the successors of (a, b) in `tokens int32[64]` and `scores float32[64]`, and return their number.

    Scores are probabilities, except under the paper's rule, which adds learned increments. `a` is -1 if nothing comes
    before `b`. Contributions of a source below `least` may be left out; a successor has at most four. Offsets read from
    the table are clamped, as it may be damaged.
    """
    count, left = 0, 1.0
    slot = learned_row(learned.keys, a, b)
    row = bigram_row(table.first, table.second, a, b)
    if trust.paper:
        return _paper_successors(table, learned, trust, row, slot, tokens, scores)
    count, left = _add_learned(learned, slot, trust.learned_pair, left, tokens, scores, count)
    if row >= 0:
        share = table.totals[row] / (table.totals[row] + trust.table_pair)
        start, end = int(np.int64(table.offsets[row])), int(np.int64(table.offsets[row + 1]))
        count = _add_row(
            table.tokens, table.probabilities, start, end, left * share, least, tokens, scores, count
        )  # fmt: skip
        left *= 1.0 - share
    if left < least:
        return count
    slot = learned_row(learned.keys, NO_TOKEN, b)
    count, left = _add_learned(learned, slot, trust.learned_single, left, tokens, scores, count)
    if left >= least and 0 <= b < len(table.unigram_offsets) - 1:
        share = table.unigram_totals[b] / (table.unigram_totals[b] + trust.table_single)
        start = int(np.int64(table.unigram_offsets[b]))
        end = min(int(np.int64(table.unigram_offsets[b + 1])), start + _BACKED_OFF)
        count = _add_row(
            table.unigram_tokens, table.unigram_probabilities, start, end, left * share, least, tokens, scores, count
        )  # fmt: skip
    return count


@njit(cache=True)
def _paper_successors(
    table: TableArrays, learned: LearnedArrays, trust: Trust, row: int, slot: int, tokens: IntArray, scores: FloatArray
) -> int:
    """Adaptix, Algorithm 2: p(c|a,b) + increments, at most maxProb; no back-off."""
    count = 0
    if row >= 0:
        start, end = int(np.int64(table.offsets[row])), int(np.int64(table.offsets[row + 1]))
        count = _add_row(table.tokens, table.probabilities, start, end, 1.0, 0.0, tokens, scores, count)
    if slot >= 0:
        for j in range(ROW_WIDTH):
            if learned.weights[slot, j] > 0:
                count = _add(tokens, scores, count, learned.tokens[slot, j], learned.weights[slot, j])
    for i in range(count):
        scores[i] = min(scores[i], np.float32(trust.cap))
    return count


# --- best-first


@njit(cache=True)
def best_first(
    table: TableArrays, learned: LearnedArrays, trust: Trust, a: int, b: int, nodes: int, depth: int, vocabulary: int
) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the `nodes` most probable paths after (a, b), as tokens int32[N], parents int32[N], scores float32[N].

    A path's score is the product of its successors' scores, each limited to 1, so a child never outranks its parent and
    the result is prefix-closed. Tokens at or above `vocabulary` are left out. A candidate is dropped if `nodes` better
    ones are known (the bar), and a node is not expanded if all its children would be dropped.

    Contributions of a source below a quarter of the bar are left out of a candidate's score (see `successors`). So with
    several sources a score may be too low by up to three quarters of the bar, and of two candidates close to the bar
    the wrong one may be taken.
    """
    room = (nodes + 1) * MOST_SUCCESSORS
    candidate_token, candidate_parent = np.empty(room, np.int32), np.empty(room, np.int32)
    queue, bar = new_queue(np.empty(room, np.float32)), new_bar(nodes)
    tokens, parents, level = np.empty(nodes, np.int32), np.empty(nodes, np.int32), np.empty(nodes, np.int32)
    scores = np.empty(nodes, np.float32)
    found_tokens, found_scores = np.empty(MOST_SUCCESSORS, np.int32), np.empty(MOST_SUCCESSORS, np.float32)
    count, node, node_score, node_level = 0, -1, np.float32(1.0), 0
    while count < nodes:
        if node_level < depth and above_bar(bar, node_score):
            before = a if node < 0 else (b if parents[node] < 0 else tokens[parents[node]])
            last = b if node < 0 else tokens[node]
            least = 0.25 * bar_height(bar) / float(node_score)
            found = successors(table, learned, trust, before, last, least, found_tokens, found_scores)
            for i in range(found):
                score = node_score * min(found_scores[i], np.float32(1.0))
                if not above_bar(bar, score) or not 0 <= found_tokens[i] < vocabulary:
                    continue
                candidate = push(queue, score)
                candidate_token[candidate], candidate_parent[candidate] = found_tokens[i], node
                raise_bar(bar, score)
        best = pop(queue)
        if best < 0:
            break
        node, node_score = count, queue.score[best]
        tokens[node], parents[node], scores[node] = candidate_token[best], candidate_parent[best], node_score
        node_level = level[node] = 1 if parents[node] < 0 else level[parents[node]] + 1
        count += 1
    return tokens[:count].copy(), parents[:count].copy(), scores[:count].copy()


# --- Monte Carlo tree search


class SearchSettings(NamedTuple):
    """Settings of Monte Carlo tree search; the defaults in drafters/adaptix.py are those of ADED, appendix F."""

    iterations: int  # simulations
    c1: float  # base of the exploration factor E (equation 3)
    c2: float  # scale of its logarithm
    length: int  # tokens of a continuation
    candidates: int  # most visited continuations to keep


@njit(cache=True)
def _uniform(state: npt.NDArray[np.uint64]) -> float:
    """Advance xorshift64* (Vigna 2016) and return a number in [0, 1)."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    # the upper half of x * 0x2545F4914F6CDD1D, from products of halves that do not overflow
    low32, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    upper, lower = np.uint64(0x2545F491), np.uint64(0x4F6CDD1D)
    carried = ((x & low32) * lower) >> half
    product = (carried + (((x >> half) * lower) & low32) + (((x & low32) * upper) & low32)) & low32
    return np.float64(product) / 4294967296.0


@njit(cache=True)
def _best_child(
    node: int, first: IntArray, width: IntArray, visits: IntArray, value: FloatArray, prior: FloatArray, c1: float,
    c2: float,
) -> int:  # fmt: skip
    """Return the child with the largest PUCT (equation 2); unvisited children come first, by probability."""
    total = 0
    for child in range(first[node], first[node] + width[node]):
        if visits[child] == 0:
            return child
        total += visits[child]
    exploration = (c1 + np.log((total + c2 + 1.0) / c2)) * np.sqrt(total)
    best, best_score = -1, -np.inf
    for child in range(first[node], first[node] + width[node]):
        score = value[child] / visits[child] + exploration * prior[child] / (1.0 + visits[child])
        if score > best_score:
            best, best_score = child, score
    return best


@njit(cache=True)
def _sorted_successors(
    table: TableArrays, learned: LearnedArrays, trust: Trust, a: int, b: int, tokens: IntArray, scores: FloatArray
) -> int:
    """Collect the successors of (a, b), the most probable first, by insertion sort, as there are few."""
    found = successors(table, learned, trust, a, b, 0.0, tokens, scores)
    for i in range(1, found):
        token, score, j = tokens[i], scores[i], i
        while j > 0 and scores[j - 1] < score:
            tokens[j], scores[j] = tokens[j - 1], scores[j - 1]
            j -= 1
        tokens[j], scores[j] = token, score
    return found


@njit(cache=True)
def _rollout(
    table: TableArrays, learned: LearnedArrays, trust: Trust, a: int, b: int, steps: int,
    state: npt.NDArray[np.uint64], tokens: IntArray, scores: FloatArray,
) -> float:  # fmt: skip
    """Draw a continuation of (a, b) by the successors' scores; return the sum of the scores drawn."""
    reward = np.float64(0.0)
    for _ in range(steps):
        found = successors(table, learned, trust, a, b, 0.0, tokens, scores)
        total = np.float64(0.0)
        for i in range(found):
            total += scores[i]
        if total <= 0:
            break
        left = _uniform(state) * total
        drawn = found - 1
        for i in range(found):
            left -= scores[i]
            if left < 0:
                drawn = i
                break
        reward += scores[drawn]
        a, b = b, tokens[drawn]
    return reward


@njit(cache=True)
def mcts(
    table: TableArrays, learned: LearnedArrays, trust: Trust, a: int, b: int, settings: SearchSettings,
    vocabulary: int, seed: int,
) -> tuple[IntArray, IntArray, FloatArray]:  # fmt: skip
    """Return the tree of the most visited continuations after (a, b), as tokens, parents (int32[N]), scores float32[N].

    Scores are path probabilities. Each kept path is extended by its most probable successor, as in the paper's code.
    """
    room = 1 + settings.iterations * MOST_SUCCESSORS
    token, parent, first = np.empty(room, np.int32), np.full(room, -1, np.int32), np.full(room, -1, np.int32)
    width, visits, level = np.zeros(room, np.int32), np.zeros(room, np.int32), np.zeros(room, np.int32)
    value, prior = np.zeros(room, np.float32), np.ones(room, np.float32)
    found_tokens, found_scores = np.empty(MOST_SUCCESSORS, np.int32), np.empty(MOST_SUCCESSORS, np.float32)
    state = np.array([(seed * 2 + 1) & 0x7FFFFFFFFFFFFFFF], np.int64).astype(np.uint64)
    token[0] = b
    made = 1
    deepest = settings.length - 1
    for _ in range(settings.iterations):
        node, reward = 0, np.float64(1.0)
        while width[node] > 0 and level[node] < deepest:
            node = _best_child(node, first, width, visits, value, prior, settings.c1, settings.c2)
            reward += prior[node]
        if first[node] < 0 and level[node] < deepest:
            before = a if node == 0 else token[parent[node]]
            found = _sorted_successors(table, learned, trust, before, token[node], found_tokens, found_scores)
            first[node] = made
            for i in range(found):
                if 0 <= found_tokens[i] < vocabulary:
                    token[made], prior[made] = found_tokens[i], found_scores[i]
                    parent[made], level[made] = node, level[node] + 1
                    width[node] += 1
                    made += 1
            if width[node] > 0:
                node = first[node]
                reward += prior[node]
        before = a if node == 0 else token[parent[node]]
        steps = deepest - level[node]
        reward += _rollout(table, learned, trust, before, token[node], steps, state, found_tokens, found_scores)
        while node >= 0:
            visits[node] += 1
            value[node] += np.float32(reward)
            node = parent[node]
    return _kept_paths(
        table, learned, trust, token[:made], parent[:made], visits[:made], prior[:made], settings, vocabulary
    )


@njit(cache=True)
def _kept_paths(
    table: TableArrays, learned: LearnedArrays, trust: Trust, token: IntArray, parent: IntArray,
    visits: IntArray, prior: FloatArray, settings: SearchSettings, vocabulary: int,
) -> tuple[IntArray, IntArray, FloatArray]:  # fmt: skip
    """Return the paths to the most visited nodes, each extended by its most probable successor, as one tree."""
    order = np.argsort(-visits, kind="mergesort")[: settings.candidates]
    kept = np.zeros(len(token), np.bool_)
    for chosen in order:
        node = chosen if visits[chosen] > 0 else 0
        while node > 0 and not kept[node]:
            kept[node] = True
            node = parent[node]
    room = 2 * int(kept.sum()) + 1
    tokens, parents, scores = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.float32)
    place = np.full(len(token), -1, np.int32)
    count = 0
    for node in range(1, len(token)):
        if kept[node]:
            place[node] = count
            tokens[count] = token[node]
            parents[count] = place[parent[node]]
            above = np.float32(1.0) if parents[count] < 0 else scores[parents[count]]
            scores[count] = above * min(prior[node], np.float32(1.0))
            count += 1
    found_tokens, found_scores = np.empty(MOST_SUCCESSORS, np.int32), np.empty(MOST_SUCCESSORS, np.float32)
    for node in range(1, len(token)):
        if not kept[node]:
            continue
        found = _sorted_successors(table, learned, trust, token[parent[node]], token[node], found_tokens, found_scores)
        if found == 0 or not 0 <= found_tokens[0] < vocabulary:
            continue
        present = False
        for other in range(count):
            present = present or (parents[other] == place[node] and tokens[other] == found_tokens[0])
        if not present:
            tokens[count] = found_tokens[0]
            parents[count] = place[node]
            scores[count] = scores[place[node]] * min(found_scores[0], np.float32(1.0))
            count += 1
    return tokens[:count].copy(), parents[:count].copy(), scores[:count].copy()
