"""REST for many texts at once: reading, looking up and searching of a whole batch in one compiled call, on threads.

The drafts are those of `RestDrafter` with what a server tells: the tokens that were written. Knows segments, recent
texts in an arena, and the trust of each text.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit, prange

from foredraft.drafters.rest import STRENGTH, RestOptions
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.backoff import F64, UNFORESEEN, Trust, learn_trust, prior_trust
from foredraft.index.lookup import Question, retrieve
from foredraft.index.prefixes import best_nodes
from foredraft.index.recent_text import NO_TEXT, RecentText, append, empty_text
from foredraft.index.retrieval import Levels, Rows, gather_from_store
from foredraft.index.suffix_array import Places, SuffixArrays, Symbols, follow
from foredraft.integrations.arena import Arena
from foredraft.integrations.batches import I64, Batch, ChainOptions, Chains, write_chain

_UNIT = 256


class _Asked(NamedTuple):
    """What was asked for each text's last draft, from which its trust is learned: S slots of M levels and F rows.

    Attributes:
        made: int64[S], levels that were asked; 0 where there is nothing to learn from.
        source: int64[S, M].
        length: int64[S, M].
        occurrences: int64[S, M].
        start: int64[S, M + 1].
        share: float64[S, M].
        firsts: int32[S, F, 1], the first token of each row.
    """

    made: I64
    source: I64
    length: I64
    occurrences: I64
    start: I64
    share: F64
    firsts: IntArray


class _Segments(NamedTuple):
    """The store's segments, an array of each at the same place: compiled threads take no tuple of tuples."""

    symbols: tuple[Symbols, ...]
    suffixes: tuple[Places, ...]
    first: tuple[I64, ...]


class _Settings(NamedTuple):
    """The options, as the kernel takes them."""

    learns: bool
    backoff: bool
    longest: int
    shortest: int
    samples: int
    doubt: float
    nodes: int
    least: float


def fits(options: RestOptions, segments: Sequence[SuffixArrays]) -> bool:
    """Say whether a drafter can be batched: nothing shared, not the published rule, and segments of one type.

    One of over two billion tokens has longer places than the others.
    """
    alike = len({text.suffixes.dtype for text in segments}) <= 1
    return alike and options.weighting != "published" and options.learn != "shared"


class RestBatch:
    """Where each text's last tokens occur, what it has said, and how far each length of context is trusted in it.

    Args:
        options: the drafter's.
        segments: the store's, as they are now.
        slots: texts at most.
        most: tokens to draft at most.
        chains: how trees become chains.
    """

    def __init__(
        self, options: RestOptions, segments: Sequence[SuffixArrays], slots: int, most: int, chains: ChainOptions
    ) -> None:
        self._options, self._most = options, most
        segments = tuple(segments) or (_no_segment(),)
        self._segments = _Segments(*(tuple(arrays) for arrays in zip(*segments, strict=True)))
        self._arena: Arena[RecentText] = Arena(empty_text, _UNIT)
        self._regions = np.zeros((slots, 2), np.int64)
        self._ranges = np.zeros((slots, len(segments), options.longest + 1, 2), np.int64)
        prior = prior_trust(options.longest, STRENGTH)
        self._prior = prior
        self._trust = Trust(*(np.repeat(counter[None], slots, axis=0) for counter in prior))
        levels = 3 * options.longest
        rows = options.samples + levels  # each level's share of the samples is rounded
        levels_of_slot = (slots, levels)
        self._asked = _Asked(
            made=np.zeros(slots, np.int64),
            source=np.zeros(levels_of_slot, np.int64),
            length=np.zeros(levels_of_slot, np.int64),
            occurrences=np.zeros(levels_of_slot, np.int64),
            start=np.zeros((slots, levels + 1), np.int64),
            share=np.zeros(levels_of_slot),
            firsts=np.zeros((slots, rows, 1), np.int32),
        )
        self._settings = _Settings(
            options.learns, options.weighting == "backoff", options.longest, options.shortest, options.samples,
            float(options.doubt), chains.tree_nodes, chains.least_probability,
        )  # fmt: skip

    def draft(self, batch: Batch) -> Chains:
        """Read what is new in the rows, and retrieve what follows each."""
        self._make_room(batch)
        chains = batch.no_chains(self._most)
        _draft(
            *self._segments, self._arena.pool, NO_TEXT, self._regions, self._ranges, self._trust, self._asked,
            self._settings, batch.token_ids, batch.rows, batch.lengths, batch.slots, batch.known,
            np.minimum(batch.depth, self._options.continuation), *chains,
        )  # fmt: skip
        return chains

    def forget(self, slot: int) -> None:
        """Give the slot's memory back, and begin again with the prior trust."""
        start, units = self._regions[slot].tolist()
        if units:
            self._arena.give(start, units)
        self._regions[slot] = 0
        self._ranges[slot] = 0
        self._asked.made[slot] = 0
        for counter, prior in zip(self._trust, self._prior, strict=True):
            counter[slot] = prior

    def _make_room(self, batch: Batch) -> None:
        """Give every row a region with room for its whole text; a text that outgrows its region is read again."""
        needed = batch.lengths if self._options.learns else np.ones_like(batch.lengths)
        for i in np.flatnonzero(needed > _UNIT * self._regions[batch.slots, 1]).tolist():
            slot = int(batch.slots[i])
            start, units = self._regions[slot].tolist()
            if units:
                self._arena.give(start, units)
            units = self._arena.units(2 * int(needed[i]))
            start = self._arena.take(units)
            self._regions[slot] = start, units
            if batch.known[i] and self._options.learns:
                row = batch.token_ids[batch.rows[i], : batch.known[i]]
                append(region(self._arena.pool, start, units), row.astype(np.int64))


