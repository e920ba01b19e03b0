"""Arrays by the address of their memory, as torch tells it: compiled functions take a number where a view takes longer.

Making an array of a tensor takes torch three calls and 30 microseconds where a pass has emptied the caches. Whoever
hands over an address keeps the memory. Knows memory; not what it holds.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import config, njit, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

Array = npt.NDArray[Any]

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
