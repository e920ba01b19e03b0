"""The paper's search: Monte Carlo tree search over the tri-gram table with PUCT selection.

Adaptix, "Draft Maker" (equations 2 and 3) and ADED, appendix H, Algorithm 1. The reward is the tri-gram probability
that the paper means; its code looks up another pair (docs/results/log.md). Knows the successor function, not the
budget.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.learned import LearnedArrays
from foredraft.index.successors import MOST_SUCCESSORS, Trust, successors
from foredraft.index.trigram import TableArrays


class SearchSettings(NamedTuple):
    """Settings of the search; the defaults of the option dataclass are those of ADED, appendix F.

    Attributes:
        iterations: simulations.
        c1: base of the exploration factor E (equation 3).
        c2: scale of its logarithm.
        length: tokens of a continuation, the last token of the context included in the search's own count.
        candidates: continuations kept, by visits.
    """

    iterations: int
    c1: float
    c2: float
    length: int
    candidates: int


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
    node: int,
    first: IntArray,
    width: IntArray,
    visits: IntArray,
    value: FloatArray,
    prior: FloatArray,
    c1: float,
    c2: float,
) -> int:
    """Return the child with the largest PUCT (equation 2); one never visited comes first, in order of probability."""
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
    """Collect the successors of (a, b), the most probable first (insertion sort: there are few)."""
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

    Scores are path probabilities, for budgets to cut by. Every continuation of a kept path's full length ends in its
    most probable successor, as in the paper's code.
    """
    room = 1 + settings.iterations * MOST_SUCCESSORS
    token = np.empty(room, np.int32)
    parent = np.full(room, -1, np.int32)
    first = np.full(room, -1, np.int32)
    width = np.zeros(room, np.int32)
    visits = np.zeros(room, np.int32)
    value = np.zeros(room, np.float32)
    prior = np.ones(room, np.float32)
    level = np.zeros(room, np.int32)
    found_tokens = np.empty(MOST_SUCCESSORS, np.int32)
    found_scores = np.empty(MOST_SUCCESSORS, np.float32)
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
                    token[made] = found_tokens[i]
                    parent[made] = node
                    prior[made] = found_scores[i]
                    level[made] = level[node] + 1
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
    """Return the paths to the most visited nodes, each with its most probable successor, as one tree."""
    order = np.argsort(-visits, kind="mergesort")[: settings.candidates]
    kept = np.zeros(len(token), np.bool_)
    for chosen in order:
        node = chosen if visits[chosen] > 0 else 0
        while node > 0 and not kept[node]:
            kept[node] = True
            node = parent[node]
    room = 2 * int(kept.sum()) + 1
    tokens = np.empty(room, np.int32)
    parents = np.empty(room, np.int32)
    scores = np.empty(room, np.float32)
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
    found_tokens = np.empty(MOST_SUCCESSORS, np.int32)
    found_scores = np.empty(MOST_SUCCESSORS, np.float32)
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
