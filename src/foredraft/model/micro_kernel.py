"""The innermost product of compiled forwards: a few rows by a strip of the weights, in float32.

What torch's compiler writes in its place keeps its sums in memory and not in registers once there are five rows or
more, and widens bfloat16 one number at a time; the vendor's library multiplies bfloat16 at half the rate of float32 on
processors without a matrix unit. This one widens both sides to float32 and asks for the weights ahead of their use, so
that a row of a draft costs arithmetic and not much else. Knows torch's compiler's interface for such kernels. Does not
know models, or how the product is divided among threads and caches, which stays the compiler's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from foredraft.model.kernel_template import source_beside

_WIDEST_PADDING = 1 / 16
"""Weights are cut into strips of columns; the last one is filled up with zeros, which take time too."""

_AHEAD = 24
"""How many lines of a strip weights are asked for ahead of their use; 16 to 64 were alike, and better than none."""


@contextmanager
def own_micro_kernel() -> Iterator[None]:
    """Have torch's compiler use this kernel for products in float32 and bfloat16, until the block ends.

    Where the processor has neither AVX-512 nor AVX2, the compiler's own stays.
    """
    import torch._inductor.lowering  # noqa: F401  # before what follows: torch's modules import each other in a circle
    from torch._inductor.codegen import cpp_micro_gemm as kernels

    theirs, ours = kernels.micro_gemm_configs, _configurations()
    replaced = {_place(config) for config in ours}
    kernels.micro_gemm_configs = {_kernel_class(): ours} | {
        kind: [config for config in configs if _place(config) not in replaced] for kind, configs in theirs.items()
    }
    try:
        yield
    finally:
        kernels.micro_gemm_configs = theirs


def _place(config: Any) -> tuple[Any, ...]:
    """Return what kernel a configuration is for: the instructions and dtypes that it takes."""
    return (config.vec_isa_cls, config.input_dtype, config.input2_dtype, config.output_dtype, config.compute_dtype)


def _kernel_class() -> Any:
    """Return the kernel as the class that torch's compiler asks for; made here, as that is slow to import."""
    from torch._inductor.codegen import cpp_micro_gemm as kernels
    from torch._inductor.codegen.common import KernelTemplate

    source = source_beside(__file__)
    common: Any = kernels.CppMicroGemm  # torch leaves it without annotations

    class WidenedMicroGemm(common):  # type: ignore[misc]  # torch's interface: it asks for a subclass
        def codegen_define(self, kernel: Any) -> str:
            rendered: str = KernelTemplate._template_from_string(source).render(  # noqa: SLF001  # what torch's own call
                declare_kernel=self.get_kernel_declaration(),
                kernel=kernel,
                block_m=self.register_blocking.block_m,
                block_n=self.register_blocking.block_n,
                ahead=_AHEAD,
                **self.get_common_options(),
            )
            return rendered

    return WidenedMicroGemm


def _configurations() -> list[Any]:
    """Return which kernel sizes there are; eight rows by three vectors fill the registers of AVX-512, four of AVX2."""
    from torch._inductor.codegen.cpp_micro_gemm import generate_gemm_config
    from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512

    def taken(config: Any, _m: Any, n: Any, _k: Any, alpha: float, *_: Any, **__: Any) -> bool:
        """Take the wider strip, unless it needs more filling up than is worth it."""
        block = config.register_blocking.block_n
        vectors = 3 if block % 3 == 0 else 2
        wide = block // vectors * 3
        filled = -n % wide <= n * _WIDEST_PADDING
        return alpha == 1 and filled == (vectors == 3)

    return [
        config
        for dtype in (torch.bfloat16, torch.float32)
        for instructions, rows, lanes in ((VecAVX512, 8, 16), (VecAVX2, 4, 8))
        for config in generate_gemm_config(
            instructions,
            [(rows, 3 * lanes, 1), (rows, 2 * lanes, 1)],
            input_dtype=dtype,
            output_dtype=torch.float32,
            compute_dtype=torch.float32,
            extra_check=taken,
        )
    ]
