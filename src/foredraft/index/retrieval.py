"""Retrieval: the continuations of a context in texts, as rows for blending (`StoredRows`) or as a tree.

He et al., "REST: Retrieval-Based Speculative Decoding" (NAACL 2024), section 3, uses the longest context that occurs
anywhere. Its tree is cut exactly (`best_nodes`). Does not depend on where the texts come from.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.contracts import TokenIds
from foredraft.graph.tree import I64, FloatArray, IntArray, reindexed_parents
from foredraft.index.recent_text import RecentText, occurrences
from foredraft.index.sources import LONGEST, NO_ROWS, Rows
from foredraft.index.suffix_array import SuffixArrays, follow

_ROWS = 96  # of all segments together; reading them takes 0.1 ms per step (docs/results/log.md)
_REACH = 10  # tokens of a row, as in `rest`; 20 gained nothing (docs/results/log.md)
_ESCAPE = 1.5  # pseudo-count of a context's other continuations; chosen


def followers(
    segments: Sequence[SuffixArrays], ranges: I64, own: RecentText, context: I64, shortest: int, samples: int,
    depth: int,
) -> IntArray:  # fmt: skip
    """Return the continuations of the longest context that occurs anywhere: int32[R, depth], -1 after a text's end.

    Searched are `segments`, whose `ranges`, int64[S, longest + 1, 2], come from `follow`, and the text `own`, for at
    least two tokens. The context, int64[n], must match in `shortest` tokens at least. At most `samples` rows are taken,
    evenly from all occurrences, the newest of the own text first.
    """
    longest = ranges.shape[1] - 1
    places, lengths = occurrences(own, context, longest, samples)
    in_own = np.bincount(lengths, minlength=longest + 1)[::-1].cumsum()[::-1]
    counts = np.vstack([in_own, ranges[:, :, 1] - ranges[:, :, 0]])
    matching = np.flatnonzero(counts[:, shortest:].any(axis=0))
    if not len(matching):
        return np.empty((0, depth), np.int32)
    length = shortest + int(matching[-1])
    total = int(counts[:, length].sum())
    taken = min(total, samples)
    picked = (2 * np.arange(taken) + 1) * total // (2 * taken)
    rows, before = [], 0
    for number, count in enumerate(counts[:, length].tolist()):
        here = picked[(picked >= before) & (picked < before + count)] - before
        before += count
        if number == 0:
            starts = places[lengths >= length][here].astype(np.int64)
            rows.append(_rows(own.symbols[: int(own.length[0])], starts, depth, np.iinfo(np.int32).max))
        else:
            segment, low = segments[number - 1], ranges[number - 1, length, 0]
            starts = segment.suffixes[low + here].astype(np.int64) + length
            rows.append(_rows(segment.symbols, starts, depth, len(segment.first) - 1))
    return np.concatenate(rows)


def _rows(symbols: npt.NDArray[np.integer], places: I64, depth: int, separator: int) -> IntArray:
    """Return `depth` symbols from each place on, int32[R, depth]; -1 from a separator, -1 or the text's end on."""
    at = places[:, None] + np.arange(depth)
    inside = (at >= 0) & (at < len(symbols))  # places in a damaged file may be anything
    tokens = symbols[np.where(inside, at, 0)].astype(np.int64)
    ended = np.logical_or.accumulate(~inside | (tokens < 0) | (tokens >= separator), axis=1)
    return np.where(ended, -1, tokens).astype(np.int32)


