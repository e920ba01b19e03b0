"""The tensors of a GGUF file or of its parts: mapped from the disk, dequantised by `gguf` when they are read.

Knows how tensors are stored. Does not know which weights they are.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from foredraft.errors import UnsupportedModelError, UsageError
from foredraft.model.gguf.metadata import Place

NUMBERS_AT_ONCE = 2**18
"""Numbers of a tensor that are dequantised at a time: 1 MiB in float32. Of 64 times as many, getting memory takes as
long as the work. Two threads are slower than one, as they wait for each other's (Q4_K on Zen 3: 65 million numbers a
second, one thread 82).
"""
_PLAIN = ("F32", "F16", "I64")  # the last ones, which are ids, only as `stored`


class _Stored(NamedTuple):
    """Where the rows of a tensor lie, and how they are quantised."""

    file: Path
    offset: int  # in bytes
    rows: int
    width: int  # of a row, in bytes
    kind: Any  # a GGMLQuantizationType


class Tensors:
    """The tensors of a file, or of all parts of one, by name; remembers which were used.

    Raises UsageError if a file ends inside a tensor, and UnsupportedModelError for a type that `gguf` does not know.
    """

    def __init__(self, found: Mapping[str, tuple[Path, Place]]) -> None:
        self.shapes = {name: place.shape for name, (_, place) in found.items()}
        self._stored = {name: _stored(name, file, place) for name, (file, place) in found.items()}
        self._used = dict.fromkeys(found, 0)  # rows that were read, each as often as it was
        sizes = {file: file.stat().st_size for file, _ in found.values()}
        for name, stored in self._stored.items():
            if stored.offset + stored.rows * stored.width > sizes[stored.file]:
                raise UsageError(
                    f"{stored.file} is not a complete GGUF file (it ends at byte {sizes[stored.file]}, before the end "
                    f"of the tensor {name}); download it again, or give another one."
                )

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def formats(self) -> set[str]:
        """Return the names of the formats of the matrices, such as "Q4_K"."""
        return {each.kind.name for name, each in self._stored.items() if len(self.shapes[name]) > 1}

    def format(self, name: str) -> str:
        """Return the name of a tensor's format, such as "Q4_K"."""
        kind: str = self._stored[name].kind.name
        return kind

    def stored(self, name: str) -> tuple[npt.NDArray[np.uint8], Any]:
        """Return a tensor's bytes, uint8[rows, bytes of a row], mapped from the file, and its GGMLQuantizationType."""
        stored = self._stored[name]
        mapped = np.memmap(stored.file, np.uint8, "r", stored.offset, (stored.rows, stored.width))
        return mapped.view(np.ndarray), stored.kind  # numpy takes longer to make views of a memmap

    def sample(self, name: str) -> npt.NDArray[np.float32]:
        """Return numbers of a tensor, not counted as used: float32[n <= NUMBERS_AT_ONCE], all or in rows far apart."""
        rows, kind = self.stored(name)
        return _dequantised(rows[:: -(-rows.shape[0] * self.shapes[name][-1] // NUMBERS_AT_ONCE)], kind).flatten()

    def read(self, name: str, dtype: torch.dtype, rows_read: slice = slice(None)) -> torch.Tensor:
        """Return a tensor, or a part of it, rounded to `dtype`; a vector in float32, because arithmetic may follow."""
        self._used[name] += len(range(self.shapes[name][0])[rows_read])
        (rows, kind), shape = self.stored(name), self.shapes[name]
        numbers = torch.empty(len(rows), shape[-1], dtype=torch.float32 if len(shape) == 1 else dtype)
        step = max(1, NUMBERS_AT_ONCE // shape[-1])
        for start in range(0, len(rows), step):
            numbers[start : start + step] = torch.from_numpy(_dequantised(rows[start : start + step], kind))
        return numbers.reshape(shape)[rows_read]

    def unused(self) -> list[str]:
        """Return the names of the tensors that nothing has read, or only in a part, or in parts that overlap."""
        return [name for name, count in self._used.items() if not count or count % self.shapes[name][0]]


def _stored(name: str, file: Path, place: Place) -> _Stored:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants  # an optional package

    kind = {each.value: each for each in GGMLQuantizationType}.get(place.kind)
    if kind is None or (kind.name not in _PLAIN and not hasattr(quants, kind.name)):
        raise UnsupportedModelError(
            f"The tensor {name} of this GGUF file is quantised as {kind.name if kind else place.kind}, which the "
            "package gguf cannot read; give a file with another quantisation, or update it: pip install -U gguf."
        )
    numbers, size = GGML_QUANT_SIZES[kind]
    if not place.shape or not all(place.shape) or place.shape[-1] % numbers:
        raise UsageError(
            f"{file} is damaged: its tensor {name} has the shape {place.shape}, which {kind.name} cannot store; "
            "download it again, or give another one."
        )
    return _Stored(file, place.offset, math.prod(place.shape[:-1]), place.shape[-1] // numbers * size, kind)


def _dequantised(rows: npt.NDArray[np.uint8], kind: Any) -> npt.NDArray[np.float32]:
    from gguf import quants  # an optional package

    found: npt.NDArray[np.float32] = quants.dequantize(rows, kind)
    return found if found.flags.writeable else found.copy()  # torch takes no others
