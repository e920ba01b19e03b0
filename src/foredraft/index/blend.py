"""Blending: long matches and low-order counts in one best-first search, each trusted as far as its kind proved right.

Behind every path of the draft, what the rows that begin with the path go on with (index/retrieval.py) comes first, and
what they leave over goes to what is known of the path's last two tokens (index/successors.py), as in the escape
probabilities of PPM (Cleary and Witten 1984). How much rows take behind the root is their levels' trust
(index/backoff.py); deeper, it depends on how many rows there are. Knows arrays; not where rows and counts come from.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.bar import above_bar, bar_height, new_bar, raise_bar
from foredraft.graph.heap import pop, sift_up
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.backoff import UNFORESEEN, learn_trust
from foredraft.index.backoff import Trust as LevelTrust
from foredraft.index.learned import LearnedArrays
from foredraft.index.prefixes import Groups, group_of, group_rows, room_for_groups, split_rows, weight_of
from foredraft.index.retrieval import FORESEEN, Levels, Rows
from foredraft.index.successors import MOST_SUCCESSORS, Trust, successors
from foredraft.index.trigram import TableArrays

F64 = npt.NDArray[np.float64]

COUNTS = 4
"""The source of nodes that low-order counts foresaw; the others are those of index/retrieval.py."""
_BINS = 9
_FORESEEN_BIN = _BINS


class Counts(NamedTuple):
    """What is known of pairs and single tokens, as `successors` takes it."""

    table: TableArrays
    learned: LearnedArrays
    trust: Trust


class InnerTrust(NamedTuple):
    """How far rows are trusted behind a drafted token, float64[10] each.

    By the logarithm of their number to base 2, and in the last place where a neural drafter's are among them.

    Attributes:
        hits: how often they explained the next token (in parts).
        passes: how often the counts did.
    """

    hits: F64
    passes: F64


class Blended(NamedTuple):
    """A draft and what it was made of, best nodes first.

    Attributes:
        tokens: int32[N].
        parents: int32[N].
        score: float32[N], the estimate that the path down to the node is accepted.
        source: uint8[N], what gave most of the node's probability: STORE, OWN, SHARED, FORESEEN or COUNTS.
        low: int32[N], the rows that begin with the path are `members[low:high]`.
        high: int32[N].
        members: int32[R].
    """

    tokens: IntArray
    parents: IntArray
    score: FloatArray
    source: npt.NDArray[np.uint8]
    low: IntArray
    high: IntArray
    members: IntArray


def prior_inner_trust(strength: float) -> InnerTrust:
    """Return the trust to begin with, worth `strength` observations."""
    constant, doubling, foreseen_rows = _PRIOR
    log_odds = np.append(constant + doubling * (np.arange(_BINS) + 0.3), foreseen_rows)
    trusted = 1 / (1 + np.exp(-log_odds))
    return InnerTrust(strength * trusted, strength * (1 - trusted))


_PRIOR = (-2.6, 0.6, 1.5)
"""Log-odds of trust: constant, per doubling of the rows (fitted on every other recorded answer; see docs/log.md), and
where a neural drafter's are among them."""


@njit(cache=True)
def _level_of(levels: Levels, row: int) -> int:
    return int(np.searchsorted(levels.start, row, side="right")) - 1


@njit(cache=True)
def _bin(levels: Levels, members: IntArray, low: int, high: int) -> int:
    """Return the place in `InnerTrust` of the rows `members[low:high]`, at least one."""
    first = members[low]
    for i in range(low + 1, high):
        first = min(first, members[i])  # the most trusted source comes first
    if levels.source[_level_of(levels, first)] == FORESEEN:
        return _FORESEEN_BIN
    return min(int(np.log2(high - low)), _BINS - 1)


@njit(cache=True)
def trust_in_rows(inner: InnerTrust, levels: Levels, members: IntArray, low: int, high: int) -> float:
    """Return how far the rows `members[low:high]`, at least one, are trusted behind a drafted token."""
    at = _bin(levels, members, low, high)
    return float(inner.hits[at] / (inner.hits[at] + inner.passes[at]))


@njit(cache=True)
def with_foresight(levels: Levels, rows: Rows, paths: IntArray, mass: F64, share: float) -> tuple[Levels, Rows]:
    """Return levels and rows with a neural drafter's before them.

    Args:
        levels: of what occurred.
        rows: likewise.
        paths: int32[N, D], see `foredraft.graph.paths.paths_of`; D as in `rows`.
        mass: float64[N], the probability of each.
        share: the part of the weight that they get; the others keep the rest.
    """
    count = len(mass)
    return (
        Levels(
            np.append(np.array([FORESEEN]), levels.source),
            np.append(np.array([0]), levels.length),
            np.append(np.array([max(count, 1)]), levels.occurrences),
            np.append(np.array([0]), levels.start + count),
            np.append(np.array([share]), levels.share * (1 - share)),
        ),
        Rows(np.concatenate((paths, rows.tokens)), np.append(share * mass, (1 - share) * rows.weights)),
    )


