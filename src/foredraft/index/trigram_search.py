"""Drafts from tri-grams: the successors of a pair of tokens, and two searches for the most probable paths.

Successors are interpolated from a prebuilt table and learned counts, or added up as the paper does. Best-first search
returns the most probable paths. Monte Carlo tree search is the paper's: Adaptix, "Draft Maker" (equations 2 and 3), and
ADED, appendix H, Algorithm 1. Its reward is the tri-gram probability that the paper means; the paper's code looks up
another pair. Does not depend on budgets.
"""

import heapq
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from foredraft.graph.tree import FloatArray, IntArray, child_with
from foredraft.index.learned import ROW_WIDTH, LearnedArrays, learned_row
from foredraft.index.own_words import NO_TOKEN
from foredraft.index.trigram import FULL_PROBABILITY, TableArrays, bigram_row

MOST_SUCCESSORS = 64  # of a context; further ones are dropped; chosen
FLOOR = 1e-4  # least score of a path that is searched, in expected accepted tokens; chosen
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
"""Chosen by replay of recorded answers."""


class TrigramModel(NamedTuple):
    """What is known about the token after two others."""

    table: TableArrays
    learned: LearnedArrays
    trust: Trust


Found = tuple[IntArray, FloatArray]
"""Room for successors: tokens int32[64], and scores float32[64]."""


@njit(cache=True)
def _add(found: Found, count: int, token: int, score: float) -> int:
    tokens, scores = found
    for i in range(count):
        if tokens[i] == token:
            scores[i] += score
            return count
    if count < MOST_SUCCESSORS and token < 0x80000000:  # a damaged table may exceed int32
        tokens[count], scores[count] = token, score
        count += 1
    return count


@njit(cache=True)
def _add_learned(
    learned: LearnedArrays, slot: int, trust: float, left: float, found: Found, count: int
) -> tuple[int, float]:
    """Add the learned successors in `slot`, if not -1; return the new count, and what is left of the probability."""
    total = np.float64(learned.totals[slot]) if slot >= 0 else 0.0
    if not total > 0:
        return count, left
    share = total / (total + trust)
    for j in range(ROW_WIDTH):
        if learned.weights[slot, j] > 0:
            weight = left * share * learned.weights[slot, j] / total
            count = _add(found, count, learned.tokens[slot, j], weight)
    return count, left * (1.0 - share)


@njit(cache=True)
def _add_row(stored: Any, row: int, most: int, weight: float, found: Found, count: int) -> int:
    """Add at most `most` of a row's successors with `weight`.

    `stored` are offsets, tokens and probabilities of a table, which may be damaged.
    """
    offsets, tokens, probabilities = stored
    start = int(np.int64(offsets[row]))
    for entry in range(start, min(int(np.int64(offsets[row + 1])), start + most, len(tokens))):
        count = _add(found, count, tokens[entry], weight * probabilities[entry] / FULL_PROBABILITY)
    return count


@njit(cache=True)
def successors(model: TrigramModel, a: int, b: int) -> tuple[IntArray, FloatArray]:
    """Return the successors of (a, b), int32[S], S at most 64, and their scores, float32[S].

    Scores are probabilities, except under the paper's rule, which adds learned increments. `a` is -1 if nothing comes
    before `b`.
    """
    table, learned, trust = model
    found = np.empty(MOST_SUCCESSORS, np.int32), np.empty(MOST_SUCCESSORS, np.float32)
    pairs = table.offsets, table.tokens, table.probabilities
    singles = table.unigram_offsets, table.unigram_tokens, table.unigram_probabilities
    slot, row = learned_row(learned, a, b), bigram_row(table.first, table.second, a, b)
    if trust.paper:  # Adaptix, Algorithm 2: p(c|a,b) + increments, at most maxProb; no back-off
        count = _add_row(pairs, row, len(table.tokens), 1.0, found, 0) if row >= 0 else 0
        for j in range(ROW_WIDTH if slot >= 0 else 0):
            if learned.weights[slot, j] > 0:
                count = _add(found, count, learned.tokens[slot, j], learned.weights[slot, j])
        return found[0][:count], np.minimum(found[1][:count], np.float32(trust.cap))
    count, left = _add_learned(learned, slot, trust.learned_pair, 1.0, found, 0)
    if row >= 0:
        share = table.totals[row] / (table.totals[row] + trust.table_pair)
        count = _add_row(pairs, row, len(table.tokens), left * share, found, count)
        left *= 1.0 - share
    slot = learned_row(learned, NO_TOKEN, b)
    count, left = _add_learned(learned, slot, trust.learned_single, left, found, count)
    if 0 <= b < len(table.unigram_offsets) - 1:
        share = table.unigram_totals[b] / (table.unigram_totals[b] + trust.table_single)
        count = _add_row(singles, b, _BACKED_OFF, left * share, found, count)
    return found[0][:count], found[1][:count]


