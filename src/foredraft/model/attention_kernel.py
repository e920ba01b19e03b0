"""Attention of a few rows over the cache of one sequence, as a kernel for torch's compiler.

torch's own attention copies grouped keys once for each query head, and calls a library built for thousands of rows. In
this one each number that comes out depends on what the row may see and on nothing else: neither on how many rows stand
beside it, nor on what lies between the slots that it sees, as hidden slots add exact zeros in the order of the slots.
So a drafted row attends, bit for bit, as it would alone. Knows torch's compiler's interface for templates. Does not
know models.
"""

from typing import Any

import torch
from torch.library import custom_op

from foredraft.model.kernel_template import kernel_call, source_beside
from foredraft.model.paired_kernel import pairs_are_quicker

QUERIES = 4
"""Query rows that are scored side by side, so that each key is read once for all of them."""

LANES = 16
"""The size of a head must be a multiple of this: the most numbers that a vector register holds."""

_WIDEST = 512
"""Bits of such a register; there are enough of them then to score four slots for each of four queries at once."""


@custom_op("foredraft::attend", mutates_args=())
def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attend from `R` rows to `S` slots; this is what runs where nothing is compiled, and what the kernel is tested by.

    Args:
        query: floating point[heads, R, D], D a multiple of `LANES`.
        key: floating point[key heads, S, D]; each serves heads / key heads query heads in a row.
        value: the same.
        mask: floating point[R, S], added to the scores.
        scaling: of the scores.

    Returns:
        floating point[R, heads * D], in the dtype of `query`; sums are in float32 at least.
    """
    precise = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[0] // key.shape[0]
    keys, values = (each.to(precise).repeat_interleave(groups, 0) for each in (key, value))
    weights = torch.softmax(query.to(precise) * scaling @ keys.mT + mask.to(precise), -1)
    return (weights @ values).to(query.dtype).transpose(0, 1).flatten(1)


@attend.register_fake
def _(
    query: torch.Tensor, _key: torch.Tensor, _value: torch.Tensor, _mask: torch.Tensor, _scaling: float
) -> torch.Tensor:
    heads, rows, size = query.shape
    return query.new_empty(rows, heads * size)


def register_attention_kernel() -> None:
    """Have torch's compiler put the kernel in the place of `attend` from now on, in this process."""
    import torch._inductor.lowering as lowerings  # slow to import, and needed by those who compile alone

    lowerings.register_lowering(torch.ops.foredraft.attend.default, type_promotion_kind=None)(_lowered)


def _lowered(query: Any, key: Any, value: Any, mask: Any, scaling: float) -> Any:
    """Return the kernel's call as torch's compiler represents it; the arguments are those of `attend`."""
    from torch._inductor.codegen.cpp_micro_gemm import get_restrict_keyword
    from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.ir import ExternKernel, FixedLayout

    given = {"query": query, "key": key, "value": value, "mask": mask}
    inputs = {name: ExternKernel.require_stride1(ExternKernel.realize_input(tensor)) for name, tensor in given.items()}
    heads, rows, size = query.get_size()
    dtype, width = query.get_dtype(), heads * size
    precise = torch.promote_types(dtype, torch.float32)
    bits = pick_vec_isa().bit_width() or 256  # torch's vectors have this size also where there are no instructions
    paired = dtype == torch.bfloat16 and bits == _WIDEST and size % (2 * LANES) == 0 and pairs_are_quicker()
    return kernel_call(
        "attend",
        source_beside(__file__),
        inputs,
        FixedLayout(query.get_device(), dtype, [rows, width], [width, 1]),
        size=int(size),
        queries=QUERIES,
        at_once=_at_once(int(size) * precise.itemsize * 8 // bits, bits),
        scaling=repr(float(scaling)),
        vector_bits=bits,
        side_by_side=bits == _WIDEST and precise == torch.float32,
        paired=paired,
        numbers=2 * LANES if paired else LANES,
        query_t=DTYPE_TO_CPP[dtype if paired else precise],
        input_t=DTYPE_TO_CPP[dtype],
        sum_t=DTYPE_TO_CPP[precise],
        restrict_keyword=get_restrict_keyword(),
    )


def _at_once(vectors: int, bits: int) -> int:
    """Return how many of a value's vectors are summed at once: as many as divide it and fit into the registers."""
    most = ((32 if bits == _WIDEST else 16) - 2) // (QUERIES + 1)
    return max(count for count in range(1, most + 1) if vectors % count == 0)