@njit(cache=True)
def foreseen(counts: Counts, a: int, b: int, token: int) -> float:
    """Return the probability that low-order counts give to `token` behind (a, b), at least `UNFORESEEN`."""
    tokens, scores = np.empty(MOST_SUCCESSORS, np.int32), np.empty(MOST_SUCCESSORS, np.float32)
    found = successors(counts.table, counts.learned, counts.trust, a, b, UNFORESEEN, tokens, scores)
    for i in range(found):
        if tokens[i] == token:
            return max(min(float(scores[i]), 1.0), UNFORESEEN)
    return UNFORESEEN


class _Search(NamedTuple):
    """Working memory: candidates, of which `counts[0]` were made and `counts[1]` wait in the heap.

    A candidate is a token behind a node, with its rows, source and score. `own` is what rows gave each group.
    """

    token: IntArray
    parent: IntArray
    low: IntArray
    high: IntArray
    source: npt.NDArray[np.uint8]
    score: FloatArray
    heap: IntArray
    counts: npt.NDArray[np.int64]
    own: F64
    found_tokens: IntArray
    found_scores: FloatArray


@njit(cache=True)
def _room(rows: int, reach: int, nodes: int) -> _Search:
    room = rows * reach + (nodes + 1) * MOST_SUCCESSORS
    return _Search(
        np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32),
        np.empty(room, np.uint8), np.empty(room, np.float32), np.empty(room, np.int32), np.zeros(2, np.int64),
        np.empty(rows + MOST_SUCCESSORS, np.float64), np.empty(MOST_SUCCESSORS, np.int32),
        np.empty(MOST_SUCCESSORS, np.float32),
    )  # fmt: skip


@njit(cache=True)
def _continue(
    rows: Rows, members: IntArray, low: int, high: int, level: int, taken: float, counts: Counts, before: int,
    last: int, least: float, groups: Groups, search: _Search,
) -> int:  # fmt: skip
    """Group what may follow a path and set the groups' weights to their probabilities; return how many there are.

    The rows' weights are scaled so that all of them have `taken`; 0 leaves them as they are, for the root. What rows
    that go on do not have is the counts'. Of these, contributions below `least` may be left out.
    """
    made, covered = 0, 0.0
    if level < rows.tokens.shape[1] and high > low:
        made = group_rows(rows, members, low, high, level, groups)
        scale = taken / weight_of(rows, members, low, high) if taken > 0 else 1.0
        for group in range(made):
            groups.weight[group] *= scale
            search.own[group] = groups.weight[group]
            covered += groups.weight[group]
    left = max(1.0 - covered, 0.0)
    if left < least:
        return made
    found = successors(
        counts.table, counts.learned, counts.trust, before, last, least / left, search.found_tokens, search.found_scores
    )
    for i in range(found):
        if search.found_tokens[i] >= 0:
            group = group_of(groups, made, search.found_tokens[i])
            if group == made:
                search.own[made] = 0.0
                made += 1
            groups.weight[group] += left * min(float(search.found_scores[i]), 1.0)
    return made


@njit(cache=True)
def blend(
    rows: Rows, levels: Levels, inner: InnerTrust, counts: Counts, a: int, b: int, nodes: int, depth: int,
    vocabulary: int,
) -> Blended:  # fmt: skip
    """Return the `nodes` most probable paths behind (a, b), no node deeper than `depth`.

    A path's score is the product of its tokens' probabilities, so the result is prefix-closed. As in best-first search
    over counts alone (index/best_first.py), a candidate is dropped once `nodes` better ones are known, and small
    contributions of the counts are left out near that bar.

    Args:
        rows: what followed longer contexts; their weights are the levels' shares, at most 1 together.
        levels: where the rows come from.
        inner: how far rows are trusted behind a drafted token.
        counts: what is known of the last two tokens.
        a: the token before the root, or -1.
        b: the root.
        nodes: at most so many.
        depth: likewise.
        vocabulary: tokens at or beyond it are left out.
    """
    total = len(rows.weights)
    s, groups, bar = _room(total, rows.tokens.shape[1], nodes), room_for_groups(total, MOST_SUCCESSORS), new_bar(nodes)
    members = np.arange(total).astype(np.int32)
    tokens, parents, level = np.empty(nodes, np.int32), np.empty(nodes, np.int32), np.empty(nodes, np.int32)
    chosen = np.empty(nodes, np.int32)
    done, node, score, node_level, low, high = 0, -1, np.float32(1.0), 0, 0, total
    while done < nodes:
        if node_level < depth and above_bar(bar, score):
            before = a if node < 0 else (b if parents[node] < 0 else tokens[parents[node]])
            last = b if node < 0 else tokens[node]
            taken = 0.0
            if node >= 0 and high > low:
                taken = trust_in_rows(inner, levels, members, low, high)
            least = 0.25 * bar_height(bar) / float(score)
            made = _continue(
                rows, members, low, high, node_level, taken, counts, before, last, least, groups, s
            )  # fmt: skip
            for group in range(made):
                token = groups.slot_token[groups.slot[group]]
                reaches = score * np.float32(min(groups.weight[group], 1.0))
                if above_bar(bar, reaches) and token < vocabulary:
                    c = s.counts[0]
                    s.token[c], s.parent[c], s.score[c] = token, node, reaches
                    s.low[c] = group  # until the rows are split
                    s.source[c] = 0 if 2 * s.own[group] > groups.weight[group] else COUNTS
                    s.heap[s.counts[1]] = c
                    s.counts[0] += 1
                    s.counts[1] += 1
                    sift_up(s.heap, s.counts[1], s.score)
                    raise_bar(bar, reaches)
            _split(levels, members, low, high, groups, made, s, node)
        if s.counts[1] == 0:
            break
        best = pop(s.heap, s.counts[1], s.score)
        s.counts[1] -= 1
        node, score, low, high = done, s.score[best], s.low[best], s.high[best]
        tokens[node], parents[node], chosen[node] = s.token[best], s.parent[best], best
        node_level = 1 if parents[node] < 0 else level[parents[node]] + 1
        level[node] = node_level
        done += 1
    chosen = chosen[:done]
    return Blended(
        tokens[:done].copy(), parents[:done].copy(), s.score[chosen], s.source[chosen], s.low[chosen], s.high[chosen],
        members,
    )  # fmt: skip


