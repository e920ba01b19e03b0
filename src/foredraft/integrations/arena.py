"""Memory for the growing arrays of many texts: regions of one pool, so that a compiled call reaches all of them.

A kind of arrays (learned counts, a recent text) is a named tuple that is made empty in any size that is a power of two
times a unit. Knows sizes and places; not what the arrays mean.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T", bound=tuple[Any, ...])

_FIRST_UNITS = 16


class Arena(Generic[T]):
    """A pool, and which parts of it are free.

    Args:
        empty: makes the arrays in a given size; every array's first axis grows with the size, or is as long as in the
            smallest one.
        unit: the smallest size.

    Attributes:
        pool: the named tuple, each array as long as all units together; unit `u` of an array of width w is
            `array[u * w : (u + 1) * w]`. Replaced by a larger one when it is full.
    """

    def __init__(self, empty: Callable[[int], T], unit: int) -> None:
        self._empty = empty
        self._unit = unit
        smallest = empty(unit)
        self._widths = [len(array) for array in smallest]
        self._free: dict[int, list[int]] = {}
        self._used = 0
        self.pool: T = self._grown(smallest, _FIRST_UNITS)

    def take(self, units: int) -> int:
        """Return the first unit of a region of `units` units, with empty arrays in it."""
        free = self._free.get(units)
        if free:
            start = free.pop()
        else:
            start = self._used
            self._used += units
            room = len(self.pool[0]) // self._widths[0]
            if self._used > room:
                self.pool = self._grown(self.pool, max(2 * room, self._used))
        self.store(start, self._empty(self._unit * units))
        return start

    def give(self, start: int, units: int) -> None:
        """Take a region back."""
        self._free.setdefault(units, []).append(start)

    def store(self, start: int, arrays: T) -> None:
        """Copy arrays into a region that is as large as they are."""
        for pool, width, array in zip(self.pool, self._widths, arrays, strict=True):
            pool[start * width : start * width + len(array)] = array

    def units(self, size: int) -> int:
        """Return how many units have room for `size`: a power of two."""
        return 1 << max(0, (-(-size // self._unit) - 1).bit_length())

    def _grown(self, arrays: T, units: int) -> T:
        larger = []
        for array, width in zip(arrays, self._widths, strict=True):
            room = np.empty((units * width, *array.shape[1:]), array.dtype)
            room[: len(array)] = array
            larger.append(room)
        return type(arrays)(*larger)
