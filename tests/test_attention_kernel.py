"""The attention kernel of compiled forwards: its reference's sums, and the same bits whatever stands beside a row."""

import functools
import io
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import naive.compiled
from foredraft.model.compiled.kernels import _template, own_kernels

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own calls


@pytest.fixture(autouse=True)
def _without_caches():
    with torch._inductor.config.patch(force_disable_caches=True):  # which do not see that a kernel's source changed
        yield


@pytest.mark.parametrize("tiles", [False, True])
def test_every_function_that_a_variant_of_the_kernel_calls_is_in_it(tiles):
    """Here only the variants that this processor runs are compiled."""
    values = dict.fromkeys(("queries", "summed", "at_once", "few"), 4) | {"size": 64, "lanes": 16, "halves": 2}
    names = dict.fromkeys(("query_t", "input_t"), "at::BFloat16") | {"restrict_keyword": "", "num_threads": 2}
    inputs = dict.fromkeys(("query", "key", "value", "mask", "ranges", "output"))
    flags = {"tiles": tiles, "paired": not tiles, "has_sinks": False, "scaling": "1.0", "softcap": "9.0"}
    asked = dict.fromkeys(("def_kernel", "maybe_codegen_profile", "size", "stride", "index"), lambda *_, **__: "0")
    kernel, template = SimpleNamespace(kernel_name="k", **asked), SimpleNamespace(header=io.StringIO)
    source = _template("attention").render(
        template=template, kernel=kernel, inputs=inputs, **inputs, **values, **names, **flags
    )
    defined = set(re.findall(r"^(?:inline|using|struct).*?\b(attend_\w+)(?= =| {|\()", source, re.MULTILINE))
    assert set(re.findall(r"\battend_\w+", source)) == defined


@functools.lru_cache(maxsize=1)
def compiled(heads, key_heads, size, softcap):
    """Return `attend` as it is compiled for heads of one size at its first call with a dtype.

    Other shapes are forgotten: torch takes for a symbol what has varied, and heads and their sizes are constants.
    """
    torch._dynamo.reset()
    scaling = size**-0.5
    return torch.compile(
        lambda query, key, value, mask, ranges, sinks: torch.ops.foredraft.attend(
            query, key, value, mask, ranges, scaling, sinks, softcap
        )
    )


def first_slots(rows, count):
    """Return the ranges of rows that all attend to the first `count` slots."""
    return torch.tensor([[0], [count]]).repeat(1, rows)


def attended(query, key, value, mask, ranges=None, sinks=None, softcap=0.0):
    """Attend by the kernel, which is compiled once for any number of rows and slots; to the first slots by default."""
    ranges = first_slots(*mask.shape) if ranges is None else ranges
    for tensor, dimensions in ((query, [1]), (key, [1]), (value, [1]), (mask, [0, 1]), (ranges, [1])):
        torch._dynamo.mark_dynamic(tensor, dimensions)
    with own_kernels():
        return compiled(len(query), len(key), query.shape[-1], softcap)(query, key, value, mask, ranges, sinks)


def arguments(dtype, heads, key_heads, rows, slots, size):
    """Return what `attend` takes; keys and values lie in larger buffers, and each row sees some slots and the first."""
    rng = np.random.default_rng(rows * slots)
    shapes = ((heads, rows, size), (key_heads, slots + 5, size), (key_heads, slots + 5, size))
    query, key, value = (torch.from_numpy(rng.standard_normal(shape)).to(dtype) for shape in shapes)
    hidden = torch.from_numpy(rng.random((rows, slots)) < 0.3)
    hidden[:, 0] = False
    mask = torch.zeros(rows, slots, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    return query, key[:, :slots], value[:, :slots], mask


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "heads", "key_heads", "size", "has_sinks"),
    [(torch.bfloat16, 4, 4, 48, True), (torch.float32, 6, 2, 128, True), (torch.bfloat16, 4, 2, 128, False)],
    ids=["ungrouped-bfloat16-sinks", "large heads-float32-sinks", "large heads-bfloat16"],
)
def test_the_kernel_sums_as_its_reference_does(dtype, heads, key_heads, size, has_sinks):
    """Sinks are one more sum in all variants of the kernel."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for rows, slots in ((2, 3), (3, 16), (5, 33), (11, 250)):
        given = arguments(dtype, heads, key_heads, rows, slots, size)
        sinks = torch.linspace(-2, 3, heads).to(dtype) if has_sinks else None
        ours = attended(*given, sinks=sinks)
        theirs = naive.compiled.attend(*given, first_slots(rows, slots), size**-0.5, sinks)
        assert ours.shape == (rows, heads * size)
        assert torch.allclose(ours.double(), theirs.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["float32", "bfloat16"]
)
def test_the_kernel_caps_scores_as_its_reference_does(dtype, tolerance):
    query, *others = arguments(dtype, 6, 2, 5, 33, 64)
    query = query * 3
    ours = attended(query, *others, softcap=2.0)
    theirs, uncapped = (
        naive.compiled.attend(query, *others, first_slots(5, 33), 64**-0.5, None, cap) for cap in (2.0, 0.0)
    )
    assert torch.allclose(ours.double(), theirs.double(), atol=tolerance, rtol=tolerance)
    assert not torch.allclose(ours.double(), uncapped.double(), atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_hidden_slots_and_other_rows_change_no_bit(dtype):
    query, key, value, mask = arguments(dtype, 6, 2, 9, 70, 64)
    together = attended(query, key, value, mask)
    for row in range(9):
        seen = mask[row] == 0
        beside = (row + 1) % 9  # the compiler takes a single row for another kernel
        shown = torch.zeros(2, int(seen.sum()), dtype=dtype)
        alone = attended(query[:, [row, beside]], key[:, seen], value[:, seen], shown)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_of_several_sequences_attend_as_each_does_alone(dtype):
    """Three sequences in one buffer, of 3, 1 and 5 rows; between their slots lies what must not be read."""
    spans = ((2, 40, 3), (60, 7, 1), (90, 65, 5))
    query, key, value, _ = arguments(dtype, 6, 2, 9, 160, 64)
    mask, ranges = torch.zeros(9, 65, dtype=dtype), torch.zeros(2, 9, dtype=torch.int64)
    used = torch.zeros(key.shape[1], dtype=torch.bool)
    first = 0
    for start, count, rows in spans:
        own = slice(first, first + rows)
        mask[own, :count] = arguments(dtype, 6, 2, rows, count, 64)[3]
        mask[own, count:] = float("nan")
        ranges[0, own], ranges[1, own] = start, count
        used[start : start + count] = True
        first += rows
    key[:, ~used], value[:, ~used] = float("nan"), float("nan")
    together = attended(query, key, value, mask, ranges)
    expected = naive.compiled.attend(query, key, value, mask, ranges, 64**-0.5)
    assert torch.allclose(together.double(), expected.double(), atol=1e-2, rtol=1e-2)
    first = 0
    for start, count, rows in spans:
        own, slots = slice(first, first + rows), slice(start, start + count)
        alone = attended(
            query[:, own].repeat(1, 2, 1), key[:, slots], value[:, slots], mask[own, :count].repeat(2, 1)
        )  # twice, as the compiler takes a single row for another kernel
        assert torch.equal(alone[:rows], together[own])
        first += rows