@njit(cache=True)
def _split(
    levels: Levels, members: IntArray, low: int, high: int, groups: Groups, made: int, s: _Search, node: int
) -> None:
    """Give the node's new candidates the rows of their groups, and the source of the most trusted one."""
    split_rows(members, low, high, groups, made)
    c = s.counts[0] - 1
    while c >= 0 and s.parent[c] == node:
        group = s.low[c]
        first, rows = (groups.first[group], groups.rows[group]) if groups.rows[group] else (0, 0)
        s.low[c], s.high[c] = first, first + rows
        if s.source[c] != COUNTS:
            s.source[c] = levels.source[_level_of(levels, members[first])]
        c -= 1


@njit(cache=True)
def learn_inner(
    inner: InnerTrust, made: Blended, rows: Rows, levels: Levels, counts: Counts, b: int, tokens: npt.NDArray[np.int64]
) -> None:
    """Credit rows, or the counts behind them, with what followed each drafted token that was accepted.

    Args:
        inner: changed in place.
        made: the draft.
        rows: that it was made of.
        levels: likewise.
        counts: likewise.
        b: the root.
        tokens: int64[k], what was written behind the root.
    """
    node, before = -1, b
    for k in range(len(tokens) - 1):
        child = -1
        for other in range(node + 1, len(made.tokens)):
            if made.parents[other] == node and made.tokens[other] == tokens[k]:
                child = other
                break
        if child < 0 or k + 1 >= rows.tokens.shape[1] or made.high[child] == made.low[child]:
            return
        node = child
        low, high = int(made.low[node]), int(made.high[node])
        right = 0.0
        for i in range(low, high):
            row = made.members[i]
            right += rows.weights[row] if rows.tokens[row, k + 1] == tokens[k + 1] else 0.0
        right /= weight_of(rows, made.members, low, high)
        share = trust_in_rows(inner, levels, made.members, low, high)
        part = share * right
        part /= part + (1.0 - share) * foreseen(counts, before, tokens[k], tokens[k + 1])
        at = _bin(levels, made.members, low, high)
        inner.hits[at] += part
        inner.passes[at] += 1.0 - part
        before = tokens[k]


@njit(cache=True)
def learn_written(
    trust: LevelTrust, inner: InnerTrust, made: Blended, occurred: tuple[Levels, Rows], asked: tuple[Levels, Rows],
    counts: Counts, a: int, b: int, tokens: npt.NDArray[np.int64],
) -> float:  # fmt: skip
    """Credit what foresaw the written tokens, in one compiled call; return the counts' probability of the first.

    Args:
        trust: how far levels are trusted; changed in place.
        inner: how far rows are trusted behind drafted tokens; changed in place.
        made: the draft.
        occurred: levels and rows of what occurred.
        asked: those that the draft was made of: the same, with a neural drafter's before them if there is one.
        counts: that it was made of.
        a: the token before the root, or -1.
        b: the root.
        tokens: int64[k], what was written behind the root.
    """
    otherwise = foreseen(counts, a, b, tokens[0])
    learn_trust(trust, occurred[0], occurred[1], tokens[0], otherwise)
    learn_inner(inner, made, asked[1], asked[0], counts, b, tokens)
    return otherwise
