"""Weights that a GGUF file quantised, as compiled forwards read them: integers by blocks of 32, with their scales.

A model that was loaded from a GGUF file has dequantised weights. A compiled pass reads the file's integers in their
place, a quarter to a half of the bytes, and widens them to the same numbers in registers. Which weights these are is
found by comparing rows of the model's matrices with rows of the file. Knows GGUF's blocks and torch's linear maps. Does
not know the kernel's code, or who compiles.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.library import custom_op

DEPTH = 32
"""Numbers of a row that share a scale, in GGUF's formats Q4_0, Q4_1 and Q8_0."""
STRIP = 32
"""Columns of a product that the kernel makes together: two tiles."""

_TILE = 16  # columns of a tile, and numbers of a vector register
_NIBBLES = 8  # integers of 4 bits in a word of 32
_FORMATS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # bits of an integer
_LEAST_Q4_0 = -8  # what Q4_0's integers are counted from


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """Rows of a quantised matrix: number k of row n is `scales[n, k // 32] * integers[n, k] + minima[n, k // 32]`.

    Attributes:
        bits: of an integer: 4, from 0, or 8, from -128.
        integers: int8[N, K].
        scales: float16[N, K / 32].
        minima: float16[N, K / 32]; all 0 where there are 8 bits.
    """

    bits: int
    integers: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float16]
    minima: npt.NDArray[np.float16]

    def dequantised(self) -> torch.Tensor:
        """Return float32[N, K], as GGUF's own readers have it."""
        scales, minima = (each.astype(np.float32)[:, :, None] for each in (self.scales, self.minima))
        blocks = self.integers.reshape(len(self.integers), -1, DEPTH)
        return torch.from_numpy((scales * blocks + minima).reshape(self.integers.shape))

    def rows(self, chosen: npt.NDArray[np.int64]) -> "BlockMatrix":
        """Return the matrix of these rows, in this order."""
        return BlockMatrix(self.bits, self.integers[chosen], self.scales[chosen], self.minima[chosen])


def read_blocks(kind: str, data: npt.NDArray[np.uint8]) -> BlockMatrix | None:
    """Take a GGUF tensor apart.

    Args:
        kind: the name of its format, such as "Q4_1".
        data: uint8[N, bytes of a row].

    Returns:
        Its rows; None for formats that the kernel does not read.
    """
    bits = _FORMATS.get(kind)
    if bits is None:
        return None
    has_minima = kind == "Q4_1"
    blocks = data.reshape(len(data), -1, (2 + 2 * has_minima) + DEPTH * bits // 8)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    packed = blocks[..., 2 + 2 * has_minima :]
    if bits == 8:
        return BlockMatrix(bits, packed.view(np.int8).reshape(len(data), -1), scales, np.zeros_like(scales))
    if has_minima:
        minima = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0]
    else:
        minima = scales * np.float16(_LEAST_Q4_0)
    integers = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8)
    return BlockMatrix(bits, integers.reshape(len(data), -1), scales, minima)


class QuantisedRows:
    """The quantised rows of a GGUF file, found by what they are dequantised to.

    Args:
        file: the GGUF file.
        dtype: of the dequantised rows.
    """

    def __init__(self, file: Path, dtype: torch.dtype) -> None:
        from gguf import GGUFReader  # an optional package

        self._dtype = dtype
        self._matrices: list[BlockMatrix] = []
        self._places: dict[int, tuple[int, int]] = {}  # by a row's hash: its matrix, and its number there
        for tensor in GGUFReader(file).tensors:
            matrix = read_blocks(tensor.tensor_type.name, tensor.data) if tensor.data.ndim == 2 else None
            if matrix is not None:
                hashes = _row_hashes(matrix.dequantised().to(dtype))
                self._places |= {row: (len(self._matrices), number) for number, row in enumerate(hashes)}
                self._matrices.append(matrix)

    def of(self, weight: torch.Tensor) -> BlockMatrix | None:
        """Return a matrix of the file with exactly the rows of `weight`, in its order; None where there is none."""
        if weight.dtype != self._dtype or weight.shape[0] % STRIP or weight.shape[1] % DEPTH:
            return None
        places = [self._places.get(row) for row in _row_hashes(weight)]
        numbers = {place[0] for place in places if place is not None}
        if None in places or len(numbers) != 1:
            return None
        found = self._matrices[numbers.pop()].rows(np.array([place[1] for place in places if place is not None]))
        return found if torch.equal(found.dequantised().to(weight.dtype), weight) else None


def _row_hashes(matrix: torch.Tensor) -> list[int]:
    without_signed_zeros = matrix.detach().contiguous() + 0.0  # 0 times a negative scale is -0
    return [hash(row.tobytes()) for row in without_signed_zeros.view(torch.uint8).numpy()]


