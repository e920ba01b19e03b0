"""A binary heap of candidates, largest score first, for compiled searches.

Knows numbers and their scores; not what they stand for.
"""

from numba import njit

from foredraft.graph.tree import FloatArray, IntArray


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
