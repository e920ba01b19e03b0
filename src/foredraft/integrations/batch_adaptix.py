"""Adaptix for many texts at once: learning and searching of a whole batch in one compiled call, on several threads.

Learning and search are those of `AdaptixDrafter` without fed-back distributions, which a server does not tell. A chain
that is shorter than asked for grows on from its end. Knows the table and learned counts in an arena.
"""

import numpy as np
from numba import njit, prange

from foredraft.drafters.adaptix import AdaptixDrafter, AdaptixOptions
from foredraft.graph.tree import FloatArray, IntArray, best_chain
from foredraft.index.best_first import best_first
from foredraft.index.learned import NO_TOKEN, STRETCH, LearnedArrays, empty_learned, learn_text, with_room
from foredraft.index.successors import BLENDED, Trust
from foredraft.index.trigram import TableArrays
from foredraft.integrations.arena import Arena
from foredraft.integrations.batches import I64, Batch, ChainOptions, Chains

_UNIT = 1024


def fits(options: AdaptixOptions) -> bool:
    """Say whether a drafter with these options can be batched: the default search and rule, nothing shared."""
    return options.search == "best_first" and options.learn != "paper" and not options.share


class AdaptixBatch:
    """What each text has taught.

    Args:
        drafter: its table and options.
        slots: texts at most.
        vocabulary: ids of the target.
        most: tokens to draft at most.
        options: how trees become chains.
    """

    def __init__(self, drafter: AdaptixDrafter, slots: int, vocabulary: int, most: int, options: ChainOptions) -> None:
        self._drafter, self._vocabulary, self._most, self._options = drafter, vocabulary, most, options
        self._arena: Arena[LearnedArrays] = Arena(empty_learned, _UNIT)
        self._regions = np.zeros((slots, 2), np.int64)

    def draft(self, batch: Batch) -> Chains:
        """Learn what is new in the rows, and search behind each."""
        known = batch.known.copy()
        self._make_room(batch, known)
        own = self._drafter.options
        chains = batch.no_chains(self._most)
        _draft(
            self._drafter.table.arrays, self._arena.pool, self._regions[batch.slots], BLENDED,
            batch.token_ids, batch.rows, batch.lengths, known, np.minimum(batch.depth, own.depth),
            own.learn == "tokens", own.keep, self._options.tree_nodes, self._options.least_probability,
            self._vocabulary, *chains,
        )  # fmt: skip
        return chains

    def forget(self, slot: int) -> None:
        """Give the slot's memory back."""
        start, units = self._regions[slot].tolist()
        if units:
            self._arena.give(start, units)
            self._regions[slot] = 0

    def _make_room(self, batch: Batch, known: I64) -> None:
        """Give every row a region with room for what is new; of a long text, all but the last stretch is learned here.

        `known` says how far each row is learned, and is moved on.
        """
        learns = self._drafter.options.learn == "tokens"
        for i in np.flatnonzero(self._regions[batch.slots, 1] == 0).tolist():
            contexts = 2 * min(int(batch.lengths[i]), STRETCH) if learns else 1
            units = self._arena.units(2 * contexts)
            self._regions[batch.slots[i]] = self._arena.take(units), units
        if not learns:
            return
        used = self._arena.pool.clock[2 * self._regions[batch.slots, 0] + 1]
        new = 2 * (batch.lengths - known)
        for i in np.flatnonzero(2 * (used + new) > _UNIT * self._regions[batch.slots, 1]).tolist():
            slot, stop = int(batch.slots[i]), int(batch.lengths[i])
            while stop - known[i] > STRETCH:
                middle = int(known[i]) + STRETCH
                arrays = self._with_room(slot, 2 * STRETCH)
                ids = batch.token_ids[batch.rows[i], :middle].astype(np.int64)
                learn_text(arrays, ids, int(known[i]), 1.0, self._drafter.options.keep, np.inf)
                known[i] = middle
            self._with_room(slot, 2 * (stop - int(known[i])))

    def _with_room(self, slot: int, contexts: int) -> LearnedArrays:
        start, units = self._regions[slot].tolist()
        arrays = region(self._arena.pool, start, units)
        larger = with_room(arrays, contexts)
        if larger is arrays:
            return arrays
        if len(larger.keys) > len(arrays.keys):
            self._arena.give(start, units)
            units = len(larger.keys) // _UNIT
            start = self._arena.take(units)
            self._regions[slot] = start, units
        self._arena.store(start, larger)
        return region(self._arena.pool, start, units)


@njit(cache=True)
def region(pool: LearnedArrays, start: int, units: int) -> LearnedArrays:
    """Return the table that lies in a region of the pool."""
    low, high = start * _UNIT, (start + units) * _UNIT
    return LearnedArrays(
        pool.keys[low:high], pool.tokens[low:high], pool.weights[low:high], pool.totals[low:high], pool.met[low:high],
        pool.clock[2 * start : 2 * start + 2],
    )  # fmt: skip


@njit(cache=True)
def _draft_row(
    table: TableArrays, learned: LearnedArrays, trust: Trust, ids: IntArray, known: int, depth: int, learns: bool,
    keep: float, nodes: int, least: float, vocabulary: int, chain: IntArray, chain_scores: FloatArray,
) -> int:  # fmt: skip
    """Learn `ids` from `known` on, write the best chain behind them and its scores, and return its length."""
    if learns:
        start = max(known - 2, 0)  # a token is learned behind the two before it
        learn_text(learned, ids[start:].astype(np.int64), known - start, 1.0, keep, np.inf)
    if depth <= 0:
        return 0
    before = int(ids[-2]) if len(ids) > 1 else NO_TOKEN
    last, count, reached = int(ids[-1]), 0, 1.0
    while count < depth:  # a small tree ends before the chain does: the next one grows from the chain's end
        tokens, parents, scores = best_first(table, learned, trust, before, last, nodes, depth - count, vocabulary)
        kept = best_chain(parents, scores, depth - count, least / reached)
        if len(kept) == 0:
            break
        for node in kept:
            chain[count], chain_scores[count] = tokens[node], reached * scores[node]
            before, last = last, int(tokens[node])
            count += 1
        reached *= float(scores[kept[-1]])
    return count


@njit(cache=True, parallel=True)
def _draft(
    table: TableArrays, pool: LearnedArrays, regions: I64, trust: Trust, token_ids: IntArray, rows: I64, lengths: I64,
    known: I64, depth: I64, learns: bool, keep: float, nodes: int, least: float, vocabulary: int, chains: IntArray,
    scores: FloatArray, counts: IntArray,
) -> None:  # fmt: skip
    for i in prange(len(rows)):
        learned = region(pool, regions[i, 0], regions[i, 1])
        ids = token_ids[rows[i], : lengths[i]]
        counts[i] = _draft_row(
            table, learned, trust, ids, known[i], depth[i], learns, keep, nodes, least, vocabulary, chains[i], scores[i]
        )
