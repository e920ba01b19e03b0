"""A model's linear maps, embeddings and experts by quantised weights, while its forward is compiled.

A compiled pass reads a GGUF file's integers, a quarter to half of the bytes. Models that only draft may be rounded to 8
bits here. Uses torch's modules. Does not depend on the kernel's code, or on how it is compiled.
"""

import copy
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from foredraft.model.compiled.blocks import (
    DEPTH,
    GROUP,
    STRIP,
    QuantisedRows,
    layout_of,
    packed_blocks,
    rounded_blocks,
)
from foredraft.model.compiled.experts import BLOCKS, by_rows, expert_matrices

_ROUNDED = "rounded_blocks"  # attribute of a linear map that `round_weights` made: its `BlockMatrix`


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
        if layer.weight.shape[1] % DEPTH == 0 and layer.weight.data_ptr() not in kept:
            own, matrix = copy.copy(layer), rounded_blocks(layer.weight)
            weight = nn.Parameter(matrix.dequantised().to(layer.weight.dtype), requires_grad=False)
            vars(own).update({"_parameters": {**vars(layer)["_parameters"], "weight": weight}, _ROUNDED: matrix})
            model.set_submodule(name, own)


GATES = {
    "silu": "gate * share_of(gate)",
    "gelu_tanh": "gate * share_of(1.5957691216057308f * (gate + 0.044715f * gate * gate * gate))",
}
"""Functions of `gate` by name, as the kernels compute them. The approximation of GELU, with twice the square root of
2 / pi and a fitted number, is that of Hendrycks and Gimpel (2016), section 2: 1 + tanh(x) = 2 / (1 + e^-2x)."""

# Only compiled code multiplies: rows bfloat16[..., K], rounded to integers by blocks, by N columns that `packed_blocks`
# laid out. Sums are in float32, and returned so if `precise`, else as bfloat16, [..., N]. With a gate of `GATES`, the
# strips of columns that gates are made of take turns with those of what they scale, and [..., N / 2] is returned.
torch.library.define("foredraft::multiply_blocks", "(Tensor rows, Tensor blocks, bool precise, str gate='') -> Tensor")
torch.library.register_fake(
    "foredraft::multiply_blocks",
    lambda rows, blocks, precise, gate="": rows.new_empty(
        *rows.shape[:-1], blocks.shape[0] * STRIP // (2 if gate else 1), dtype=torch.float32 if precise else rows.dtype
    ),
)

# The same, each row bfloat16[N, K] by the matrix of its expert, int64[N], of those that blocks have a dimension for.
torch.library.define(
    "foredraft::multiply_expert_blocks", "(Tensor rows, Tensor blocks, Tensor experts, str gate='') -> Tensor"
)
torch.library.register_fake(
    "foredraft::multiply_expert_blocks",
    lambda rows, blocks, _experts, gate="": rows.new_empty(
        rows.shape[0], blocks.shape[1] * STRIP // (2 if gate else 1)
    ),
)


class BlockLinear(nn.Module):
    """A linear map to N numbers by quantised weights as `packed_blocks` made them, with a bias, float[N] or None.

    Its result is bfloat16, or float32 like the sums if `precise`. Its forward can be traced and compiled, not run.
    """

    def __init__(self, blocks: torch.Tensor, bias: torch.Tensor | None, columns: int, *, precise: bool) -> None:
        super().__init__()
        self.register_buffer("blocks", blocks)
        self.bias, self._columns, self._precise = bias, columns, precise

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.foredraft.multiply_blocks(rows, self.blocks, self._precise)
        if self._columns % STRIP:
            product = product[..., : self._columns]
        return product if self.bias is None else product + self.bias


