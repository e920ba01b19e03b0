"""Tensors in a temporary file that is mapped: the system reads what is needed, and takes its memory back when it must.

Does not know what the tensors are.
"""

import os
import tempfile
from collections.abc import Callable
from functools import cached_property
from typing import BinaryIO

import numpy as np
import torch

from foredraft.cache_folder import CACHE_VARIABLE, cache_folder, cache_path
from foredraft.errors import StoreError, told
from foredraft.model.machine import COMPILING, usable_memory

_LEAST = 2**20  # bytes of a tensor that is worth a mapping; chosen
_ALIGNED = 64  # bytes at whose multiples a tensor begins: a line of the cache


def keeper(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what keeps weights of `size` bytes together: in memory only where there is room left to compile them."""
    return MappedTensors().keep if COMPILING * size > usable_memory() else (lambda weight: weight)


class MappedTensors:
    """Tensors in a file of the cache folder, which is gone when the last of them is, or the process ends."""

    @cached_property
    def _file(self) -> BinaryIO:
        return tempfile.TemporaryFile(dir=cache_folder())

    def __del__(self) -> None:
        if "_file" in vars(self):
            self._file.close()  # its tensors stay

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a large tensor as one in the file, a small one as it is; StoreError if the file cannot be written."""
        if tensor.nbytes < _LEAST:
            return tensor
        numbers = tensor.contiguous().reshape(-1)
        try:
            start = -(-self._file.seek(0, os.SEEK_END) // _ALIGNED) * _ALIGNED
            self._file.seek(start)
            self._file.write(numbers.view(torch.uint8).numpy().data)
            self._file.flush()
            mapped = np.memmap(self._file, np.uint8, "c", start, (tensor.nbytes,))
        except OSError as error:
            raise StoreError(
                f"The weights do not fit into memory, and cannot be written to {cache_path()} ({told(error)}). Make "
                f"room (two bytes a parameter), or set {CACHE_VARIABLE} to a folder on another disk."
            ) from error
        return torch.from_numpy(mapped.view(np.ndarray)).view(tensor.dtype).reshape(tensor.shape)
