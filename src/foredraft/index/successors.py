"""What may follow a pair of tokens, and how probably: static table and learned counts, blended or the paper's way.

Knows the two sources and how far to trust each. Does not know the search that asks.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.learned import NO_TOKEN, ROW_WIDTH, LearnedArrays, learned_row
from foredraft.index.trigram import FULL_PROBABILITY, TableArrays, bigram_row

MOST_SUCCESSORS = 64
"""Room that `successors` needs in its output arrays."""
_BACKED_OFF = 12


class Trust(NamedTuple):
    """How far each source is trusted, as the number of observations at which it outweighs everything less specific.

    A source with n observations of the context gets the share n / (n + its number) of what the more specific sources
    leave over: Jelinek-Mercer interpolation with Witten-Bell-like weights, tri-gram to bi-gram to single token.

    Attributes:
        learned_pair: what the sequence taught about the pair.
        table_pair: the static tri-grams.
        learned_single: what the sequence taught about the last token alone.
        table_single: the static bi-grams.
        paper: 1 for the paper's rule: the tri-gram probability plus learned increments, at most `cap`, nothing else.
        cap: the paper's maxProb.
    """

    learned_pair: float
    table_pair: float
    learned_single: float
    table_single: float
    paper: int
    cap: float


BLENDED = Trust(learned_pair=2.0, table_pair=10.0, learned_single=1.0, table_single=5.0, paper=0, cap=0.0)
"""Chosen by replay on recorded answers; see docs/results/log.md."""


@njit(cache=True)
def _add(tokens: IntArray, scores: FloatArray, count: int, token: int, score: float) -> int:
    for i in range(count):
        if tokens[i] == token:
            scores[i] += score
            return count
    if count < len(tokens) and token < 0x80000000:  # only a damaged table holds more than int32 does
        tokens[count] = token
        scores[count] = score
        count += 1
    return count


@njit(cache=True)
def successors(
    table: TableArrays,
    learned: LearnedArrays,
    trust: Trust,
    a: int,
    b: int,
    least: float,
    tokens: IntArray,
    scores: FloatArray,
) -> int:
    """Collect what may follow (a, b) into `tokens int32[64]` and `scores float32[64]`, and return how many.

    Scores are probabilities, except under the paper's rule, where learned increments come on top. `a` may be -1 where
    nothing stands before `b`. Contributions of a source below `least` may be left out: a successor has at most four.
    Nothing read from the table is trusted to lie within it.
    """
    count = 0
    left = 1.0
    slot = learned_row(learned.keys, a, b)
    row = bigram_row(table.first, table.second, a, b)
    if trust.paper:
        return _paper_successors(table, learned, trust, row, slot, tokens, scores)
    if slot >= 0 and learned.totals[slot] > 0:
        total = np.float64(learned.totals[slot])
        share = total / (total + trust.learned_pair)
        for j in range(ROW_WIDTH):
            if learned.weights[slot, j] > 0:
                count = _add(tokens, scores, count, learned.tokens[slot, j], share * learned.weights[slot, j] / total)
        left *= 1.0 - share
    if row >= 0:
        share = table.totals[row] / (table.totals[row] + trust.table_pair)
        for entry in range(table.offsets[row], min(table.offsets[row + 1], len(table.tokens))):
            score = left * share * table.probabilities[entry] / FULL_PROBABILITY
            if score < least:  # they come in falling order
                break
            count = _add(tokens, scores, count, table.tokens[entry], score)
        left *= 1.0 - share
    if left < least:
        return count
    slot = learned_row(learned.keys, NO_TOKEN, b)
    if slot >= 0 and learned.totals[slot] > 0:
        total = np.float64(learned.totals[slot])
        share = total / (total + trust.learned_single)
        for j in range(ROW_WIDTH):
            if learned.weights[slot, j] > 0:
                weight = left * share * learned.weights[slot, j] / total
                count = _add(tokens, scores, count, learned.tokens[slot, j], weight)
        left *= 1.0 - share
    if left >= least and 0 <= b < len(table.unigram_offsets) - 1:
        share = table.unigram_totals[b] / (table.unigram_totals[b] + trust.table_single)
        start = np.int64(table.unigram_offsets[b])
        for entry in range(start, min(table.unigram_offsets[b + 1], start + _BACKED_OFF, len(table.unigram_tokens))):
            score = left * share * table.unigram_probabilities[entry] / FULL_PROBABILITY
            if score < least:
                break
            count = _add(tokens, scores, count, table.unigram_tokens[entry], score)
    return count


@njit(cache=True)
def _paper_successors(
    table: TableArrays, learned: LearnedArrays, trust: Trust, row: int, slot: int, tokens: IntArray, scores: FloatArray
) -> int:
    """Adaptix, Algorithm 2: p(c|a,b) + increments, at most maxProb; no back-off."""
    count = 0
    if row >= 0:
        for entry in range(table.offsets[row], min(table.offsets[row + 1], len(table.tokens))):
            count = _add(tokens, scores, count, table.tokens[entry], table.probabilities[entry] / FULL_PROBABILITY)
    if slot >= 0:
        for j in range(ROW_WIDTH):
            if learned.weights[slot, j] > 0:
                count = _add(tokens, scores, count, learned.tokens[slot, j], learned.weights[slot, j])
    for i in range(count):
        scores[i] = min(scores[i], np.float32(trust.cap))
    return count
