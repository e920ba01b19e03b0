"""How a product of compiled forwards is divided among threads and caches.

torch's compiler's way looks the division up anew in each product whose number of rows is a symbol, and cuts the depth
to what the smallest cache holds, so that sums go through memory again and again. In this one all but the rows is known
when compiling, and a strip of the weights is read to its end. Knows torch's compiler's template of products. Does not
know what multiplies (micro_kernel.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foredraft.model.kernel_template import source_beside


@contextmanager
def own_blocking() -> Iterator[None]:
    """Have torch's compiler divide products that our micro-kernel makes in this way, until the block ends."""
    import torch._inductor.lowering  # noqa: F401  # before what follows: torch's modules import each other in a circle
    from torch._inductor.codegen import cpp_gemm_template as products

    template: Any = products.CppGemmTemplate
    theirs, slicing = products.GEMM_TEMPLATE_INIT_BLOCKING_EXTENDED, template.maybe_k_slicing
    ours = source_beside(__file__)
    products.GEMM_TEMPLATE_INIT_BLOCKING_EXTENDED = f"{{% if micro_gemm.own %}}{ours}{{% else %}}{theirs}{{% endif %}}"
    template.maybe_k_slicing = lambda _self: False  # torch forbids it at runtime, and writes code for it all the same
    try:
        yield
    finally:
        products.GEMM_TEMPLATE_INIT_BLOCKING_EXTENDED = theirs
        template.maybe_k_slicing = slicing
