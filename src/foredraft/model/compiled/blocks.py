"""Quantised weights as compiled forwards read them: integers by blocks of 32, with their scales.

A model that was loaded from a GGUF file has dequantised weights. A compiled pass reads the file's integers instead, a
quarter to half of the bytes; they are found by comparing rows of the model's matrices with rows of the file. Models
that only draft may be rounded to 8 bits here. Uses GGUF's blocks and torch's linear maps. Does not depend on the
kernel's code, or on how it is compiled.
"""

import copy
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from foredraft.model.gguf.files import parts_of

DEPTH = 32
"""Numbers of a row that the kernels multiply together; the formats share a scale among so many or half of them."""
STRIP = 32
"""Columns of a product that the kernel makes together: two tiles."""
LEAST = -8
"""The least integer of 4 bits without minima, as in GGUF's Q4_0; integers are stored as differences from it."""

_TILE = 16  # columns of a tile, and numbers of a vector register
_NIBBLES = 8  # integers of 4 bits in a word of 32
_DTYPES = {4: torch.uint8, 8: torch.int8}  # of blocks, by the bits of an integer: sizes of two layouts are equal


class BlockLayout(NamedTuple):
    """The layout of blocks: bits per integer, numbers that share a scale, and whether they have a minimum too."""

    bits: int
    numbers: int
    minima: bool

    @property
    def size(self) -> int:
        """Bytes of a block of 32 columns."""
        return STRIP * (self.numbers * self.bits // 8 + 2 + 2 * self.minima)


_LAYOUTS = {
    "Q4_0": BlockLayout(4, 32, minima=False),
    **dict.fromkeys(("Q4_1", "Q4_K"), BlockLayout(4, 32, minima=True)),
    **dict.fromkeys(("Q5_0", "Q8_0"), BlockLayout(8, 32, minima=False)),
    **dict.fromkeys(("Q5_1", "Q5_K"), BlockLayout(8, 32, minima=True)),
    "Q6_K": BlockLayout(8, 16, minima=False),
}
_ROUNDED = "rounded_blocks"  # attribute of a linear map that `round_weights` made: its `BlockMatrix`
_ROWS_AT_ONCE = 4096  # of a matrix in memory as float32, 32 MB at 2,048 columns; chosen, a multiple of `STRIP`


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """Rows of a quantised matrix, with B numbers to a scale.

    Number k of row n is `scales[n, k // B] * integers[n, k] + minima[n, k // B]`.
    """

    layout: BlockLayout
    integers: npt.NDArray[np.int8]  # [N, K]; those of 4 bits from 0 where they have minima, else from `LEAST`
    scales: npt.NDArray[np.float32]  # [N, K / B]
    minima: npt.NDArray[np.float32]  # [N, K / B]; all 0 where the layout has none

    def dequantised(self) -> torch.Tensor:
        """Return float32[N, K], as GGUF's own readers have it."""
        blocks = self.integers.reshape(*self.scales.shape, self.layout.numbers)
        values = self.scales[..., None] * blocks
        values += self.minima[..., None]
        return torch.from_numpy(values.reshape(self.integers.shape))


def read_blocks(kind: str, data: npt.NDArray[np.uint8]) -> BlockMatrix:
    """Decode a GGUF tensor, uint8[N, bytes of a row], of a format such as "Q4_1"."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants  # an optional package

    layout, which = _LAYOUTS[kind], GGMLQuantizationType[kind]
    scales, minima = (
        each.reshape(len(data), -1).astype(np.float32)
        for each in _scales(kind, data.reshape(-1, GGML_QUANT_SIZES[which][1]))
    )
    values = quants.dequantize(data, which).reshape(*scales.shape, layout.numbers)
    values -= minima[..., None]
    values /= np.where(scales == 0, 1, scales)[..., None]
    return BlockMatrix(layout, np.rint(values, out=values).astype(np.int8).reshape(len(data), -1), scales, minima)


def _scales(kind: str, blocks: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the scales and the minima of GGUF's blocks, uint8[M, bytes of a block], in the order of their numbers."""
    from gguf import quants  # an optional package

    def half(place: int) -> npt.NDArray[np.float32]:
        return np.ascontiguousarray(blocks[:, place : place + 2]).view(np.float16).astype(np.float32)

    if kind == "Q6_K":
        scales = half(208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    elif kind in ("Q4_K", "Q5_K"):
        of_scale, of_minimum = quants.Q4_K.get_scale_min(blocks[:, 4:16])
        return half(0) * of_scale, -half(2) * of_minimum
    else:
        scales = half(0)
    return scales, half(2) if kind in ("Q4_1", "Q5_1") else np.zeros_like(scales)


def rounded_blocks(weight: torch.Tensor) -> BlockMatrix:
    """Round a matrix, float[N, K] with K a multiple of 32, to 8 bits as GGUF's Q8_0 does."""
    blocks = weight.detach().float().unflatten(1, (-1, DEPTH))
    scales = blocks.abs().amax(dim=-1) / 127
    integers = (blocks / torch.where(scales == 0, 1.0, scales)[..., None]).round().to(torch.int8)
    kept = scales.to(torch.float16).float().numpy()
    return BlockMatrix(_LAYOUTS["Q8_0"], integers.flatten(1).numpy(), kept, np.zeros_like(kept))


def _is_product(layer: nn.Module) -> bool:
    """Return whether a layer multiplies by its weight and does nothing else, as subclasses may."""
    return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward


@torch.no_grad()
def round_weights(model: Any, kept: Set[int] = frozenset()) -> None:
    """Round a model's matrices in bfloat16 to 8 bits.

    Linear maps are replaced, as they may be shared with another model. Those whose weights' addresses are among `kept`
    stay as they are.
    """
    for name, layer in list(model.named_modules()):
        if not _is_product(layer) or layer.weight.dtype != torch.bfloat16:
            continue
        fits = not (layer.weight.shape[0] % STRIP or layer.weight.shape[1] % DEPTH)
        if fits and layer.weight.data_ptr() not in kept:
            own, matrix = copy.copy(layer), rounded_blocks(layer.weight)
            weight = nn.Parameter(matrix.dequantised().to(layer.weight.dtype), requires_grad=False)
            vars(own).update({"_parameters": {**vars(layer)["_parameters"], "weight": weight}, _ROUNDED: matrix})
            model.set_submodule(name, own)


class QuantisedRows:
    """The quantised rows of a GGUF file, found by their dequantised numbers; few of them are in memory at a time.

    Of a split file, `file` is any part. `dtype` is of the dequantised rows. Without a file there are none.
    """

    def __init__(self, file: Path | None, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._tensors: list[Any] = []
        self._places: dict[int, tuple[int, int]] = {}  # by a row's hash: its tensor, and its number there
        if file is None:
            return
        from gguf import GGUFReader, quants  # an optional package

        for tensor in (each for part in parts_of(file) for each in GGUFReader(part).tensors):
            if tensor.tensor_type.name not in _LAYOUTS or tensor.data.ndim != 2:
                continue
            for start in range(0, len(tensor.data), _ROWS_AT_ONCE):
                rows = quants.dequantize(tensor.data[start : start + _ROWS_AT_ONCE], tensor.tensor_type)
                hashes = _row_hashes(torch.from_numpy(rows).to(dtype))
                self._places |= {row: (len(self._tensors), number) for number, row in enumerate(hashes, start)}
            self._tensors.append(tensor)

    def packed(self, weight: torch.Tensor, *, tiled: bool) -> torch.Tensor | None:
        """Return the blocks of a matrix as `packed_blocks` does; None unless the file has exactly its rows."""
        if not self._places or weight.dtype != self._dtype or weight.shape[0] % STRIP or weight.shape[1] % DEPTH:
            return None
        packed = []
        for some in weight.detach().split(_ROWS_AT_ONCE):
            places = [self._places.get(row) for row in _row_hashes(some)]
            tensors = {place[0] for place in places if place is not None}
            if None in places or len(tensors) != 1:
                return None
            tensor = self._tensors[tensors.pop()]
            matrix = read_blocks(tensor.tensor_type.name, tensor.data[[place[1] for place in places if place]])
            if not torch.equal(matrix.dequantised().to(weight.dtype), some):
                return None
            packed.append(packed_blocks(matrix, tiled=tiled))
        return torch.cat(packed) if len({(blocks.dtype, blocks.shape[1:]) for blocks in packed}) == 1 else None


def _row_hashes(matrix: torch.Tensor) -> list[int]:
    without_signed_zeros = matrix.detach().contiguous() + 0.0  # 0 times a negative scale is -0
    return [hash(row.tobytes()) for row in without_signed_zeros.view(torch.uint8).numpy()]


def packed_blocks(matrix: BlockMatrix, *, tiled: bool) -> torch.Tensor:
    """Arrange a matrix of N rows, a multiple of 32, as the kernel reads it.

    `tiled` says whether the kernel multiplies by tiles. Returns uint8 for 4 bits or int8 for 8, [N / 32, K / numbers,
    size]: for 32 columns and the numbers that share a scale the integers, first those of 16 columns, then float16[32]
    scales, and where the layout has minima float16[32] of those.
    """
    layout, count = matrix.layout, len(matrix.integers)
    strips, blocks = count // STRIP, matrix.scales.shape[1]
    tiles = matrix.integers.reshape(strips, 2, _TILE, blocks, layout.numbers).transpose(0, 3, 1, 2, 4)
    vectors = tiles.reshape(strips, blocks, 2, -1)[..., _order(layout, tiled=tiled)].view(np.uint8)
    if layout.bits == 4:
        if not layout.minima:
            vectors = vectors - np.uint8(LEAST % 256)
        words = vectors.reshape(strips, blocks, 2, -1, _NIBBLES, _TILE).astype(np.uint32)
        shifts = 4 * np.arange(_NIBBLES, dtype=np.uint32)[:, None]
        vectors = np.ascontiguousarray(np.bitwise_or.reduce(words << shifts, axis=-2)).view(np.uint8)
    parts = [vectors.reshape(strips, blocks, -1)]
    for each in (matrix.scales, matrix.minima)[: 1 + layout.minima]:
        by_strip = np.ascontiguousarray(each.astype(np.float16).reshape(strips, STRIP, blocks).transpose(0, 2, 1))
        parts.append(by_strip.view(np.uint8))
    return torch.from_numpy(np.concatenate(parts, axis=-1)).view(_DTYPES[layout.bits])


def layout_of(size: int, dtype: torch.dtype) -> BlockLayout:
    """Return the layout by the last dimension and the dtype of what `packed_blocks` makes."""
    return next(each for each in _LAYOUTS.values() if each.size == size and _DTYPES[each.bits] == dtype)


def _order(layout: BlockLayout, *, tiled: bool) -> npt.NDArray[np.int64]:
    """Return int64[numbers, 16]: for each register of a tile's numbers their places in [16 columns, numbers].

    Kernels multiply pairs of numbers. Those of 8 bits, or for tiles, lie beside each other in a register; others of 4
    bits in the halves of a word of 8.
    """
    vector, lane = np.arange(layout.numbers)[:, None], np.arange(_TILE)[None]
    if tiled or layout.bits == 8:
        column, number = _TILE // 2 * (vector % 2) + lane // 2, vector // 2 * 2 + lane % 2
    else:
        half = _NIBBLES // 2
        column, number = lane + 0 * vector, vector // _NIBBLES * _NIBBLES + 2 * (vector % half) + vector // half % 2
    return column * layout.numbers + number


# Only compiled code multiplies: rows bfloat16[..., K] by N columns that `packed_blocks` laid out. Sums are in float32;
# returned are float32[..., N] where they are asked for as they are, `precise`, else bfloat16[..., N].
torch.library.define("foredraft::multiply_blocks", "(Tensor rows, Tensor blocks, bool tiled, bool precise) -> Tensor")
torch.library.register_fake(
    "foredraft::multiply_blocks",
    lambda rows, blocks, _tiled, precise: rows.new_empty(
        *rows.shape[:-1], blocks.shape[0] * STRIP, dtype=torch.float32 if precise else rows.dtype
    ),
)


class BlockLinear(nn.Module):
    """A linear map by quantised weights, `tiled` or not as `packed_blocks` made them, with a bias, float[N] or None.

    Its result is bfloat16, or float32 like the sums if `precise`. Its forward can be traced and compiled, not run.
    """

    def __init__(self, blocks: torch.Tensor, bias: torch.Tensor | None, *, tiled: bool, precise: bool) -> None:
        super().__init__()
        self.register_buffer("blocks", blocks)
        self.bias, self._tiled, self._precise = bias, tiled, precise

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.foredraft.multiply_blocks(rows, self.blocks, self._tiled, self._precise)
        return product if self.bias is None else product + self.bias


def product_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights that a model multiplies by, quantised or not."""
    quantised = [layer.get_buffer("blocks") for layer in model.modules() if isinstance(layer, BlockLinear)]
    return sum(each.nbytes for each in (*quantised, *(m.weight for m in model.modules() if isinstance(m, nn.Linear))))


@contextmanager
def quantised_weights(model: Any, rows: QuantisedRows, *, tiled: bool) -> Iterator[int]:
    """Make a model multiply by quantised weights, a file's or those of `round_weights`, until the block ends.

    Its LM head returns float32. Yields the number of linear maps that do.
    """
    theirs: dict[str, nn.Linear] = {}
    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if not _is_product(layer):
            continue
        matrix = getattr(layer, _ROUNDED, None)
        blocks = rows.packed(layer.weight, tiled=tiled) if matrix is None else packed_blocks(matrix, tiled=tiled)
        if blocks is not None:
            theirs[name] = layer
            model.set_submodule(name, BlockLinear(blocks, layer.bias, tiled=tiled, precise=layer is head))
    try:
        yield len(theirs)
    finally:
        for name, layer in theirs.items():
            model.set_submodule(name, layer)