# --- best-first


@njit(cache=True)
def best_first(
    model: TrigramModel, a: int, b: int, nodes: int, depth: int, vocabulary: int
) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the `nodes` most probable paths after (a, b), as tokens int32[N], parents int32[N], scores float32[N].

    A path's score is the product of its successors' scores, each limited to 1, so a child never outranks its parent and
    the result is prefix-closed. Tokens at or above `vocabulary`, and scores below 1e-4, are left out.
    """
    tokens, parents, level = np.empty(nodes, np.int32), np.empty(nodes, np.int32), np.empty(nodes, np.int32)
    scores, queue = np.empty(nodes, np.float32), [(np.float32(0), np.int64(0), 0) for _ in range(0)]
    best = [np.float32(FLOOR)] * nodes  # scores of the best candidates so far; worse ones are not needed
    count, node, node_score, node_level = 0, -1, np.float32(1.0), 0
    while count < nodes:
        if node_level < depth and node_score > best[0]:
            before = a if node < 0 else (b if parents[node] < 0 else tokens[parents[node]])
            found, shares = successors(model, before, b if node < 0 else tokens[node])
            for i in range(len(found)):
                score = node_score * min(shares[i], np.float32(1.0))
                if score > best[0] and 0 <= found[i] < vocabulary:
                    heapq.heapreplace(best, score)
                    heapq.heappush(queue, (-score, np.int64(found[i]), node))
        if not queue:
            break
        lost, tokens[count], parents[count] = heapq.heappop(queue)
        node, node_score = count, -lost
        scores[node] = node_score
        node_level = level[node] = 1 if parents[node] < 0 else level[parents[node]] + 1
        count += 1
    return tokens[:count].copy(), parents[:count].copy(), scores[:count].copy()


# --- Monte Carlo tree search


class SearchSettings(NamedTuple):
    """Settings of Monte Carlo tree search; the defaults are those of ADED, appendix F, and of its code."""

    iterations: int = 150  # simulations
    c1: float = 32.0  # base of the exploration factor E (equation 3)
    c2: float = 8.0  # scale of its logarithm
    length: int = 4  # tokens of a continuation
    candidates: int = 24  # most visited continuations to keep


class _Searched(NamedTuple):
    """The nodes of Monte Carlo tree search; node 0 is the root, and the children of a node are neighbours."""

    token: IntArray  # int32[R]
    parent: IntArray  # int32[R], -1 for the root
    first: IntArray  # int32[R], the first child, -1 before expansion
    width: IntArray  # int32[R], number of children
    visits: IntArray  # int32[R]
    level: IntArray  # int32[R]
    value: FloatArray  # float32[R], sum of rewards
    prior: FloatArray  # float32[R], the score as a successor of the parent


@njit(cache=True)
def _best_child(tree: _Searched, node: int, settings: SearchSettings) -> int:
    """Return the child with the largest PUCT (equation 2); unvisited children come first, by probability."""
    children = range(tree.first[node], tree.first[node] + tree.width[node])
    total = 0
    for child in children:
        if tree.visits[child] == 0:
            return child
        total += tree.visits[child]
    exploration = (settings.c1 + np.log((total + settings.c2 + 1.0) / settings.c2)) * np.sqrt(total)
    best, best_score = -1, -np.inf
    for child in children:
        visits = tree.visits[child]
        score = tree.value[child] / visits + exploration * tree.prior[child] / (1.0 + visits)
        if score > best_score:
            best, best_score = child, score
    return best


@njit(cache=True)
def _sorted_successors(model: TrigramModel, tree: _Searched, node: int, before: int) -> tuple[IntArray, FloatArray]:
    """Return the successors of a node, the most probable first; `before` is the token before the root."""
    tokens, scores = successors(model, before if node == 0 else tree.token[tree.parent[node]], tree.token[node])
    order = np.argsort(-scores, kind="mergesort")
    return tokens[order], scores[order]


@njit(cache=True)
def _rollout(model: TrigramModel, a: int, b: int, draws: FloatArray) -> float:
    """Draw a continuation of (a, b) by the successors' scores, a token per number; return the sum of its scores."""
    reward = np.float64(0.0)
    for draw in draws:
        tokens, scores = successors(model, a, b)
        reached = np.cumsum(scores.astype(np.float64))
        if not len(scores) or reached[-1] <= 0:
            break
        drawn = min(np.searchsorted(reached, draw * reached[-1], side="right"), len(scores) - 1)
        reward += scores[drawn]
        a, b = b, tokens[drawn]
    return reward


