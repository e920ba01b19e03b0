"""The innermost product of compiled forwards: a few rows by a strip of the weights, summed in float32.

What torch's compiler writes in its place keeps its sums in memory and not in registers once there are five rows or
more, and widens bfloat16 one number at a time; the vendor's library multiplies bfloat16 at half the rate of float32 on
many processors without a matrix unit. This one widens both sides to float32 and asks for the weights ahead of their
use, so that a row of a draft costs arithmetic and not much else; where bfloat16 is multiplied more quickly by pairs, it
is (paired_kernel.py). Knows torch's compiler's interface for such kernels. Does not know models, or how the product is
divided among threads and caches (blocking.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from foredraft.model.kernel_template import source_beside
from foredraft.model.paired_kernel import PAIRED_SOURCE, pairs_are_quicker

_WIDEST_PADDING = 1 / 16
"""Weights are cut into strips of columns; the last one is filled up with zeros, which take time too."""

BYTES_AHEAD = 9 * 1024
"""Weights are asked for so far ahead of their use: 2 KiB are too few where the cache is shared, 18 no better."""


@contextmanager
def own_micro_kernel() -> Iterator[None]:
    """Have torch's compiler use this kernel for products in float32 and bfloat16, until the block ends.

    Where the processor has neither AVX-512 nor AVX2, the compiler's own stays.
    """
    import torch._inductor.lowering  # noqa: F401  # before what follows: torch's modules import each other in a circle
    from torch._inductor.codegen import cpp_micro_gemm as kernels

    theirs, pairs = kernels.micro_gemm_configs, pairs_are_quicker()
    ours = {_kernel_class(source_beside(__file__)): _configurations(paired=False)}
    if pairs:
        ours = {_kernel_class(PAIRED_SOURCE, paired=True): _configurations(paired=True)} | ours
    replaced = {_place(config) for configs in ours.values() for config in configs}
    kernels.micro_gemm_configs = ours | {
        kind: [config for config in configs if _place(config) not in replaced] for kind, configs in theirs.items()
    }
    try:
        yield
    finally:
        kernels.micro_gemm_configs = theirs


def _place(config: Any) -> tuple[Any, ...]:
    """Return what kernel a configuration is for: the instructions and dtypes that it takes."""
    return (config.vec_isa_cls, config.input_dtype, config.input2_dtype, config.output_dtype, config.compute_dtype)


def _kernel_class(source: str, *, paired: bool = False) -> Any:
    """Return the kernel as the class that torch's compiler asks for; made here, as that is slow to import.

    Args:
        source: the template.
        paired: the weights are laid out in pairs of lines, number by number beside each other.
    """
    from torch._inductor.codegen import cpp_micro_gemm as kernels
    from torch._inductor.codegen.common import KernelTemplate

    common: Any = kernels.CppMicroGemm  # torch leaves it without annotations

    class OwnMicroGemm(common):  # type: ignore[misc]  # torch's interface: it asks for a subclass
        own = True  # blocking.py asks for it

        def codegen_define(self, kernel: Any) -> str:
            rendered: str = KernelTemplate._template_from_string(source).render(  # noqa: SLF001  # what torch's own call
                declare_kernel=self.get_kernel_declaration(),
                kernel=kernel,
                block_m=self.register_blocking.block_m,
                block_n=self.register_blocking.block_n,
                ahead=BYTES_AHEAD // (self.register_blocking.block_n * self.input2_dtype.itemsize),
                **self.get_common_options(),
            )
            return rendered

        def get_b_layout(self) -> Any:
            return kernels.LayoutType.VNNI2 if paired else kernels.LayoutType.NORMAL

    return OwnMicroGemm


def _configurations(*, paired: bool) -> list[Any]:
    """Return which kernel sizes there are; eight rows by three vectors fill the registers of AVX-512, four of AVX2."""
    from torch._inductor.codegen.cpp_micro_gemm import generate_gemm_config
    from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512

    def taken(config: Any, _m: Any, n: Any, k: Any, alpha: float, *_: Any, **__: Any) -> bool:
        """Take the wider strip, unless it needs more filling up than is worth it."""
        block = config.register_blocking.block_n
        vectors = 3 if block % 3 == 0 else 2
        wide = block // vectors * 3
        filled = -n % wide <= n * _WIDEST_PADDING
        return alpha == 1 and filled == (vectors == 3) and not (paired and k % 2)

    sizes = ((VecAVX512, 8, 16),) if paired else ((VecAVX512, 8, 16), (VecAVX2, 4, 8))
    return [
        config
        for dtype in ((torch.bfloat16,) if paired else (torch.bfloat16, torch.float32))
        for instructions, rows, lanes in sizes
        for config in generate_gemm_config(
            instructions,
            [(rows, vectors * lanes, 1 + paired) for vectors in (3, 2)],
            input_dtype=dtype,
            output_dtype=torch.float32,
            compute_dtype=torch.float32,
            extra_check=taken,
        )
    ]
