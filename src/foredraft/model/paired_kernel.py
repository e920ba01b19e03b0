"""The innermost product of compiled forwards in bfloat16 by pairs: two products and their sum in one instruction.

Some processors carry that instruction out twice as fast as they multiply in float32 (AMD's since Zen 4), others at half
that rate, so it is tried. Pairs are added in the order of the row, so a row is the same whatever rows stand beside it.
Does not know what is multiplied, nor the compiler that takes the source up (micro_kernel.py).
"""

from collections.abc import Callable
from time import perf_counter

import torch

from foredraft.model.kernel_template import source_beside

PAIRED_SOURCE = source_beside(__file__)
_TRIED = (16, 1024, 2048)
_TIMES = 20
_QUICKER = 1.2


def pairs_are_quicker(clock: Callable[[], float] = perf_counter) -> bool:
    """Say whether this processor multiplies bfloat16 by pairs, and more quickly than float32; takes some 20 ms.

    What is timed is the vendor's library, which has kernels of both kinds.
    """
    if not torch.cpu._is_avx512_bf16_supported():  # noqa: SLF001  # torch has no public name for it
        return False
    return _least_seconds(torch.float32, clock) > _QUICKER * _least_seconds(torch.bfloat16, clock)


@torch.inference_mode()
def _least_seconds(dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Return the least time of a product of the size that a forward's have."""
    rows, depth, columns = _TRIED
    few, many = torch.ones(rows, depth, dtype=dtype), torch.ones(columns, depth, dtype=dtype)
    seconds = []
    for _ in range(_TIMES):
        start = clock()
        torch.nn.functional.linear(few, many)
        seconds.append(clock() - start)
    return min(seconds)