@njit(cache=True)
def mcts(
    model: TrigramModel, a: int, b: int, settings: SearchSettings, vocabulary: int, draws: FloatArray
) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the tree of the most visited continuations after (a, b), as tokens, parents (int32[N]), scores float32[N].

    `draws`, float32[iterations, length], are random numbers in [0, 1). Scores are path probabilities. Each kept path is
    extended by its most probable successor, as in the paper's code.
    """
    room = 1 + settings.iterations * MOST_SUCCESSORS
    tree = _Searched(
        np.empty(room, np.int32), np.full(room, -1, np.int32), np.full(room, -1, np.int32), np.zeros(room, np.int32),
        np.zeros(room, np.int32), np.zeros(room, np.int32), np.zeros(room, np.float32), np.ones(room, np.float32),
    )  # fmt: skip
    tree.token[0] = b
    made, deepest = 1, settings.length - 1
    for iteration in range(settings.iterations):
        node, reward = 0, np.float64(1.0)
        while tree.width[node] > 0 and tree.level[node] < deepest:
            node = _best_child(tree, node, settings)
            reward += tree.prior[node]
        if tree.first[node] < 0 and tree.level[node] < deepest:
            tree.first[node] = made
            found, shares = _sorted_successors(model, tree, node, a)
            for i in range(len(found)):
                if 0 <= found[i] < vocabulary:
                    tree.token[made], tree.prior[made] = found[i], shares[i]
                    tree.parent[made], tree.level[made] = node, tree.level[node] + 1
                    tree.width[node] += 1
                    made += 1
            if tree.width[node] > 0:
                node = tree.first[node]
                reward += tree.prior[node]
        before = a if node == 0 else tree.token[tree.parent[node]]
        reward += _rollout(model, before, tree.token[node], draws[iteration, : deepest - tree.level[node]])
        while node >= 0:
            tree.visits[node] += 1
            tree.value[node] += np.float32(reward)
            node = tree.parent[node]
    return _kept_paths(model, tree, made, settings.candidates, a, vocabulary)


@njit(cache=True)
def _kept_paths(
    model: TrigramModel, tree: _Searched, made: int, candidates: int, before: int, vocabulary: int
) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the paths to the most visited nodes, each extended by its most probable successor, as one tree."""
    kept = np.zeros(made, np.bool_)
    for chosen in np.argsort(-tree.visits[:made], kind="mergesort")[:candidates]:
        node = chosen if tree.visits[chosen] > 0 else 0
        while node > 0 and not kept[node]:
            kept[node] = True
            node = tree.parent[node]
    room = 2 * int(kept.sum())
    tokens, parents, scores = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.float32)
    place, count = np.full(made, -1, np.int32), 0
    for node in np.flatnonzero(kept):
        place[node], above = count, place[tree.parent[node]]
        tokens[count], parents[count] = tree.token[node], above
        scores[count] = (np.float32(1.0) if above < 0 else scores[above]) * min(tree.prior[node], np.float32(1.0))
        count += 1
    for node in range(1, made):
        if not kept[node]:
            continue
        found, shares = _sorted_successors(model, tree, node, before)
        if len(found) == 0 or not 0 <= found[0] < vocabulary:
            continue
        if child_with(tokens[:count], parents[:count], place[node], found[0]) < 0:
            tokens[count], parents[count] = found[0], place[node]
            scores[count] = scores[place[node]] * min(shares[0], np.float32(1.0))
            count += 1
    return tokens[:count].copy(), parents[:count].copy(), scores[:count].copy()
