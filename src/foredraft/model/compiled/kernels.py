"""Our kernels, which replace those of torch's compiler in a forward: attention, and products with weights.

In each of them a row has the same bits whatever other rows are in the pass. `own_kernels` gives them to the compiler:
attention of a few rows, each over its own range of slots (attention.cpp.jinja); products in float32 and bfloat16
(products.cpp.jinja), or by tiles (tile_products.cpp.jinja), with their division among threads and caches
(blocking.cpp.jinja); those of rows with their own experts (experts.cpp.jinja); and products with the integers of a GGUF
file (blocks.cpp.jinja, for experts expert_blocks.cpp.jinja, and integers.cpp.jinja). All but tiles have the same bits
on every processor: they are written in vectors of their own (vectors.cpp.jinja, floats.cpp.jinja), which do not depend
on torch. docs/explanation/compiled.md explains why they are faster. Uses the compiler's template interfaces, some of
them private, and is slow to import: it is needed by those who compile alone. Does not depend on models, or on how a
forward is traced.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.lowering as lowerings
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from torch._inductor import config
from torch._inductor.codegen import cpp_gemm_template as division
from torch._inductor.codegen import cpp_micro_gemm as products
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
from torch._inductor.cpu_vec_isa import VecAMX, VecAVX2, VecAVX512
from torch._inductor.ir import ExternKernel, FixedLayout, FlexibleLayout

import foredraft.model.compiled.recurrence  # noqa: F401  # imported for the operation that it registers
from foredraft.model.compiled.attention import LANES
from foredraft.model.compiled.block_layers import GATES
from foredraft.model.compiled.blocks import STRIP, layout_of
from foredraft.model.compiled.experts import SUMMED
from foredraft.model.machine import (
    AVX2,
    AVX512,
    has_avx2,
    has_tiles,
    multiplies_by_pairs,
    registers,
    vector_lanes,
)

_QUERIES = 4  # query rows whose values are summed together, so that each value is read once for all of them
_FEW_UNITS = 16
"""Units of `_QUERIES` queries of a key head; of more, threads take units by turns. SmolLM2's passes of 64 rows (48
units) take as long either way, a prompt of 1,024 tokens (192 in a pass) 0.985 of the time by turns (Zen 4)."""
_ALL_CACHES = 3  # locality of a prefetch, as GCC's __builtin_prefetch takes it; 0 is past the caches
_BYTES_AHEAD = 9 * 1024  # that weights are prefetched; 2 KiB are too few where the cache is shared, 18 no better
_UPDATED = 4  # vectors of a matrix's columns that are updated and summed at once: they fill the registers of AVX2
_SUMMED_BY_HALVES = 4  # of an expert's sums, each in two vectors: as many registers, and one for each of four rows
_TILES = (32, 32, 32)  # rows, columns and depth of a product by tiles; one instruction of AMX multiplies that depth
_TILED_HEAD = 160  # the most numbers of a head: of AMX's eight tiles, one holds sums, two keys, five a query's numbers
_SAME_BITS = 256  # bits of the vectors of torch's own code, on every x86: sums in vectors of 512 round otherwise
_WIDEST_PADDING = 1 / 16  # of the columns; the last strip of weights is filled up with zeros, which take time too
_QUANTISED_ALONE = 4096  # numbers of a pass's rows that become integers sooner than threads wait for each other; chosen
_STANDS_OUT = 3.0
"""A block of a row has 15 bits if its largest number is over so many times the root mean square of the row.
docs/results/log.md has what other values cost and lose."""


# Rows as they are, float[..., R, K], written one after another whatever they are computed from.
torch.library.define("foredraft::written", "(Tensor rows) -> Tensor")
torch.library.register_fake("foredraft::written", lambda rows: rows.clone(memory_format=torch.contiguous_format))


@contextmanager
def own_kernels(*, cached: bool = False, tiles: bool = True, precise: bool = False) -> Iterator[None]:
    """Make torch's compiler use these kernels until the block ends.

    Weights that are `cached`, as a draft model's can be, are prefetched into the caches. Others are prefetched past
    them, so that what steps need beside passes, such as the draft model's weights, is found there. (Not by tiles,
    where this was not measured.) With `tiles`, bfloat16 is multiplied by them where the processor has some (Intel's
    AMX), which rounds otherwise than other processors do. Without, every x86 gives the same bits. Where weights are
    integers, all blocks of rows have 15 bits if `precise`.

    Products stay the compiler's where the processor has neither AVX-512 nor AVX2. Sines and cosines are kept, which the
    compiler counts as cheap and would compute again, those of every position, for every head of every layer.
    """
    operations = torch.ops.foredraft
    table: dict[Any, Any] = lowerings.lowerings
    locality, tiles = _ALL_CACHES if cached else 0, tiles and has_tiles()
    reading = {"locality": locality, "stands_out": 0.0 if precise else _STANDS_OUT}
    # each takes its operation's arguments, and returns the kernel's call as torch's compiler represents it
    lowered: dict[Any, Callable[..., Any]] = {
        operations.attend: partial(_lowered_attention, tiled=tiles),
        operations.written: lambda rows: ExternKernel.require_contiguous(_kept(lowerings.clone)(rows)),
        operations.delta_rows: _lowered_recurrence,
        operations.multiply_experts: _lowered_experts,
        operations.multiply_blocks: partial(_lowered_blocks, reading=reading),
        operations.multiply_expert_blocks: partial(_lowered_expert_blocks, reading=reading),
    }
    for operation, lowering in lowered.items():
        lowerings.register_lowering(operation.default, type_promotion_kind=None)(lowering)
    theirs = {angle: table[angle] for angle in (torch.ops.aten.cos.default, torch.ops.aten.sin.default)}
    blocking = division.GEMM_TEMPLATE_INIT_BLOCKING_EXTENDED
    our_blocking = Path(__file__).with_name("blocking.cpp.jinja").read_text(encoding="utf-8")
    ours = f"{{% if micro_gemm.own is defined %}}{our_blocking}{{% else %}}{blocking}{{% endif %}}"
    ours_or_theirs = _product_kernels(locality, tiles=tiles) if has_avx2() else products.micro_gemm_configs
    with (
        config.patch({"cpp.simdlen": _SAME_BITS} if has_avx2() and not tiles else {}),
        patch.object(products, "micro_gemm_configs", ours_or_theirs),
        patch.object(division, "GEMM_TEMPLATE_INIT_BLOCKING_EXTENDED", ours),
        # the compiler lays weights out for the vendor's library first: one more copy of them, which nothing reads
        patch.object(torch.ops.mkldnn, "_reorder_linear_weight", lambda weight, _rows: weight, create=True),
        patch.object(Environment, "from_string", cache(Environment.from_string)),  # it parses them for each product
        # torch forbids it at runtime, and writes code for it all the same
        patch.object(division.CppGemmTemplate, "maybe_k_slicing", lambda _self: False),
    ):
        table.update({angle: _kept(lowering) for angle, lowering in theirs.items()})
        try:
            yield
        finally:
            table.update(theirs)


@cache
def _template(name: str) -> Any:
    sources = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=sources, undefined=StrictUndefined).get_template(f"{name}.cpp.jinja")  # noqa: S701  # C++ takes no escapes


def _kept(lowering: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a lowering whose result the compiler keeps in memory."""

    def keep(values: Any) -> Any:
        result = lowering(values)
        result.realize()
        return result

    return keep