class BlockEmbedding(nn.Embedding):
    """An embedding by quantised weights, made by `block_embedding`."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return rows_of(self.get_buffer("blocks"), token_ids).to(self.weight.dtype)


def block_embedding(like: nn.Embedding, blocks: torch.Tensor) -> nn.Module:
    """Return an embedding by blocks as `packed_blocks` made them, which may be those of the LM head too.

    What a subclass does besides looking rows up, as Gemma's, stays its own code.
    """
    own, kind = copy.copy(like), type(like)
    buffers = {**vars(like)["_buffers"], "blocks": blocks}
    # of a weight, only its dtype is asked for
    vars(own).update({"_parameters": {}, "_buffers": buffers, "weight": like.weight.detach().new_empty(0)})
    bases = (BlockEmbedding,) if kind is nn.Embedding else (kind, BlockEmbedding)
    own.__class__ = type(kind.__name__, bases, {})
    return own


def rows_of(blocks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return rows of the matrix that `packed_blocks` arranged, float32[..., K], by their numbers, int64[...]."""
    layout, count = layout_of(blocks.shape[2], blocks.dtype), blocks.shape[1]
    strips = (blocks[numbers // STRIP].to(torch.int16) & 255).flatten(-2)
    lane = (numbers % STRIP)[..., None, None, None]

    def of_lane(values: torch.Tensor, *sizes: int) -> torch.Tensor:
        parted: torch.Tensor = values.unflatten(-1, (-1, STRIP, *sizes))
        return parted.gather(-2, lane.expand(*numbers.shape, parted.shape[-3], 1, *sizes)).squeeze(-2)

    size = STRIP * layout.numbers * layout.bits // 8 * count
    integers = of_lane(strips[..., :size], GROUP)
    if layout.bits == 4:
        integers = torch.stack([integers & 15, integers >> 4], dim=-2)
    halves = of_lane(strips[..., size:], 2).int()
    scales = _numbers_of(halves[..., 0] | halves[..., 1] << 8).unflatten(-1, (count, -1, 1))
    values: torch.Tensor = (integers.flatten(numbers.ndim) + layout.least).float().unflatten(-1, (count, -1))
    values = values * scales[..., 0, :]
    return (values + scales[..., 1, :] if layout.minima else values).flatten(-2)


def _numbers_of(bits: torch.Tensor) -> torch.Tensor:
    """Return finite numbers in float16, by their bits, in float32; torch's compiler warns where it sees float16."""
    exponent = bits >> 10 & 31
    mantissa = (bits & 1023) + 1024 * (exponent > 0)
    power = (exponent.clamp(min=1) + (127 - 25) << 23).view(torch.float32)
    return (1 - 2 * (bits >> 15)) * mantissa * power


def product_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights that a model multiplies by, quantised or not."""
    multiplying = [layer for layer in model.modules() if not isinstance(layer, nn.Embedding)]
    buffers = [each for layer in multiplying for each in layer.named_buffers(recurse=False)]
    quantised = [each for name, each in buffers if name.endswith("blocks")]
    return sum(each.nbytes for each in (*quantised, *_dequantised(model)))


def _dequantised(model: nn.Module) -> list[torch.Tensor]:
    """Return the weights that a model multiplies by and that are not quantised."""
    linear = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    return linear + [by_rows(module, matrices) for module, _, matrices in expert_matrices(model)]


def dequantised_told(model: nn.Module) -> str:
    """Describe the matrices that `quantised_weights` left to a model as they were dequantised; "" for none."""
    left = _dequantised(model)
    if not left:
        return ""
    uneven = sum(bool(each.shape[-1] % DEPTH or (each.ndim == 3 and each.shape[1] % STRIP)) for each in left)
    return (
        f"Matrices that stay dequantised: {len(left)}, {sum(each.nbytes for each in left) / 1e6:.1f} MB. {uneven} are "
        f"no multiple of {DEPTH} wide, or of experts and no multiple of {STRIP} high; others are not in the file, or "
        "in a format that has no kernel."
    )


@contextmanager
def quantised_weights(model: Any, rows: QuantisedRows) -> Iterator[int]:
    """Make a model read quantised weights, a file's or those of `round_weights`, until the block ends.

    Its LM head returns float32. Yields the number of linear maps and mixtures' matrices that are quantised.
    """
    ours = _quantised_layers(model, rows)
    theirs = {name: model.get_submodule(name) for name in ours}
    mixed: list[tuple[nn.Module, str, nn.Parameter]] = []
    for name, layer in ours.items():
        model.set_submodule(name, layer)
    for module, name, matrices in expert_matrices(model):
        if (blocks := rows.packed(by_rows(module, matrices))) is not None:
            mixed.append((module, name, matrices))
            delattr(module, name)
            module.register_buffer(name + BLOCKS, blocks)
    try:
        yield sum(isinstance(layer, BlockLinear) for layer in ours.values()) + len(mixed)
    finally:
        for name, layer in theirs.items():
            model.set_submodule(name, layer)
        for module, name, matrices in mixed:
            delattr(module, name + BLOCKS)
            module.register_parameter(name, matrices)


def _quantised_layers(model: Any, rows: QuantisedRows) -> dict[str, nn.Module]:
    """Return quantised linear maps and embeddings that can take the place of a model's, by name."""
    ours: dict[str, nn.Module] = {}
    head = model.get_output_embeddings()
    of_head: torch.Tensor | None = None
    for name, layer in model.named_modules():
        if not _is_product(layer):
            continue
        matrix = getattr(layer, _ROUNDED, None)
        blocks = rows.packed(layer.weight) if matrix is None else packed_blocks(matrix)
        if blocks is not None:
            ours[name] = BlockLinear(blocks, layer.bias, layer.out_features, precise=layer is head)
            of_head = blocks if layer is head else of_head
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding):
            blocks = of_head if layer.weight is head.weight else rows.packed(layer.weight)
            if blocks is not None:
                ours[name] = block_embedding(layer, blocks)
    return ours
