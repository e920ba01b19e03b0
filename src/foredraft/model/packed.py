"""Matrices that a checkpoint holds as packed integers with a scale for each group: GPTQ's, AWQ's, compressed-tensors'.

Reads them as numbers, and as GGUF's blocks, which compiled passes multiply. Does not know the model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from foredraft.errors import UsageError, told
from foredraft.model.gguf.tensors import NUMBERS_AT_ONCE
from foredraft.model.mapped import MappedTensors

_BLOCK = 32  # numbers of a row in a block of GGUF
_BITS = {2, 4, 8}  # of an integer: a byte holds a whole number of them
_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where a word of AWQ's version "gemm" has each of 8 columns
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # by bits: a word of ones
_LEAST_SCALE, _MOST_SCALE = 2.0**-14, 2.0**12
"""Below the first one, float16 has fewer digits; minima, 15 times as large as a scale, end at the second one."""
_PARTS = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point",
    "weight_g_idx", "input_scale", "input_zero_point")  # fmt: skip
"""How the names of a packed matrix's tensors end; the last two would quantise what it is multiplied by."""
ROTATIONS = ("transform_config", "rotation")
"""Settings by which a library also rotates what the matrices are multiplied by."""


class _Matrix(NamedTuple):
    """Number k of row n is `scales[n, g] * (codes[n, k] - zeros[n, g])`, with g = `groups[k]`."""

    bits: int
    stored: tuple[float, ...]  # shape that a tensor with all codes has
    codes: Callable[[], torch.Tensor]  # returns uint8[N, K], below 2**bits
    zeros: torch.Tensor  # int[N, G]
    scales: torch.Tensor  # float[N, G]
    groups: torch.Tensor  # int[K]

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return len(self.scales), len(self.groups)

    @property
    def run(self) -> int:
        """Return how many numbers side by side surely are of one group: a block, or a single one."""
        is_whole = (
            len(self.groups) % _BLOCK == 0 and (self.groups.view(-1, _BLOCK) == self.groups[::_BLOCK, None]).all()
        )
        return _BLOCK if is_whole else 1

    @property
    def form(self) -> str:
        """Return GGUF's format whose blocks hold the matrix, with scales and minima in float16; "" if there is none."""
        sizes = self.scales.abs()
        if ((sizes != 0) & ((sizes < _LEAST_SCALE) | (sizes > _MOST_SCALE))).any() or self.run < _BLOCK:
            return ""
        least, most = -int(self.zeros.max()), (1 << self.bits) - 1 - int(self.zeros.min())
        if least >= -8 and most < 8:
            return "Q4_0"
        return "Q4_1" if self.bits <= 4 else "Q8_0" if least >= -128 and most < 128 else ""

    def scaled(self, form: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales and minima, float32[N, G], as blocks of a format have them; exact ones for no format."""
        scales = self.scales.half().float() if form else self.scales.float()
        minima = -scales * self.zeros
        return scales, minima.half().float() if form == "Q4_1" else minima

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix, [N, K]; in bfloat16 as it is in blocks, if a format has them."""
        form = self.form if dtype == torch.bfloat16 else ""
        (scales, minima), zeros = self.scaled(form), self.zeros.float()
        runs, groups = self.codes().unflatten(1, (-1, self.run)), self.groups[:: self.run]
        numbers = torch.empty(runs.shape, dtype=dtype)
        step = max(1, NUMBERS_AT_ONCE // len(self.groups))
        for some in (slice(start, start + step) for start in range(0, len(runs), step)):
            if form == "Q4_1":
                numbers[some] = scales[some, groups, None] * runs[some] + minima[some, groups, None]
            else:  # one rounding
                numbers[some] = scales[some, groups, None] * (runs[some] - zeros[some, groups, None])
        return numbers.flatten(1)

    def blocks(self) -> torch.Tensor:
        """Return the bytes of the blocks of `form`, uint8[N, bytes of a row]."""
        form, groups = self.form, self.groups[::_BLOCK]
        codes = self.codes().unflatten(1, (-1, _BLOCK))
        halves = [each.half()[:, groups, None].view(torch.uint8) for each in self.scaled(form)]
        if form != "Q4_1":  # without minima, an integer that stands for zero is 8 or 0
            codes = codes.to(torch.int16) - self.zeros[:, groups, None] + (8 if form == "Q4_0" else 0)
            halves, codes = halves[:1], codes.to(torch.int8).view(torch.uint8)
        if form != "Q8_0":
            codes = codes[..., : _BLOCK // 2] | codes[..., _BLOCK // 2 :] << 4
        return torch.cat([*halves, codes], dim=2).flatten(1)


class _Module:
    """The tensors of one matrix, by how their names end; `sizes` are those of groups that settings name."""

    def __init__(self, files: Mapping[str, Any], path: str, sizes: Sequence[int]) -> None:
        self._files, self._path, self.sizes = files, path, sizes

    def __contains__(self, end: str) -> bool:
        return self._path + end in self._files

    def shape(self, end: str) -> tuple[int, ...]:
        shape: list[int] = self._files[self._path + end].get_slice(self._path + end).get_shape()
        return tuple(shape)

    def get(self, end: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[self._path + end].get_tensor(self._path + end)
        return tensor


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers in words, the lowest bits first: uint8[..., W * 32 / bits] of int32[..., W]."""
    if words.dtype != torch.int32:
        raise ValueError(f"words are {words.dtype}")
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    stored = words.reshape(-1).view(torch.uint8).reshape(*words.shape[:-1], -1, 1)
    return ((stored >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _of_gptq(module: _Module, *, less: int) -> _Matrix:
    """Words go down the columns of [K, N]; zero points are stored less one in the first version of the format."""
    words, height = module.shape("qweight")
    scales, zeros = module.get("scales").T, module.get("qzeros")
    bits = 32 * zeros.shape[1] // height
    groups = module.get("g_idx") if "g_idx" in module else _parts(module, scales, 32 * words // bits)
    zeros = _unpacked(zeros + less * _ONES.get(bits, 0), bits)  # with carries, as gptqmodel adds
    stored, zeros = (len(groups) * bits / 32, len(scales)), zeros[:, :height].T
    return _Matrix(bits, stored, lambda: _unpacked(module.get("qweight").T, bits), zeros, scales, groups)


def _of_awq(module: _Module) -> _Matrix:
    """Words go along the rows of [K, N], in an order of their own."""
    (width, words), scales = module.shape("qweight"), module.get("scales").T
    bits = 32 * words // len(scales)

    def ordered(end: str) -> torch.Tensor:
        columns: torch.Tensor = _unpacked(module.get(end), bits).unflatten(1, (-1, len(_ORDER)))[..., _ORDER]
        return columns.flatten(1).T

    stored = (width, len(scales) * bits / 32)
    return _Matrix(bits, stored, lambda: ordered("qweight"), ordered("qzeros"), scales, _parts(module, scales, width))


def _of_words(module: _Module) -> _Matrix:
    """compressed-tensors' `pack-quantized`: words go along the rows, those of zero points down the columns."""
    (height, width), scales = module.get("weight_shape").tolist(), module.get("weight_scale")
    bits = 32 * module.shape("weight_packed")[1] // width
    scales = scales.expand(height, 1) if scales.numel() == 1 else scales
    zeros = torch.tensor(1 << (bits - 1)).expand(scales.shape)
    if "weight_zero_point" in module:
        zeros = _unpacked(module.get("weight_zero_point").T, bits)[:, :height].T
    groups = _parts(module, scales, width)
    if "weight_g_idx" in module and bool(((stored := module.get("weight_g_idx")) >= 0).all()):  # -1: none were made
        groups = stored
    words = (len(scales), -(-len(groups) * bits // 32))
    return _Matrix(bits, words, lambda: _unpacked(module.get("weight_packed"), bits)[:, :width], zeros, scales, groups)


def _of_bytes(module: _Module) -> _Matrix:
    """compressed-tensors' `int-quantized`: integers as they are."""
    (height, width), scales = module.shape("weight"), module.get("weight_scale")
    zeros = torch.tensor(128, dtype=torch.int16).expand(scales.shape)
    if "weight_zero_point" in module:
        zeros = zeros + module.get("weight_zero_point").view(scales.shape)
    if scales.numel() == 1:
        scales, zeros = scales.expand(height, 1), zeros.expand(height, 1)
    groups = _parts(module, scales, width)
    return _Matrix(8, (len(scales), width), lambda: module.get("weight").view(torch.uint8) ^ 128, zeros, scales, groups)


def _parts(module: _Module, scales: torch.Tensor, width: int) -> torch.Tensor:
    """Return the groups, int[K]: of a size that settings name, the last one perhaps smaller, or of equal sizes."""
    equal = width / scales.shape[1]
    named = [size for size in module.sizes if -(-width // size) == scales.shape[1]]
    size = equal if equal in named or not named else named[0]
    if size % 1:
        raise ValueError(f"{width} integers of a row are not {scales.shape[1]} equal groups")
    return torch.arange(width) // int(size)


def _sizes(settings: Mapping[str, Any]) -> Iterator[int]:
    """Yield the sizes of groups that settings name, for all matrices or some."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _sizes(value)
        elif name == "group_size" and isinstance(value, int) and value > 0:
            yield value


class _Format(NamedTuple):
    """How the name of a matrix's integers ends, their type, and the function that reads it."""

    codes: str
    dtype: str  # as safetensors name it
    read: Callable[[_Module], _Matrix]


_FORMATS = {
    "gptq": (_Format("qweight", "I32", partial(_of_gptq, less=1)),),
    "gptq_v2": (_Format("qweight", "I32", partial(_of_gptq, less=0)),),
    "gemm": (_Format("qweight", "I32", _of_awq),),
    "auto_round": (_Format("qweight", "I32", partial(_of_gptq, less=0)),),
    "auto_round:auto_gptq": (_Format("qweight", "I32", partial(_of_gptq, less=1)),),
    "auto_round:auto_awq": (_Format("qweight", "I32", _of_awq),),
    "compressed-tensors": (
        _Format("weight_packed", "I32", _of_words),
        _Format("weight", "I8", _of_bytes),
    ),
}
"""By what `_layout` returns."""
_USUAL = {"gptq": "gptq", "awq": "gemm", "auto-round": "auto_round"}
"""Layouts where none is named, by `quant_method`."""


class PackedTensors:
    """The tensors of a checkpoint with packed matrices, by the names that they have where none is quantised.

    `settings` is its `quantization_config`. Raises UsageError for a matrix whose tensors do not fit together.
    """

    def __init__(self, files: Sequence[Path], settings: Mapping[str, Any]) -> None:
        opened: list[Any] = [safe_open(file, framework="pt") for file in files]
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118  # no dict
        self._packed, self._kept, sizes = dict[str, _Matrix](), MappedTensors(), list(_sizes(settings))
        for name, file in self._files.items():
            for each in _FORMATS[_layout(settings)]:
                path = name.removesuffix(each.codes)
                if path != name and file.get_slice(name).get_dtype() == each.dtype:
                    self._packed[path + "weight"] = _checked(path, each, _Module(self._files, path, sizes))
        parts = {name.removesuffix("weight") + each for name in self._packed for each in _PARTS}
        others = [name for name in self._files if name not in parts and name not in self._packed]
        self.shapes = {name: tuple(self._files[name].get_slice(name).get_shape()) for name in others}
        self.shapes |= {name: matrix.shape for name, matrix in self._packed.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def state(
        self, dtype: torch.dtype, keep: Callable[[torch.Tensor], torch.Tensor], prefixes: tuple[str, ...] = ("",)
    ) -> dict[str, torch.Tensor]:
        """Return the weights whose names begin so, each packed matrix in `dtype` and as `keep` returns it."""
        names = [name for name in self if name.startswith(prefixes)]
        packed = {name: keep(self._packed[name].numbers(dtype)) for name in names if name in self._packed}
        return packed | {name: self._files[name].get_tensor(name) for name in names if name not in packed}

    def is_packed(self, name: str) -> bool:
        """Return whether a tensor is a packed matrix."""
        return name in self._packed

    def bits(self) -> set[int]:
        """Return the bits of the integers of packed matrices."""
        return {matrix.bits for matrix in self._packed.values()}

    def formats(self) -> set[str]:
        """Return the names of GGUF's formats that hold packed matrices, and "" if one fits into none."""
        return {matrix.form for matrix in self._packed.values()}

    def format(self, name: str) -> str:
        """Return the name of GGUF's format whose blocks hold a packed matrix; "" for another tensor."""
        return self._packed[name].form if name in self._packed else ""

    def stored(self, name: str) -> tuple[npt.NDArray[np.uint8], Any]:
        """Return a packed matrix's blocks, uint8[rows, bytes of a row], and its GGMLQuantizationType.

        Large ones lie in a mapped file.
        """
        from gguf import GGMLQuantizationType  # an optional package

        return self._kept.keep(self._packed[name].blocks()).numpy(), GGMLQuantizationType[self.format(name)]


def packed_tensors(files: Sequence[Path], settings: Mapping[str, Any]) -> PackedTensors | None:
    """Return the tensors of a checkpoint with this `quantization_config`; None if its format is not read here.

    Raises UsageError as `PackedTensors` does.
    """
    if _layout(settings) not in _FORMATS or any(map(settings.get, ROTATIONS)):
        return None
    tensors = PackedTensors(files, settings)
    is_whole = tensors.bits() and tensors.bits() <= _BITS and not any(name.endswith(_PARTS) for name in tensors)
    return tensors if is_whole else None


def _layout(settings: Mapping[str, Any]) -> str:
    """Return the name of the layout of packed matrices; gptqmodel writes AWQ's as a kind of GPTQ."""
    kind = str(settings.get("quant_method"))
    named = (settings.get(field) for field in ("packing_format", "checkpoint_format", "format", "version"))
    return str(next(filter(None, named), _USUAL[kind])).lower() if kind in _USUAL else kind


def _checked(path: str, each: _Format, module: _Module) -> _Matrix:
    """Return a matrix whose tensors fit together; UsageError for another."""
    try:
        matrix = each.read(module)
        groups, sizes, shape = matrix.groups, tuple(matrix.scales.shape), module.shape(each.codes)
        fits = matrix.zeros.shape == sizes and matrix.stored == shape and matrix.scales.is_floating_point()
        whole = groups.dtype in (torch.int32, torch.int64) and int(groups.min()) >= 0 and int(groups.max()) < sizes[1]
        if (fits and whole) or matrix.bits not in _BITS:  # these are not read
            return matrix
        why = f"integers {shape}, scales {sizes}, zero points {tuple(matrix.zeros.shape)}, groups {tuple(groups.shape)}"
    except (KeyError, IndexError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        why = told(error)
    raise UsageError(
        f"The matrix {path}weight of this checkpoint cannot be unpacked ({why}). Copy or download it again, or give "
        "the model's GGUF file."
    )