def _contiguous(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors of the compiler as it has computed and written them, row after row."""
    return {name: ExternKernel.require_contiguous(ExternKernel.realize_input(each)) for name, each in given.items()}


def _kernel_call(
    name: str, template: str, inputs: Mapping[str, Any], dtype: torch.dtype, sizes: Sequence[Any], **values: Any
) -> Any:
    """Return the call of a kernel as torch's compiler represents it, with a result of this dtype and these sizes.

    The `template` finds `inputs`, the compiler's realised tensors, each of them, and `values` by their names; `kernel`
    and `template` as torch's own templates do; `output`; `restrict_keyword`; and `num_threads`.
    """
    first: Any = next(iter(inputs.values()))
    layout = FixedLayout(first.get_device(), dtype, sizes, FlexibleLayout.contiguous_strides(sizes))

    class Kernel(CppTemplate):  # torch's interface: it asks for a subclass
        def render(self, **given: Any) -> str:
            if given.get("epilogue_nodes"):
                raise NotImplementedError(f"the kernel {name} has no place for what is made of its results")
            named = dict(zip(inputs, self.input_nodes, strict=True))
            rendered: str = _template(template).render(
                template=self,
                kernel=given["kernel"],
                output=given.get("template_buffer_node") or self.output_node,
                num_threads=self.num_threads,
                restrict_keyword=products.get_restrict_keyword(),
                inputs=named,
                **named,
                **values,
            )
            return rendered

    kernel: Any = Kernel(name, list(inputs.values()), layout, torch.get_num_threads())  # torch leaves it unannotated
    called = kernel.generate().output_node()
    called.data.data.allow_epilogue_fusion = False
    return called


def _lowered_attention(
    query: Any, key: Any, value: Any, mask: Any, ranges: Any, scaling: float, sinks: Any = None, softcap: float = 0.0,
    *, tiled: bool,
) -> Any:  # fmt: skip
    given = {"query": query, "key": key, "value": value, "mask": mask}
    inputs = {name: ExternKernel.require_stride1(ExternKernel.realize_input(tensor)) for name, tensor in given.items()}
    inputs |= _contiguous({"ranges": ranges} if sinks is None else {"ranges": ranges, "sinks": sinks})
    heads, rows, size = query.get_size()
    dtype = query.get_dtype()
    halves = _halves(dtype)
    # vectors of pairs must fill a head
    lanes = AVX2 if vector_lanes() == AVX512 and size % (halves * AVX512) else vector_lanes()
    tiles = tiled and dtype == torch.bfloat16 and size % (2 * LANES) == 0 and size <= _TILED_HEAD
    paired = halves > 1 and lanes == AVX512 and not tiles and multiplies_by_pairs()
    # as many of a value's vectors are summed at once as divide it and fit into the registers
    vectors = int(size) // (halves * lanes)
    fitting = max((registers(lanes) - 2) // (_QUERIES + 1) // halves, 1)
    at_once = max(count for count in range(1, fitting + 1) if vectors % count == 0)
    return _kernel_call(
        "attend",
        "attention",
        inputs,
        dtype,
        [rows, heads * size],
        size=int(size),
        queries=LANES if tiles else _QUERIES,
        few=_FEW_UNITS,
        summed=_QUERIES,
        tiles=tiles,
        at_once=at_once,
        scaling=repr(float(scaling)),
        softcap=softcap and repr(float(softcap)),
        has_sinks=sinks is not None,
        halves=halves,
        lanes=lanes,
        paired=paired,
        query_t=DTYPE_TO_CPP[dtype if paired or tiles else torch.float32],
        input_t=DTYPE_TO_CPP[dtype],
    )


def _halves(dtype: torch.dtype) -> int:
    """Return how many numbers of `dtype` lie in a lane of a vector."""
    return torch.float32.itemsize // dtype.itemsize


def _lowered_recurrence(query: Any, key: Any, value: Any, decay: Any, strength: Any, *others: Any) -> Any:
    given = {"query": query, "key": key, "value": value, "decay": decay, "strength": strength}
    # the last may be left out
    given |= dict(zip(("slots", "parents", "sequences", "matrices", "records", "rate"), others, strict=False))
    inputs = _contiguous({name: tensor for name, tensor in given.items() if tensor is not None})
    rows, heads, size = value.get_size()
    key_size, tile = (int(each) for each in inputs["matrices"].get_size()[-2:])
    return _kernel_call(
        "delta_rows",
        "delta",
        inputs,
        torch.float32,
        [rows, heads, size],
        delta=strength is not None,
        columns="rate" in inputs,
        heads=int(heads),
        key_heads=int(key.get_size()[1]),
        key_size=key_size,
        value_size=int(size),
        decay_size=int(decay.get_size()[2]),
        tile=tile,
        lanes=vector_lanes(),
        at_once=min(tile // vector_lanes(), _UPDATED),
    )


def _lowered_experts(rows: Any, weights: Any, experts: Any) -> Any:
    (count, depth), (matrices, width, _) = rows.get_size(), weights.get_size()
    return _kernel_call(
        "multiply_experts",
        "experts",
        _contiguous({"rows": rows, "weights": weights, "experts": experts}),
        rows.get_dtype(),
        [count, width],
        input_t=DTYPE_TO_CPP[rows.get_dtype()],
        depth=int(depth),
        columns=int(width),
        matrices=int(matrices),
        halves=_halves(rows.get_dtype()),
        lanes=vector_lanes(),
        summed=SUMMED if vector_lanes() == AVX512 else _SUMMED_BY_HALVES,
    )


def _lowered_blocks(rows: Any, blocks: Any, precise: bool, gate: str = "", *, reading: dict[str, float]) -> Any:
    *leading, depth = rows.get_size()
    inputs = {"rows": lowerings.view(rows, [prod(leading), depth]), "blocks": blocks}
    dtype = torch.float32 if precise else rows.get_dtype()
    result = _integer_call("blocks", inputs, dtype, gate, serial=_QUANTISED_ALONE, **reading)
    return lowerings.view(result, [*leading, result.get_size()[1]])


def _lowered_expert_blocks(rows: Any, blocks: Any, experts: Any, gate: str = "", *, reading: dict[str, float]) -> Any:
    inputs = {"rows": rows, "blocks": blocks, "experts": experts}
    count = int(blocks.get_size()[0])
    return _integer_call("expert_blocks", inputs, rows.get_dtype(), gate, matrices=count, **reading)


def _integer_call(template: str, given: Mapping[str, Any], dtype: torch.dtype, gate: str, **values: Any) -> Any:
    (count, depth), (*_, strips, _, size) = given["rows"].get_size(), given["blocks"].get_size()
    written = int(strips) // (2 if gate else 1)
    return _kernel_call(
        f"multiply_{template}",
        template,
        _contiguous(given),
        dtype,
        [count, written * STRIP],
        output_t=DTYPE_TO_CPP[dtype],
        depth=int(depth),
        strips=int(strips),
        written=written,
        activation=GATES[gate] if gate else "",
        lanes=vector_lanes(),
        **layout_of(int(size), given["blocks"].get_dtype())._asdict(),
        **values,
    )


def _product_kernels(locality: int, *, tiles: bool) -> dict[Any, list[Any]]:
    """Return our product kernels with their sizes; torch's compiler uses the largest that fits.

    Eight rows by three vectors fill the registers of AVX-512, four by three those of AVX2, and two tiles by two the
    tiles of AMX, which multiply bfloat16 alone.
    """
    widths = [3 * vector_lanes(), 2 * vector_lanes()]
    rows = registers(vector_lanes()) // 4
    found = [
        configuration
        for dtype in (torch.bfloat16, torch.float32)
        for instructions in (VecAVX512, VecAVX2)  # by which torch vectorises its own code
        for configuration in _configurations(instructions, dtype, [(rows, width, _halves(dtype)) for width in widths])
    ]
    ours = {_product_kernel(locality): found}
    if tiles:
        ours[_product_kernel(tiles=True)] = _configurations(VecAMX, torch.bfloat16, [_TILES])
    return ours


def _product_kernel(locality: int = _ALL_CACHES, *, tiles: bool = False) -> Any:
    """Return a kernel, by tiles or by vectors, as a class for torch's compiler.

    `locality` is how many caches are to keep prefetched weights, as the compiler's builtin function takes it.
    """
    # torch's own kernel by tiles has the compiler set tiles up and release them
    common: Any = products.CppMicroGemmAMX if tiles else products.CppMicroGemm

    class OwnMicroGemm(common):  # type: ignore[misc]  # torch's interface: it asks for a subclass
        own = True  # which `own_kernels` has the compiler's template ask for

        def codegen_define(self, kernel: Any) -> str:
            block_m, block_n, block_k = self.register_blocking
            halves = _halves(self.input2_dtype)
            rendered: str = _template("tile_products" if tiles else "products").render(
                declare_kernel=self.get_kernel_declaration(),
                kernel=kernel,
                halves=halves,
                native=halves > 1 and vector_lanes() == AVX512 and multiplies_by_pairs(),
                lanes=vector_lanes(),
                block_m=block_m,
                block_n=block_n,
                block_k=block_k,
                locality=locality,
                ahead=_BYTES_AHEAD // (block_n * self.input2_dtype.itemsize),
                **self.get_common_options(),
            )
            return rendered

        def get_b_layout(self) -> Any:
            return products.LayoutType.NORMAL if self.register_blocking.block_k == 1 else products.LayoutType.VNNI2

    return OwnMicroGemm


def _configurations(instructions: Any, dtype: torch.dtype, sizes: list[tuple[int, int, int]]) -> list[Any]:
    """Return a kernel's sizes, rows by columns by depth, for torch's compiler."""

    def taken(config: Any, _m: Any, n: Any, k: Any, alpha: float, *_: Any, **__: Any) -> bool:
        """Take the wider of two strips, unless it needs more filling up than is worth it."""
        _, columns, depth = config.register_blocking
        wider = max(size[1] for size in sizes)
        filled = -n % wider <= n * _WIDEST_PADDING
        return alpha == 1 and k % depth == 0 and (len(sizes) == 1 or filled == (columns == wider))

    found: list[Any] = products.generate_gemm_config(
        instructions, sizes, dtype, output_dtype=torch.float32, compute_dtype=torch.float32, extra_check=taken
    )
    return found
