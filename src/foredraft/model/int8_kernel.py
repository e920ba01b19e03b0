"""The product of rows and weights in eight-bit integers, as a kernel for torch's compiler.

torch's own packs the weights anew in each pass of several rows. In this one they are packed when the forward is
compiled, and the sums are exact whatever their order. Knows torch's compiler's interface for templates. Does not know
how numbers become integers.
"""

from typing import Any

import torch
from torch.library import custom_op

from foredraft.model.kernel_template import kernel_call, source_beside
from foredraft.model.micro_kernel import BYTES_AHEAD

ROWS, VECTORS, LANES = 8, 3, 16
"""Rows times vectors of 16 sums that fill the registers, with the weights and a row's numbers beside them."""

_FOUR = 4  # numbers that one instruction multiplies and adds


def int8_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply integers exactly; this is what runs where nothing is compiled.

    Args:
        rows: int8[R, K].
        weight: int8[N, K]; K below 65,536, as sums have 32 bits.

    Returns:
        int32[R, N], `rows @ weight.T`.
    """
    return torch._int_mm(rows, weight.t())  # noqa: SLF001  # torch's only integer product


multiply_int8 = custom_op("foredraft::multiply_int8", int8_product, mutates_args=())
"""The same as an operation that torch's compiler has the kernel for; calling it as it is takes longer."""


@multiply_int8.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0], dtype=torch.int32)


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights as the kernel reads them, and what its sums begin with.

    The instruction multiplies unsigned numbers by signed ones, so rows go in with 128 added to each number; the sums
    begin with what that adds, taken away.

    Args:
        weight: int8[N, K].

    Returns:
        int8[S, K / 4, 48, 4] and int32[S * 48]: S strips of 48 columns, filled up with zeros, as is K.
    """
    columns, size = weight.shape
    strip = VECTORS * LANES
    filled = torch.nn.functional.pad(weight, (0, -size % _FOUR, 0, -columns % strip))
    strips = filled.unflatten(0, (-1, strip)).unflatten(2, (-1, _FOUR)).transpose(1, 2).contiguous()
    return strips, -128 * filled.sum(1, dtype=torch.int32)


def register_int8_kernel() -> None:
    """Have torch's compiler put the kernel in the place of `multiply_int8` from now on, in this process."""
    import torch._inductor.lowering as lowerings  # slow to import, and needed by those who compile alone

    lowerings.register_lowering(torch.ops.foredraft.multiply_int8.default, type_promotion_kind=None)(_lowered)


def _lowered(rows: Any, weight: Any) -> Any:
    """Return the kernel's call as torch's compiler represents it; the arguments are those of `multiply_int8`."""
    import torch._inductor.lowering as lowerings
    from torch._inductor.ir import ExternKernel, FixedLayout
    from torch._inductor.virtualized import V

    constant = V.graph.constants.get(weight.get_name())
    if constant is None or not torch.cpu._is_vnni_supported():  # noqa: SLF001  # torch has no public name for it
        return lowerings.lowerings[torch.ops.aten._int_mm.default](rows, lowerings.permute(weight, [1, 0]))  # noqa: SLF001  # as above
    strips, start = (ExternKernel.realize_input(V.graph.add_tensor_constant(each)) for each in packed(constant))
    inputs = {
        "rows": ExternKernel.require_contiguous(ExternKernel.realize_input(rows)),
        "weight": strips,
        "start": start,
    }
    count, columns = rows.get_size()[0], weight.get_size()[0]
    layout = FixedLayout(rows.get_device(), torch.int32, [count, columns], [columns, 1])
    filled = {"most_rows": ROWS, "vectors": VECTORS, "ahead": BYTES_AHEAD // (VECTORS * LANES * _FOUR)}
    return kernel_call("multiply_int8", source_beside(__file__), inputs, layout, **filled)