def best_nodes(rows: IntArray, limit: int, doubt: float) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the `limit` most probable prefixes of rows, int32[R, D], -1 after a row's end, as a tree.

    A first token's score is its share of the rows. A longer prefix with c of its parent's n rows scores c / (n + doubt)
    times its parent, as prefixes seen rarely are unreliable. So no score exceeds the parent's, and the result is
    exactly the prefix-closed top `limit`: tokens int32[N], parents int32[N], and scores float32[N], at most 1.
    """
    rows = rows[np.lexsort(rows.T[::-1])]
    new = np.zeros(len(rows), np.bool_)  # whether a prefix of the depth so far begins with the row
    new[:1] = True
    # of each row's prefix so far: its node, its number of rows, and its score
    node, among, score = np.full(len(rows), -1, np.int32), np.full(len(rows), len(rows)), np.ones(len(rows))
    tokens, parents, scores, made = [rows[:0, 0]], [node[:0]], [score[:0]], 0
    for depth in range(rows.shape[1]):
        new[1:] |= rows[1:, depth] != rows[:-1, depth]
        starts, owner = np.flatnonzero(new), np.cumsum(new) - 1
        counts = np.diff(starts, append=len(rows))
        likely = score[starts] * (counts / (among[starts] + (doubt if depth else 0)))
        goes_on = rows[starts, depth] >= 0
        tokens.append(rows[starts[goes_on], depth])
        parents.append(node[starts[goes_on]])
        scores.append(likely[goes_on])
        numbers = np.where(goes_on, made + np.cumsum(goes_on) - 1, -1).astype(np.int32)
        node, among, score = numbers[owner], counts[owner], likely[owner]
        made += int(goes_on.sum())
    every, above = np.concatenate(scores), np.concatenate(parents)
    kept = np.argsort(-every, kind="stable")[:limit].astype(np.int32)  # stable, so parents come first
    return np.concatenate(tokens)[kept], reindexed_parents(above, kept), every[kept].astype(np.float32)


# --- rows for blending


class StoredRows:
    """The continuations of one sequence's last tokens in datastore segments, as rows for blending.

    The longest contexts come first; shorter ones fill the rows left, as PPM escapes (Cleary and Witten 1984).
    """

    def __init__(self, segments: Sequence[SuffixArrays]) -> None:
        self._segments = tuple(segments)
        self._ranges = np.zeros((len(segments), LONGEST + 1, 2), np.int64)

    def read(self, ids: TokenIds, new: int) -> Rows:
        """Advance by the last `new` tokens of `ids`, int64[n]; return the continuations of its end."""
        if not self._segments:
            return NO_ROWS
        rows = Rows(np.full((_ROWS, _REACH), -1, np.int32), np.empty(_ROWS, np.float32), np.empty(_ROWS, np.int32))
        made, left = 0, len(self._segments)
        for text, ranges in zip(self._segments, self._ranges, strict=True):
            follow(text, ranges, ids[-LONGEST:], new)
            made = _gather(text, ranges, rows, made, -(-(_ROWS - made) // left))  # an equal share of the rows left
            left -= 1
        order = np.lexsort(rows.tokens[:made].T[::-1])
        return Rows(rows.tokens[order], rows.weights[order], rows.lengths[order])


@njit(cache=True)
def _gather(text: SuffixArrays, ranges: I64, rows: Rows, made: int, most: int) -> int:
    """Add at most `most` rows of one segment to the `made` rows; return the number of rows."""
    separator, n, stop = len(text.first) - 1, len(text.symbols), made + most
    rest, longer = 1.0, 0
    for length in range(LONGEST, 0, -1):
        low = ranges[length, 0]
        count = ranges[length, 1] - low
        if count == longer:
            continue
        taken = min(count, stop - made) if longer == 0 else min(count - longer, (stop - made + 1) // 2)
        if taken <= 0:
            break
        longer, share = count, rest * count / (count + _ESCAPE)
        for row in range(made, made + taken):
            place = text.suffixes[low + (2 * (row - made) + 1) * count // (2 * taken)] + length
            rows.weights[row], rows.lengths[row] = share / taken, length
            for i in range(min(_REACH, n - place) if place >= 0 else 0):  # a damaged file may hold any place
                if text.symbols[place + i] >= separator:
                    break
                rows.tokens[row, i] = text.symbols[place + i]
        made, rest = made + taken, rest - share
    return made
