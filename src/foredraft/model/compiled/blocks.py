"""Quantised weights as compiled forwards read them: integers by blocks of 32, with their scales.

A model that was loaded from a GGUF file, or a checkpoint of packed matrices, has dequantised weights. Stored integers
are found by comparing rows of the model's matrices with rows of the file. Uses GGUF's blocks. Does not depend on a
model's layers or the kernel's code.
"""

import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from foredraft.model.gguf.files import parts_of, quantised_file
from foredraft.model.gguf.reader import opened
from foredraft.model.gguf.tensors import NUMBERS_AT_ONCE, Tensors
from foredraft.model.machine import multiplies_integers
from foredraft.model.mapped import MappedTensors
from foredraft.model.packed import PackedTensors
from foredraft.model.quantised import packed_weights

DEPTH = 32
"""Numbers of a row that become integers with one scale; a weight's block has so many numbers, or half of them."""
STRIP = 16
"""Columns of a product that the kernel makes together."""

_LEAST = {4: -8, 8: -128}  # the integer that is stored as 0, by its bits; with minima it is 0
GROUP = 4  # numbers of a column that one instruction multiplies, side by side in a vector register
_DTYPES = {4: torch.uint8, 8: torch.int8}  # of blocks, by the bits of an integer: sizes of two layouts are equal