def packed_blocks(matrix: BlockMatrix, *, widened: bool) -> torch.Tensor:
    """Lay a matrix out as the kernel reads it.

    Args:
        matrix: `N` rows, a multiple of 32.
        widened: whether the kernel widens the integers to bfloat16, or multiplies them as they are.

    Returns:
        uint8[N / 32, K / 32, B]: for 32 columns and 32 numbers of each the integers, first those of 16 columns, then
        float16[32] scales, and with 4 bits float16[32] minima.
    """
    count, depth = matrix.integers.shape
    strips, blocks = count // STRIP, depth // DEPTH
    tiles = matrix.integers.reshape(strips, 2, _TILE, blocks, DEPTH).transpose(0, 3, 1, 2, 4)
    order = _order(matrix.bits, widened=widened)
    vectors = tiles.reshape(strips, blocks, 2, -1)[..., order].view(np.uint8)  # [.., 2, 32, 16]
    if matrix.bits == 4:
        words = vectors.reshape(strips, blocks, 2, -1, _NIBBLES, _TILE).astype(np.uint32)
        shifts = 4 * np.arange(_NIBBLES, dtype=np.uint32)[:, None]
        vectors = np.ascontiguousarray(np.bitwise_or.reduce(words << shifts, axis=-2)).view(np.uint8)
    parts = [vectors.reshape(strips, blocks, -1)]
    for each in (matrix.scales, matrix.minima)[: 1 if matrix.bits == 8 else 2]:
        by_strip = np.ascontiguousarray(each.reshape(strips, STRIP, blocks).transpose(0, 2, 1))
        parts.append(by_strip.view(np.uint8))
    return torch.from_numpy(np.concatenate(parts, axis=-1))


def bits_of(size: int) -> int:
    """Return the bits of an integer by the last dimension of what `packed_blocks` makes."""
    return 8 if size > STRIP * DEPTH else 4


def _order(bits: int, *, widened: bool) -> npt.NDArray[np.int64]:
    """Return int64[32, 16]: for each register of a tile's numbers their places in [16 columns, 32 numbers].

    Kernels multiply pairs of numbers. Those of 8 bits, or widened, lie beside each other in a register; those of 4 bits
    that stay integers in the halves of a word of 8.
    """
    vector, lane = np.arange(DEPTH)[:, None], np.arange(_TILE)[None]
    if widened or bits == 8:
        column, number = _TILE // 2 * (vector % 2) + lane // 2, vector // 2 * 2 + lane % 2
    else:
        half = _NIBBLES // 2
        column, number = lane + 0 * vector, vector // _NIBBLES * _NIBBLES + 2 * (vector % half) + vector // half % 2
    return column * DEPTH + number


def unpacked_blocks(blocks: torch.Tensor, *, widened: bool) -> torch.Tensor:
    """Return float32[N, K], the numbers of what `packed_blocks` made."""
    strips, count, size = blocks.shape
    bits = bits_of(size)
    size = STRIP * DEPTH * bits // 8
    packed = blocks[..., :size].contiguous().numpy()
    if bits == 8:
        vectors = packed.view(np.int8).astype(np.float32)
    else:
        words = packed.view(np.uint32).reshape(strips, count, 2, -1, 1, _TILE)
        vectors = (words >> (4 * np.arange(_NIBBLES, dtype=np.uint32)[:, None]) & 15).astype(np.float32)
    tiles = np.empty((strips, count, 2, _TILE * DEPTH), np.float32)
    tiles[..., _order(bits, widened=widened).ravel()] = vectors.reshape(tiles.shape)
    scales = blocks[..., size:].contiguous().numpy().view(np.float16).astype(np.float32).reshape(strips, count, -1, 32)
    numbers = tiles.reshape(strips, count, STRIP, DEPTH) * scales[:, :, 0, :, None]
    if bits != 8:
        numbers += scales[:, :, 1, :, None]
    return torch.from_numpy(np.ascontiguousarray(numbers.transpose(0, 2, 1, 3)).reshape(strips * STRIP, count * DEPTH))


@custom_op("foredraft::multiply_blocks", mutates_args=())
def multiply_blocks(rows: torch.Tensor, blocks: torch.Tensor, widened: bool) -> torch.Tensor:
    """Multiply rows by quantised weights: what runs where nothing is compiled, and what the kernel is tested by.

    Args:
        rows: bfloat16[..., K].
        blocks: as `packed_blocks` makes them, of N columns.
        widened: as it was told.

    Returns:
        bfloat16[..., N]; sums are in float32.
    """
    return nn.functional.linear(rows.float(), unpacked_blocks(blocks, widened=widened)).to(rows.dtype)


@multiply_blocks.register_fake
def _(rows: torch.Tensor, blocks: torch.Tensor, _widened: bool) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], blocks.shape[0] * STRIP)


class BlockLinear(nn.Module):
    """A linear map by quantised weights.

    Args:
        blocks: as `packed_blocks` makes them.
        bias: float[N] or None.
        widened: how they were packed.
    """

    def __init__(self, blocks: torch.Tensor, bias: torch.Tensor | None, *, widened: bool) -> None:
        super().__init__()
        self.register_buffer("blocks", blocks)
        self.bias, self._widened = bias, widened

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return bfloat16[..., N]."""
        product: torch.Tensor = multiply_blocks(rows, self.blocks, self._widened)
        return product if self.bias is None else product + self.bias


@contextmanager
def quantised_weights(model: nn.Module, rows: QuantisedRows, *, widened: bool) -> Iterator[int]:
    """Have a model multiply by a file's quantised weights, where it has them, until the block ends.

    What is yielded is how many linear maps do.
    """
    theirs: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and (matrix := rows.of(layer.weight)) is not None:
                theirs.append((parent, name, layer))
                setattr(parent, name, BlockLinear(packed_blocks(matrix, widened=widened), layer.bias, widened=widened))
    try:
        yield len(theirs)
    finally:
        for parent, name, layer in theirs:
            setattr(parent, name, layer)
