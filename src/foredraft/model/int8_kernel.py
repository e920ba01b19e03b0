"""The product of rows and weights in eight-bit integers, as a kernel for torch's compiler.

torch's own packs the weights anew in each pass of several rows. In this one they are packed when the forward is
compiled, and the sums are exact whatever their order. Knows torch's compiler's interface for templates. Does not know
how numbers become integers.
"""

from pathlib import Path
from typing import Any

import torch
from torch.library import custom_op

ROWS, VECTORS, LANES = 8, 3, 16
"""Rows times vectors of 16 sums that fill the registers, with the weights and a row's numbers beside them."""

_AHEAD = 24
_FOUR = 4  # numbers that one instruction multiplies and adds


@custom_op("foredraft::multiply_int8", mutates_args=())
def multiply_int8(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply integers exactly; this is what runs where nothing is compiled.

    Args:
        rows: int8[R, K].
        weight: int8[N, K]; K below 65,536, as sums have 32 bits.

    Returns:
        int32[R, N], `rows @ weight.T`.
    """
    return torch._int_mm(rows, weight.t())  # noqa: SLF001  # torch's only integer product


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
    inputs = [ExternKernel.require_contiguous(ExternKernel.realize_input(rows))]
    inputs += [ExternKernel.realize_input(V.graph.add_tensor_constant(each)) for each in packed(constant)]
    count, columns = rows.get_size()[0], weight.get_size()[0]
    layout = FixedLayout(rows.get_device(), torch.int32, [count, columns], [columns, 1])
    called = _template(inputs, layout).generate().output_node()
    called.data.data.allow_epilogue_fusion = False  # the kernel has no place for what is made of its results
    return called


def _template(inputs: list[Any], layout: Any) -> Any:
    """Return the kernel as the class that torch's compiler asks for; made here, as that is slow to import."""
    from torch._inductor.codegen.cpp_template import CppTemplate

    source = Path(__file__).with_suffix(".cpp.jinja").read_text(encoding="utf-8")

    class ProductTemplate(CppTemplate):  # torch's interface: it asks for a subclass
        def render(self, **given: Any) -> str:
            if given.get("epilogue_nodes"):
                raise NotImplementedError("the product takes nothing that follows it into its kernel")
            rows, weight, start = self.input_nodes
            rendered: str = self._template_from_string(source).render(
                template=self,
                kernel=given["kernel"],
                rows=rows,
                weight=weight,
                start=start,
                output=given.get("template_buffer_node") or self.output_node,
                most_rows=ROWS,
                vectors=VECTORS,
                ahead=_AHEAD,
                num_threads=self.num_threads,
            )
            return rendered

    return ProductTemplate("multiply_int8", inputs, layout, torch.get_num_threads())
