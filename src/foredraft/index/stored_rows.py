"""What followed a sequence's last tokens in stored texts, as rows for blending.

The longest contexts are asked first, and shorter ones fill what rows are left (as the escapes of PPM, Cleary and Witten
1984). Knows sorted texts; not how likely their answers are.
"""

from collections.abc import Sequence

import numpy as np
from numba import njit

from foredraft.contracts import TokenIds
from foredraft.graph.tree import IntArray
from foredraft.index.sources import I64, LONGEST, NO_ROWS, Rows
from foredraft.index.suffix_array import SuffixArrays, follow

_ROWS = 96  # of all segments together
_REACH = 10  # tokens of a row
_ESCAPE = 1.5  # occurrences that a context is imagined to have had with something else behind it


class StoredRows:
    """One sequence's place in the stored texts.

    Args:
        segments: sorted texts.
    """

    def __init__(self, segments: Sequence[SuffixArrays]) -> None:
        self._segments = tuple(segments)
        self._ranges = np.zeros((len(segments), LONGEST + 1, 2), np.int64)

    def read(self, ids: TokenIds, new: int) -> Rows:
        """Go on to the end of `ids`, int64[n], by its last `new` tokens; return what followed the last ones."""
        if not self._segments:
            return NO_ROWS
        rows = Rows(np.full((_ROWS, _REACH), -1, np.int32), np.empty(_ROWS, np.float32), np.empty(_ROWS, np.int32))
        made, most = 0, _ROWS // len(self._segments)
        for text, ranges in zip(self._segments, self._ranges, strict=True):
            follow(text, ranges, ids[-LONGEST:], new)
            made = _gather(text, ranges, rows, made, most)
        return _sorted(rows, made)


@njit(cache=True)
def _gather(text: SuffixArrays, ranges: I64, rows: Rows, made: int, most: int) -> int:
    """Add what follows in one segment, in `most` rows at most; return how many rows there are then."""
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
            for i in range(min(_REACH, n - place) if place >= 0 else 0):  # a damaged file may say anything
                if text.symbols[place + i] >= separator:
                    break
                rows.tokens[row, i] = text.symbols[place + i]
        made, rest = made + taken, rest - share
    return made


@njit(cache=True)
def _before(tokens: IntArray, a: int, b: int) -> bool:
    for i in range(tokens.shape[1]):
        if tokens[a, i] != tokens[b, i]:
            return bool(tokens[a, i] < tokens[b, i])
    return False


@njit(cache=True)
def _sorted(rows: Rows, count: int) -> Rows:
    """Return the first `count` rows in lexical order."""
    order = np.empty(count, np.int64)
    for i in range(count):  # each into its place by halving: comparing rows takes longer than moving numbers
        low, high = 0, i
        while low < high:
            middle = (low + high) // 2
            if _before(rows.tokens, i, order[middle]):
                high = middle
            else:
                low = middle + 1
        for place in range(i, low, -1):
            order[place] = order[place - 1]
        order[low] = i
    tokens, weights = np.empty((count, rows.tokens.shape[1]), np.int32), np.empty(count, np.float32)
    lengths = np.empty(count, np.int32)
    for i in range(count):
        tokens[i], weights[i], lengths[i] = rows.tokens[order[i]], rows.weights[order[i]], rows.lengths[order[i]]
    return Rows(tokens, weights, lengths)
