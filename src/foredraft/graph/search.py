"""What best-first searches share: a priority queue of candidates, and a bar that drops scores below the best N.

Does not depend on what the candidates are. The bar takes scores from 0 to 1.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.tree import FloatArray, IntArray

FLOOR = 1e-4
"""Lower scores, in expected accepted tokens per node, never pass the bar; chosen."""
_LOWEST_BIN = int(np.float32(FLOOR).view(np.int32) >> 20)
_BINS = int(np.float32(1.0).view(np.int32) >> 20) - _LOWEST_BIN + 1


class Queue(NamedTuple):
    """Candidates, numbered from 0 in the order pushed; the one with the largest score is popped first."""

    score: FloatArray  # float32[R], by candidate
    heap: IntArray  # int32[R], the waiting candidates as a binary heap
    counts: IntArray  # int32[2], candidates pushed so far, and candidates waiting


@njit(cache=True)
def new_queue(score: FloatArray) -> Queue:
    """Return an empty queue that stores its candidates' scores in `score`, float32[R]."""
    return Queue(score, np.empty(len(score), np.int32), np.zeros(2, np.int32))


@njit(cache=True)
def push(queue: Queue, score: float | np.float32) -> int:
    """Add a candidate and return its number; there must be room for it."""
    heap, scores, candidate, child = queue.heap, queue.score, queue.counts[0], queue.counts[1]
    scores[candidate], heap[child] = score, candidate
    queue.counts[0], queue.counts[1] = candidate + 1, child + 1
    while child > 0:
        parent = (child - 1) // 2
        if scores[heap[parent]] >= scores[heap[child]]:
            break
        heap[parent], heap[child] = heap[child], heap[parent]
        child = parent
    return int(candidate)


@njit(cache=True)
def pop(queue: Queue) -> int:
    """Remove the waiting candidate with the largest score and return its number; -1 if none waits."""
    if queue.counts[1] == 0:
        return -1
    heap, score, size = queue.heap, queue.score, queue.counts[1] - 1
    best: int = heap[0]
    heap[0] = heap[size]
    queue.counts[1] = size
    parent = 0
    while True:
        child = 2 * parent + 1
        if child >= size:
            return best
        if child + 1 < size and score[heap[child + 1]] > score[heap[child]]:
            child += 1
        if score[heap[parent]] >= score[heap[child]]:
            return best
        heap[parent], heap[child] = heap[child], heap[parent]
        parent = child


class Bar(NamedTuple):
    """Counts of scores by bin, 8 bins per power of two, so that nothing needs to be sorted."""

    bins: npt.NDArray[np.int64]  # int64[B], scores counted per bin
    state: npt.NDArray[np.int64]  # int64[3]: N, the highest bin with N scores above it (-1 at first), their number


@njit(cache=True)
def new_bar(most: int) -> Bar:
    """Return a bar for the best `most` scores."""
    return Bar(np.zeros(_BINS, np.int64), np.array([most, -1, 0]))


@njit(cache=True)
def _bin(score: np.float32) -> int:
    """Return the bin of a score in [FLOOR, 1]: its exponent and three bits of its mantissa."""
    return int(np.float32(score).view(np.int32) >> 20) - _LOWEST_BIN


@njit(cache=True)
def above_bar(bar: Bar, score: float | np.float32) -> bool:
    """Return whether the score may be among the best N: fewer than N scores lie in higher bins."""
    return bool(score >= FLOOR) and bool(_bin(np.float32(score)) > bar.state[1])  # NaN is not


@njit(cache=True)
def raise_bar(bar: Bar, score: float | np.float32) -> None:
    """Count a score above the bar, and raise the bar to just below the best N scores."""
    bar.bins[_bin(np.float32(score))] += 1
    bar.state[2] += 1
    while bar.state[2] - bar.bins[bar.state[1] + 1] >= bar.state[0]:
        bar.state[1] += 1
        bar.state[2] -= bar.bins[bar.state[1]]


@njit(cache=True)
def bar_height(bar: Bar) -> float:
    """Return the smallest score above the bar."""
    return max(FLOOR, float(np.int32((bar.state[1] + 1 + _LOWEST_BIN) << 20).view(np.float32)))
