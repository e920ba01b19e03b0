"""Where arrays lie: one array of addresses that compiled functions take in the place of many arrays.

At every call numba converts each array of each argument, and between two passes all of that is out of the caches: forty
arrays take 70 microseconds to hand over, more than is then done with them. Their addresses are one array, and take
five. Whoever hands over an address keeps the array. Knows arrays and memory; not what they hold.
"""

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import config, njit, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

I64 = npt.NDArray[np.int64]

_WORDS = 3  # address, length, and length of a row
Array = npt.NDArray[Any]


class Addresses:
    """Arrays, kept alive, and where they lie.

    An array is known by its place. Its type is not kept: who reads it names it, as `vector` and `matrix` say.

    Args:
        arrays: contiguous, of one dimension or two.

    Attributes:
        words: int64[3 * N], for compiled functions; changed in place.
    """

    def __init__(self, arrays: Iterable[Array]) -> None:
        self._kept = list(arrays)
        self.words: I64 = np.array([word for array in self._kept for word in _words(array)], np.int64)

    def put(self, place: int, arrays: Iterable[Array]) -> None:
        """Let other arrays take the places from `place` on."""
        for number, array in enumerate(arrays, place):
            self._kept[number] = array
            self.words[_WORDS * number : _WORDS * (number + 1)] = _words(array)


def address_of(array: Array) -> int:
    """Return where an array's memory begins."""
    address: int = array.__array_interface__["data"][0]  # `array.ctypes` imports something, and takes longer
    return address


def _words(array: Array) -> tuple[int, int, int]:
    assert array.flags.c_contiguous, "only contiguous arrays can be told by their address"
    assert array.ndim in (1, 2), "an array is told with the length of a row, not more"
    return address_of(array), len(array), array.shape[1] if array.ndim == 2 else 1


if config.DISABLE_JIT:  # type: ignore[attr-defined]  # numba sets its settings at run time

    def array_at(address: int, length: int, like: Any) -> Array:
        """Return the array of `length` elements of the type of `like` that lies at an address."""
        size = int(length) * np.dtype(type(like)).itemsize
        memory: Any = (ctypes.c_char * size).from_address(int(address)) if size else b""
        return np.frombuffer(memory, type(like))

else:

    @intrinsic
    def _pointer(_typing: Any, _address: Any, like: Any) -> Any:
        """Return an address as a pointer to the type of `like`."""

        def generated(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        pointer: Any = types.CPointer(like)  # type: ignore[no-untyped-call]  # numba has no annotations
        return pointer(types.int64, like), generated

    @njit
    def array_at(address: int, length: int, like: Any) -> Array:
        """Return the array of `length` elements of the type of `like` that lies at an address."""
        return carray(_pointer(address, like), (length,))  # type: ignore[call-arg]  # numba gives the first argument


@njit
def vector(words: I64, place: int, like: Any) -> Array:
    """Return the array at `place`, of one dimension, whose elements are of the type of `like`."""
    return array_at(words[_WORDS * place], words[_WORDS * place + 1], like)


@njit
def matrix(words: I64, place: int, like: Any) -> Array:
    """Return the array at `place`, of two dimensions, whose elements are of the type of `like`."""
    length, width = words[_WORDS * place + 1], words[_WORDS * place + 2]
    return array_at(words[_WORDS * place], length * width, like).reshape((length, width))