class BlockLayout(NamedTuple):
    """The layout of blocks: bits per integer, numbers that share a scale, and whether they have a minimum too."""

    bits: int
    numbers: int
    minima: bool

    @property
    def size(self) -> int:
        """Bytes of a block of one strip of columns."""
        return STRIP * (self.numbers * self.bits // 8 + 2 + 2 * self.minima)

    @property
    def least(self) -> int:
        """The integer that is stored as 0."""
        return 0 if self.minima else _LEAST[self.bits]


class BlockFormat(NamedTuple):
    """A format of GGUF: its layout here, and what its bytes are in a block, as gguf.quants reads them.

    With the bytes `first` to before `last` set to `byte`, every integer is 1. Formats with a minimum have its scale in
    16 bits at `minimum`.
    """

    layout: BlockLayout
    ones: tuple[tuple[int, int, int], ...]  # first, last, byte
    minimum: int | None = None


FORMATS = {
    "Q4_0": BlockFormat(BlockLayout(4, 32, minima=False), ((2, 18, 0x99),)),
    "Q4_1": BlockFormat(BlockLayout(4, 32, minima=True), ((4, 20, 0x11),), 2),
    "Q5_0": BlockFormat(BlockLayout(8, 32, minima=False), ((2, 6, 0xFF), (6, 22, 0x11))),
    "Q5_1": BlockFormat(BlockLayout(8, 32, minima=True), ((4, 8, 0), (8, 24, 0x11)), 2),
    "Q8_0": BlockFormat(BlockLayout(8, 32, minima=False), ((2, 34, 1),)),
    "Q2_K": BlockFormat(BlockLayout(4, 16, minima=True), ((16, 80, 0x55),), 82),
    "Q3_K": BlockFormat(BlockLayout(4, 16, minima=False), ((0, 32, 0xFF), (32, 96, 0x55))),
    "Q4_K": BlockFormat(BlockLayout(4, 32, minima=True), ((16, 144, 0x11),), 2),
    "Q5_K": BlockFormat(BlockLayout(8, 32, minima=True), ((16, 48, 0), (48, 176, 0x11)), 2),
    "Q6_K": BlockFormat(BlockLayout(8, 16, minima=False), ((0, 128, 0x11), (128, 192, 0xAA))),
    "IQ4_NL": BlockFormat(BlockLayout(8, 32, minima=False), ((2, 18, 0x88),)),
    "IQ4_XS": BlockFormat(BlockLayout(8, 32, minima=False), ((8, 136, 0x88),)),
    "MXFP4": BlockFormat(BlockLayout(8, 32, minima=False), ((1, 17, 0x11),)),
}


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """Rows of a quantised matrix, with B numbers to a scale.

    Number k of row n is `scales[n, k // B] * integers[n, k] + minima[n, k // B]`.
    """

    layout: BlockLayout
    integers: npt.NDArray[np.int8]  # [N, K]
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

    (layout, ones, minimum), which = FORMATS[kind], GGMLQuantizationType[kind]

    def numbers_of(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        return quants.dequantize(blocks.reshape(data.shape), which).reshape(len(data), -1, layout.numbers)

    of_ones = data.reshape(-1, GGML_QUANT_SIZES[which][1]).copy()
    of_zeros = of_ones.copy()
    for first, last, byte in ones:
        of_ones[:, first:last], of_zeros[:, first:last] = byte, 0
    values = numbers_of(data)
    minima = np.zeros(values.shape[:2], np.float32)
    if minimum is not None:
        of_ones[:, minimum : minimum + 2] = 0
        minima = numbers_of(of_zeros)[..., 0]
    scales = numbers_of(of_ones)[..., 0]
    values -= minima[..., None]
    values /= np.where(scales == 0, 1, scales)[..., None]
    return BlockMatrix(layout, np.rint(values, out=values).astype(np.int8).reshape(len(data), -1), scales, minima)


def rounded_blocks(weight: torch.Tensor) -> BlockMatrix:
    """Round a matrix, float[N, K] with K a multiple of 32, to 8 bits as GGUF's Q8_0 does."""
    blocks = weight.detach().float().unflatten(1, (-1, DEPTH))
    scales = blocks.abs().amax(dim=-1) / 127
    integers = (blocks / torch.where(scales == 0, 1.0, scales)[..., None]).round().to(torch.int8)
    kept = scales.to(torch.float16).float().numpy()
    return BlockMatrix(FORMATS["Q8_0"].layout, integers.flatten(1).numpy(), kept, np.zeros_like(kept))


def packed_bytes(tensors: Tensors | PackedTensors) -> int:
    """Return the bytes of a file's weights in a package: integers as `packed_blocks` has them, others bfloat16."""
    size = 0.0
    for name, shape in tensors.shapes.items():
        found = _format_of(tensors, name)
        layout = FORMATS[found].layout if found else None
        size += math.prod(shape) * (layout.size / (STRIP * layout.numbers) if layout else 2)
    return int(size)


def stored_integers(model: Any) -> Tensors | PackedTensors | None:
    """Return the file or checkpoint whose integers compiled passes of a model multiply; None if they multiply none."""
    if model.dtype != torch.bfloat16 or not multiplies_integers():
        return None
    if (file := quantised_file(model)) is not None:
        return opened(parts_of(file))[1]
    is_folder = find_spec("gguf") is not None and Path(model.name_or_path, "config.json").is_file()
    return packed_weights(model.name_or_path) if is_folder else None


def stored_formats(tensors: Tensors | PackedTensors) -> list[str]:
    """Return which of `FORMATS` a file's matrices have, by name."""
    return sorted(FORMATS.keys() & tensors.formats())


def _format_of(tensors: Tensors | PackedTensors, name: str) -> str | None:
    """Return the name, of `FORMATS`, of a matrix's format; None for a vector or another format."""
    kind = tensors.format(name)
    return kind if kind in FORMATS and len(tensors.shapes[name]) > 1 else None


class QuantisedRows:
    """The quantised rows of a file, found by their dequantised numbers; few of them are in memory at a time.

    `dtype` is of the dequantised rows. Without tensors there are none.
    """

    def __init__(self, tensors: Tensors | PackedTensors | None, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._tensors: list[tuple[npt.NDArray[np.uint8], Any]] = []  # rows of bytes, and their type
        hashes = [np.empty(0, np.int64)]
        if tensors is not None:
            from gguf import quants  # an optional package

            for name in tensors:
                if _format_of(tensors, name) is None:
                    continue
                stored, kind = tensors.stored(name)
                step = _rows_at_once(tensors.shapes[name][-1])
                for start in range(0, len(stored), step):
                    rows = quants.dequantize(stored[start : start + step], kind)
                    hashes.append(_row_hashes(torch.from_numpy(rows).to(dtype)) ^ hash(FORMATS[kind.name].layout))
                self._tensors.append((stored, kind))
        self._starts = np.cumsum([0, *(len(stored) for stored, _ in self._tensors)])  # of tensors, among all rows
        together = np.concatenate(hashes)
        self._order = np.argsort(together, kind="stable")
        self._hashes = together[self._order]
        self._kept = MappedTensors()

    def packed(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the blocks of a matrix as `packed_blocks` does; None unless the file has exactly its rows.

        Those of several matrices, float[E, N, K] with N a multiple of 16, have a first dimension for these. Large ones
        lie in a mapped file.
        """
        if weight.ndim == 3:
            found = [None if weight.shape[1] % STRIP else self._packed(each) for each in weight]
            packed = [each for each in found if each is not None]
            alike = len({(each.dtype, each.shape[1:]) for each in packed}) == 1
            blocks = torch.stack(packed) if len(packed) == len(found) and alike else None
        else:
            blocks = self._packed(weight)
        return None if blocks is None else self._kept.keep(blocks)

    def _packed(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the blocks of one matrix, all in one layout: rows of zeros may be in the file in others too."""
        if weight.dtype != self._dtype or weight.shape[1] % DEPTH:
            return None
        hashed = [(some, _row_hashes(some)) for some in weight.detach().split(_rows_at_once(weight.shape[1]))]
        layouts = dict.fromkeys(FORMATS[kind.name].layout for _, kind in self._tensors)
        packed = (self._packed_as(layout, hashed) for layout in layouts)
        return next((each for each in packed if each is not None), None)

    def _packed_as(
        self, layout: BlockLayout, hashed: list[tuple[torch.Tensor, npt.NDArray[np.int64]]]
    ) -> torch.Tensor | None:
        """Return the blocks of the rows of one matrix in a layout; None if the file has not all of them in it."""
        packed = []
        for some, hashes in hashed:
            matrix = self._found(hashes ^ hash(layout), layout)
            if matrix is None or not torch.equal(matrix.dequantised().to(some.dtype), some):
                return None
            packed.append(packed_blocks(matrix))
        return torch.cat(packed)

    def _found(self, hashes: npt.NDArray[np.int64], layout: BlockLayout) -> BlockMatrix | None:
        """Return the rows with these hashes, int64[R], of themselves and the layout; None if one is missing."""
        places = np.searchsorted(self._hashes, hashes).clip(max=len(self._hashes) - 1)
        if not np.array_equal(self._hashes[places], hashes):
            return None
        rows = self._order[places]
        tensors = np.searchsorted(self._starts, rows, side="right") - 1
        parts = []
        for number in np.unique(tensors):
            stored, kind = self._tensors[number]
            parts.append(read_blocks(kind.name, stored[rows[tensors == number] - self._starts[number]]))
        order = np.argsort(np.argsort(tensors, kind="stable"))  # where a row is when those of a tensor stand together
        fields = ([getattr(part, name) for part in parts] for name in ("integers", "scales", "minima"))
        return BlockMatrix(layout, *(np.concatenate(field)[order] for field in fields))


def _rows_at_once(width: int) -> int:
    """Return how many rows of a matrix are dequantised together, in strips."""
    return max(STRIP, NUMBERS_AT_ONCE // width // STRIP * STRIP)


def _row_hashes(matrix: torch.Tensor) -> npt.NDArray[np.int64]:
    without_signed_zeros = matrix.detach().contiguous() + 0.0  # 0 times a negative scale is -0
    return np.array([hash(row.tobytes()) for row in without_signed_zeros.view(torch.uint8).numpy()], np.int64)


def packed_blocks(matrix: BlockMatrix) -> torch.Tensor:
    """Arrange a matrix of N rows as the kernel reads it; zeros fill the last strip up.

    Returns uint8 for 4 bits or int8 for 8, [N / 16, K / numbers, size]: for each strip of 16 columns its integers less
    the least one, four of each column side by side, those of 4 bits in the lower halves of bytes and the next in the
    upper ones; then for each block float16[16] scales, and where the layout has minima float16[16] of those.
    """
    layout, fill = matrix.layout, ((0, -len(matrix.integers) % STRIP), (0, 0))
    stored = np.pad((matrix.integers.astype(np.int16) - layout.least).astype(np.uint8), fill)
    strips = len(stored) // STRIP
    groups = stored.reshape(strips, STRIP, -1, GROUP).swapaxes(1, 2)
    if layout.bits == 4:
        groups = groups[:, ::2] | np.left_shift(groups[:, 1::2], 4, dtype=np.uint8)
    kept = [np.pad(each, fill) for each in (matrix.scales, matrix.minima)[: 1 + layout.minima]]
    halves = np.stack([each.astype(np.float16).reshape(strips, STRIP, -1) for each in kept]).transpose(1, 3, 0, 2)
    parts = [groups.reshape(strips, -1), np.ascontiguousarray(halves).view(np.uint8).reshape(strips, -1)]
    return torch.from_numpy(np.concatenate(parts, axis=1).reshape(strips, -1, layout.size)).view(_DTYPES[layout.bits])


def layout_of(size: int, dtype: torch.dtype) -> BlockLayout:
    """Return the layout by the last dimension and the dtype of what `packed_blocks` makes."""
    layouts = (each.layout for each in FORMATS.values())
    return next(each for each in layouts if each.size == size and _DTYPES[each.bits] == dtype)