def _no_segment() -> SuffixArrays:
    """Return a segment in which nothing occurs."""
    return SuffixArrays(np.zeros(0, np.uint16), np.zeros(0, np.int32), np.zeros(1, np.int64))


@njit(cache=True)
def region(pool: RecentText, start: int, units: int) -> RecentText:
    """Return the text that lies in a region of the pool."""
    low, high = start * _UNIT, (start + units) * _UNIT
    return RecentText(
        pool.symbols[low:high], pool.previous[low:high], pool.keys[2 * low : 2 * high], pool.newest[2 * low : 2 * high],
        pool.length[start : start + 1],
    )  # fmt: skip


@njit(cache=True)
def _segment(segments: _Segments, number: int) -> SuffixArrays:
    return SuffixArrays(segments.symbols[number], segments.suffixes[number], segments.first[number])


@njit(cache=True)
def _learn(trust: Trust, asked: _Asked, slot: int, token: int) -> None:
    """Credit the levels of the last draft with the token that was written behind it."""
    count = asked.made[slot]
    if count > 0:
        levels = Levels(
            asked.source[slot, :count], asked.length[slot, :count], asked.occurrences[slot, :count],
            asked.start[slot, : count + 1], asked.share[slot, :count],
        )  # fmt: skip
        firsts = Rows(asked.firsts[slot, : asked.start[slot, count]], asked.share[slot, :0])
        learn_trust(Trust(trust.hits[slot], trust.passes[slot]), levels, firsts, token, UNFORESEEN)


@njit(cache=True)
def _remember(asked: _Asked, slot: int, levels: Levels, rows: Rows) -> None:
    """Keep what was asked until it is known what was written."""
    count = len(levels.share)
    asked.made[slot] = count
    asked.source[slot, :count], asked.length[slot, :count] = levels.source, levels.length
    asked.occurrences[slot, :count], asked.share[slot, :count] = levels.occurrences, levels.share
    asked.start[slot, : count + 1] = levels.start
    for row in range(len(rows.tokens)):
        asked.firsts[slot, row, 0] = rows.tokens[row, 0]


@njit(cache=True)
def _retrieved(
    segments: _Segments, text: RecentText, nothing: RecentText, ranges: I64, trust: Trust, settings: _Settings,
    ids: I64, depth: int,
) -> tuple[Levels, Rows]:  # fmt: skip
    """Return what follows the last tokens wherever they occur, `depth` tokens of it."""
    asked = Question(settings.shortest, not settings.backoff, settings.backoff, settings.samples, depth)
    levels, rows = retrieve(ranges, text, nothing, ids, trust, asked)
    before = np.zeros(settings.longest + 1, np.int64)
    for number in range(len(segments.first)):
        gather_from_store(_segment(segments, number), ranges[number], before, levels, rows)
    return levels, rows


@njit(cache=True)
def _draft_row(
    segments: _Segments, text: RecentText, nothing: RecentText, ranges: I64, trust: Trust, asked: _Asked,
    settings: _Settings, ids: IntArray, slot: int, known: int, depth: int, chain: IntArray, chain_scores: FloatArray,
) -> int:  # fmt: skip
    """Read `ids` from `known` on, write the best chain behind them and its scores, and return its length."""
    length, longest = len(ids), settings.longest
    new = ids[known:].astype(np.int64)
    if settings.backoff and len(new):
        _learn(trust, asked, slot, new[0])
    asked.made[slot] = 0
    context = ids[max(0, length - longest) :].astype(np.int64)
    for number in range(len(segments.first)):
        follow(_segment(segments, number), ranges[number], context, len(new))
    if settings.learns:
        append(text, new)
    if depth <= 0:
        return 0
    own = Trust(trust.hits[slot], trust.passes[slot])
    levels, rows = _retrieved(segments, text, nothing, ranges, own, settings, context, depth)
    _remember(asked, slot, levels, rows)
    tokens, parents, scores = best_nodes(rows, max(settings.nodes, depth), settings.doubt)
    return write_chain(tokens, parents, scores, depth, settings.least, chain, chain_scores)


@njit(cache=True, parallel=True)
def _draft(
    symbols: tuple[Symbols, ...], suffixes: tuple[Places, ...], first: tuple[I64, ...], pool: RecentText,
    nothing: RecentText, regions: I64, ranges: I64, trust: Trust, asked: _Asked, settings: _Settings,
    token_ids: IntArray, rows: I64, lengths: I64, slots: I64, known: I64, depth: I64,
    chains: IntArray, scores: FloatArray, counts: IntArray,
) -> None:  # fmt: skip
    for i in prange(len(rows)):
        slot = slots[i]
        text = region(pool, regions[slot, 0], regions[slot, 1])
        ids = token_ids[rows[i], : lengths[i]]
        counts[i] = _draft_row(
            _Segments(symbols, suffixes, first),
            text,
            nothing,
            ranges[slot],
            trust,
            asked,
            settings,
            ids,
            slot,
            known[i],
            depth[i],
            chains[i],
            scores[i],
        )
