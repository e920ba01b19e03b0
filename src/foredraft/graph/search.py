"""What best-first searches keep: a heap of candidates, and a bar that tells which scores are still among the best N.

Knows numbers and their scores, the bar scores from 0 to 1; not what they stand for.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.tree import FloatArray, IntArray

FLOOR = 1e-4
"""Scores below it never pass; a node's score is the tokens that it is expected to give. Our choice."""
_LOWEST_BIN = int(np.float32(FLOOR).view(np.int32) >> 20)
_BINS = int(np.float32(1.0).view(np.int32) >> 20) - _LOWEST_BIN + 1


# --- the heap


@njit(cache=True)
def sift_up(heap: IntArray, size: int, score: FloatArray) -> None:
    """Restore the heap order of `heap[:size]`, largest score first, after its last place was filled."""
    child = size - 1
    while child > 0:
        parent = (child - 1) // 2
        if score[heap[parent]] >= score[heap[child]]:
            break
        heap[parent], heap[child] = heap[child], heap[parent]
        child = parent


@njit(cache=True)
def pop(heap: IntArray, size: int, score: FloatArray) -> int:
    """Remove and return the candidate with the largest score from `heap[:size]`; the last place is then free."""
    best: int = heap[0]
    heap[0] = heap[size - 1]
    size -= 1
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


# --- the bar: counted in bins instead of sorted


class Bar(NamedTuple):
    """How many scores have passed, by bin: eighths of a power of two."""

    bins: npt.NDArray[np.int64]  # int64[B], scores that passed
    state: npt.NDArray[np.int64]  # int64[3]: N, the highest bin above which N are known (-1 at first), and those above


@njit(cache=True)
def new_bar(most: int) -> Bar:
    """Return a bar for the best `most` scores, none of which is known yet."""
    return Bar(np.zeros(_BINS, np.int64), np.array([most, -1, 0]))


@njit(cache=True)
def _bin(score: np.float32) -> int:
    """Return the logarithmic bin of a score in [FLOOR, 1]: its exponent and three bits of its mantissa."""
    return int(np.float32(score).view(np.int32) >> 20) - _LOWEST_BIN


@njit(cache=True)
def above_bar(bar: Bar, score: float | np.float32) -> bool:
    """Say whether N better scores may still be missing."""
    return bool(score >= FLOOR) and bool(_bin(np.float32(score)) > bar.state[1])  # NaN is not


@njit(cache=True)
def raise_bar(bar: Bar, score: float | np.float32) -> None:
    """Count a score that is above the bar; the bar rises to below the best N known."""
    bar.bins[_bin(np.float32(score))] += 1
    bar.state[2] += 1
    while bar.state[2] - bar.bins[bar.state[1] + 1] >= bar.state[0]:
        bar.state[1] += 1
        bar.state[2] -= bar.bins[bar.state[1]]


@njit(cache=True)
def bar_height(bar: Bar) -> float:
    """Return the least score that passes."""
    return max(FLOOR, float(np.int32((bar.state[1] + 1 + _LOWEST_BIN) << 20).view(np.float32)))
