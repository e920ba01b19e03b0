"""Retrieval: what followed the longest context that occurs anywhere, and the best tree of it.

He et al., "REST: Retrieval-Based Speculative Decoding" (NAACL 2024), section 3, with the tree cut exactly. Knows sorted
and recent texts as arrays; not whose they are, nor what is done with the tree.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.recent_text import RecentText, occurrences
from foredraft.index.suffix_array import SuffixArrays

I64 = npt.NDArray[np.int64]


def followers(
    segments: Sequence[SuffixArrays], ranges: I64, recent: Sequence[RecentText], context: I64, shortest: int,
    samples: int, depth: int, *, spread: bool = True,
) -> IntArray:  # fmt: skip
    """Return what followed the longest end of a context that occurs anywhere.

    Args:
        segments: sorted texts, S of them.
        ranges: int64[S, longest + 1, 2], where the context occurs in each, as `follow` keeps it.
        recent: other texts; searched for two tokens or more.
        context: int64[n].
        shortest: tokens that must match at least.
        samples: rows at most.
        depth: tokens of a row.
        spread: take the rows evenly from all occurrences, the newest of recent texts first, then the segments'; else
            the first ones.

    Returns:
        int32[R, depth], -1 after a document's end.
    """
    longest = ranges.shape[1] - 1
    found = [occurrences(text, context, longest, samples) for text in recent]
    counts = np.zeros((len(recent) + len(segments), longest + 1), np.int64)
    for row, (_, lengths) in enumerate(found):
        counts[row] = np.bincount(lengths, minlength=longest + 1)[::-1].cumsum()[::-1]
    counts[len(recent) :] = ranges[:, :, 1] - ranges[:, :, 0]
    matching = np.flatnonzero(counts[:, shortest:].any(axis=0))
    if not len(matching):
        return np.empty((0, depth), np.int32)
    length = shortest + int(matching[-1])
    total = int(counts[:, length].sum())
    taken = min(total, samples)
    picked = (2 * np.arange(taken) + 1) * total // (2 * taken) if spread else np.arange(taken)
    rows, before = [], 0
    for number, count in enumerate(counts[:, length].tolist()):
        own = picked[(picked >= before) & (picked < before + count)] - before
        before += count
        if number < len(recent):
            places, lengths = found[number]
            text = recent[number]
            symbols = text.symbols[: int(text.length[0])]
            rows.append(_rows(symbols, places[lengths >= length][own].astype(np.int64), depth, np.iinfo(np.int32).max))
        else:
            rows.append(
                stored_rows(segments[number - len(recent)], ranges[number - len(recent), length], length, own, depth)
            )
    return np.concatenate(rows)


def stored_rows(text: SuffixArrays, entries: I64, length: int, picked: I64, depth: int) -> IntArray:
    """Return what follows in a segment.

    Args:
        text: the segment.
        entries: int64[2], the suffixes that begin with the context: from, and up to.
        length: the context's.
        picked: int64[R], which of them.
        depth: tokens of a row.

    Returns:
        int32[R, depth], -1 after the document's end.
    """
    places = text.suffixes[entries[0] + picked].astype(np.int64) + length
    return _rows(text.symbols, places, depth, len(text.first) - 1)


def _rows(symbols: npt.NDArray[np.integer], places: I64, depth: int, separator: int) -> IntArray:
    """Return `depth` symbols from each place on, int32[R, depth]; -1 from a separator, -1 or the text's end on."""
    at = places[:, None] + np.arange(depth)
    inside = (at >= 0) & (at < len(symbols))  # a damaged file may say anything
    tokens = symbols[np.where(inside, at, 0)].astype(np.int64) if len(symbols) else np.zeros(at.shape, np.int64)
    ended = np.logical_or.accumulate(~inside | (tokens < 0) | (tokens >= separator), axis=1)
    return np.where(ended, -1, tokens).astype(np.int32)


def best_nodes(rows: IntArray, limit: int, doubt: float) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the `limit` prefixes of the rows that are most probable, as a tree.

    A first token scores its share of the rows. After that, a prefix passes its score on to its continuations by their
    share of its n rows, times n / (n + doubt): what was seen once is likely to go on otherwise. So no score exceeds
    that of the prefix extended, and the result is exactly the prefix-closed top `limit`.

    Args:
        rows: int32[R, D], -1 after a row's end.
        limit: nodes at most.
        doubt: rows that are imagined to go on in some other way, at every prefix.

    Returns:
        tokens int32[N], parents int32[N], and scores float32[N], at most 1.
    """
    tokens, parents, counts = prefixes(rows)
    score = np.empty(len(tokens), np.float64)
    first = parents < 0
    score[first] = counts[first] / max(len(rows), 1)
    start = int(first.sum())
    while start < len(tokens):  # a depth at a time: those whose parents have scores
        stop = start + int((parents[start:] < start).sum())
        above = parents[start:stop]
        score[start:stop] = score[above] * (counts[start:stop] / (counts[above] + doubt))
        start = stop
    kept = np.argsort(-score, kind="stable")[:limit]  # of equals the one above comes first
    place = np.full(len(tokens) + 1, -1, np.int32)  # the last one for the root, which is -1
    place[kept] = np.arange(len(kept))
    return tokens[kept], place[parents[kept]], score[kept].astype(np.float32)


def prefixes(rows: IntArray) -> tuple[IntArray, IntArray, I64]:
    """Return every distinct prefix of the rows, the short ones first.

    Args:
        rows: int32[R, D], -1 after a row's end, in any order.

    Returns:
        Of each prefix its last token, int32[P]; the prefix above it, int32[P], -1 for none; and how many rows begin
        with it, int64[P].
    """
    rows = rows[np.lexsort(rows.T[::-1])] if len(rows) else rows
    new = np.zeros(len(rows), np.bool_)
    new[:1] = True
    node = np.full(len(rows), -1, np.int32)  # of each row, its prefix so far
    tokens, parents, counts, made = [rows[:0, 0]], [node[:0]], [np.zeros(0, np.int64)], 0
    for depth in range(rows.shape[1]):
        new[1:] |= rows[1:, depth] != rows[:-1, depth]
        starts = np.flatnonzero(new)
        goes_on = rows[starts, depth] >= 0
        tokens.append(rows[starts[goes_on], depth])
        parents.append(node[starts[goes_on]])
        counts.append(np.diff(starts, append=len(rows))[goes_on])
        numbers = np.where(goes_on, made + np.cumsum(goes_on) - 1, -1)
        node = numbers[np.cumsum(new) - 1].astype(np.int32)
        made += int(goes_on.sum())
    return np.concatenate(tokens), np.concatenate(parents), np.concatenate(counts)
