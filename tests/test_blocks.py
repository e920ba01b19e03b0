"""Products with a GGUF file's integers give what its dequantised weights give, to a row alone as among others."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from torch import nn
from torch._inductor import aoti_compile_and_package

from foredraft.model.compiled.block_layers import (
    BlockLinear,
    product_bytes,
    quantised_weights,
    round_weights,
    rows_of,
)
from foredraft.model.compiled.blocks import STRIP, QuantisedRows, layout_of, packed_blocks, read_blocks, rounded_blocks
from foredraft.model.compiled.build import OPTIONS
from foredraft.model.compiled.kernels import own_kernels
from foredraft.model.compiled.library import CompiledLibrary, weights_apart, weights_beside
from foredraft.model.compiled.rewriting import gate_products, merge_products
from foredraft.model.gguf.files import parts_of
from foredraft.model.gguf.reader import opened
from foredraft.model.layers import shared_copy
from foredraft.model.machine import multiplies_integers

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
READ = {  # which GGUF's package reads and does not write; the places of their scales in 16 bits
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
DEPTHS, COLUMNS = (96, 544), 192  # both leave blocks over where eight are tiled together
MANY_DEPTHS = (256, 1280)


def tensors_in(file):
    return opened(parts_of(file))[1]


def quantised(kind, columns, depth):
    """Return random weights in a GGUF format as it is read, and dequantised by GGUF's own reader."""
    rng, which = np.random.default_rng(depth), GGMLQuantizationType[kind]
    if kind in READ:  # any bytes are weights, but for their scales
        numbers, size = GGML_QUANT_SIZES[which]
        data = rng.integers(0, 256, (columns, depth // numbers, size), dtype=np.uint8)
        for place in READ[kind]:
            scales = (rng.random((columns, depth // numbers, 1)) * 2e-4).astype(np.float16)
            data[..., place : place + 2] = scales.view(np.uint8)
        data = data.reshape(columns, -1)
    else:
        data = quants.quantize(rng.normal(size=(columns, depth)).astype(np.float32), which)
    return read_blocks(kind, data), torch.from_numpy(quants.dequantize(data, which))


def unpacked_blocks(blocks):
    """Return float32[N, K], the numbers of what `packed_blocks` made."""
    strips, count, size = blocks.shape
    layout = layout_of(size, blocks.dtype)
    every = blocks.flatten(1).numpy().view(np.uint8)
    size = STRIP * layout.numbers * layout.bits // 8 * count
    stored, rest = every[:, :size].reshape(strips, -1, 1, STRIP, 4), np.ascontiguousarray(every[:, size:])
    if layout.bits == 4:
        stored = np.concatenate([stored & 15, stored >> 4], axis=2)
    integers = stored.reshape(strips, count, -1, STRIP, 4).swapaxes(2, 3).reshape(strips, count, STRIP, layout.numbers)
    scales = rest.view(np.float16).astype(np.float32).reshape(strips, count, -1, STRIP, 1)
    numbers = (integers.astype(np.float32) + layout.least) * scales[:, :, 0]
    if layout.minima:
        numbers += scales[:, :, 1]
    return torch.from_numpy(np.ascontiguousarray(numbers.swapaxes(1, 2)).reshape(strips * STRIP, -1))


def write_file(path, name, data, kind, parts=1):
    """Write a GGUF file, or one of several parts, with one quantised tensor."""
    writer = GGUFWriter(path, "weights")
    writer.add_uint16("split.count", parts)
    writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", [*KINDS, *READ])
def test_blocks_hold_what_the_file_is_dequantised_to(kind):
    matrix, expected = quantised(kind, COLUMNS, MANY_DEPTHS[0] if kind in READ else DEPTHS[0])
    assert torch.equal(matrix.dequantised(), expected)
    unpacked = unpacked_blocks(packed_blocks(matrix))
    # scales that the file composes of two numbers are rounded to 11 bits, as the others are in the file
    exact = torch.equal(unpacked, expected)
    assert exact if kind in KINDS else torch.allclose(unpacked, expected, atol=2**-11 * expected.abs().max(), rtol=0)
    numbers = torch.randint(0, COLUMNS, (2, 7))
    assert torch.equal(rows_of(packed_blocks(matrix), numbers), unpacked[numbers])


def test_formats_that_the_kernel_does_not_read_are_left_alone(tmp_path):
    write_file(tmp_path / "a.gguf", "zeros", np.zeros((STRIP, 66), np.uint8), GGMLQuantizationType.TQ2_0)
    rows = QuantisedRows(tensors_in(tmp_path / "a.gguf"), torch.bfloat16)
    assert rows.packed(torch.zeros(STRIP, 256, dtype=torch.bfloat16)) is None


def test_rows_of_every_part_of_a_split_file_are_found(tmp_path):
    random, weights = np.random.default_rng(0), []
    for number in (1, 2):
        stored = quants.quantize(random.normal(size=(STRIP, 64)).astype(np.float32), GGMLQuantizationType.Q8_0)
        part = tmp_path / f"a-{number:05}-of-00002.gguf"
        write_file(part, f"part.{number}", stored, GGMLQuantizationType.Q8_0, parts=2)
        weights.append(torch.from_numpy(quants.dequantize(stored, GGMLQuantizationType.Q8_0)).bfloat16())
    rows = QuantisedRows(tensors_in(tmp_path / "a-00001-of-00002.gguf"), torch.bfloat16)
    assert all(rows.packed(weight) is not None for weight in weights)
    together = torch.cat(weights)[[1, STRIP, 0, *range(2, STRIP), *range(STRIP + 1, 2 * STRIP)]]  # as gates and ups are
    assert torch.equal(unpacked_blocks(rows.packed(together)).bfloat16(), together)
    assert rows.packed(torch.stack(weights)).shape[0] == len(weights)


def test_a_row_of_zeros_in_matrices_of_two_formats_hides_neither(tmp_path):
    random, weights = np.random.default_rng(0), []
    for number, kind in enumerate((GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0), start=1):
        values = random.normal(size=(STRIP, 64)).astype(np.float32)
        values[3] = 0
        stored = quants.quantize(values, kind)
        write_file(tmp_path / f"a-{number:05}-of-00002.gguf", f"part.{number}", stored, kind, parts=2)
        weights.append(torch.from_numpy(quants.dequantize(stored, kind)).bfloat16())
    rows = QuantisedRows(tensors_in(tmp_path / "a-00001-of-00002.gguf"), torch.bfloat16)
    for weight in weights:
        assert torch.equal(unpacked_blocks(rows.packed(weight)).bfloat16(), weight)


def test_what_we_round_is_what_gguf_rounds():
    weight = torch.from_numpy(np.random.default_rng(0).normal(size=(COLUMNS, 96)).astype(np.float32))
    weight[0] = 0
    expected = quants.dequantize(quants.quantize(weight.numpy(), GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert torch.equal(rounded_blocks(weight).dequantised(), torch.from_numpy(expected))


def test_rounding_a_model_that_drafts_leaves_what_it_shares_as_it_was():
    target = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 40)).to(torch.bfloat16)
    before = [each.clone() for each in target.parameters()]
    drafting = shared_copy(target)
    round_weights(drafting, {target[1].weight.data_ptr()})
    assert all(map(torch.equal, before, target.parameters()))
    rounded = rounded_blocks(target[0].weight)
    assert torch.equal(drafting[0].weight, rounded.dequantised().to(torch.bfloat16))
    assert torch.equal(drafting[0].bias, target[0].bias)
    assert drafting[1].weight is target[1].weight
    drafting.get_output_embeddings = lambda: drafting[2]
    with quantised_weights(drafting, QuantisedRows(None, torch.bfloat16)) as count:
        assert count == 2
        assert torch.equal(drafting[0].blocks, packed_blocks(rounded))
        # 64 x 64 numbers of 8 bits with a scale of two bytes for every 32, 40 columns filled up to 48, and a matrix in
        # bfloat16
        assert product_bytes(drafting) == (64 + 48) * 64 * 34 // 32 + 2 * 64 * 64


class Scaled(nn.Embedding):
    """An embedding as Gemma's, which multiplies what it looks up."""

    def forward(self, token_ids):
        return super().forward(token_ids) * torch.tensor(3.0, dtype=self.weight.dtype)


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_an_embedding_looks_up_the_blocks_of_the_head_that_it_is_tied_to(kind, tmp_path):
    stored = quants.quantize(
        np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32), GGMLQuantizationType.Q8_0
    )
    write_file(tmp_path / "a.gguf", "token_embd.weight", stored, GGMLQuantizationType.Q8_0)
    model = nn.ModuleDict({"head": nn.Linear(64, 40, bias=False), "embedding": kind(40, 64)}).bfloat16()
    weight = torch.from_numpy(quants.dequantize(stored, GGMLQuantizationType.Q8_0)).bfloat16()
    model["head"].weight = model["embedding"].weight = nn.Parameter(weight)
    model.get_output_embeddings = lambda: model["head"]
    before, ids = model["embedding"], torch.arange(40).view(2, 20)
    expected = before(ids)
    with quantised_weights(model, QuantisedRows(tensors_in(tmp_path / "a.gguf"), torch.bfloat16)):
        assert torch.equal(model["embedding"](ids), expected)
        assert model["embedding"].blocks is model["head"].blocks
        assert not list(model.parameters())
    assert model["embedding"] is before


PRECISE = 1  # which product returns float32


class Products(nn.Module):
    """Products of each row's first numbers by weights of two depths, and one scaled by a gate that another makes."""

    def __init__(self, kind, gate):
        super().__init__()
        depths = MANY_DEPTHS if kind in READ else DEPTHS
        self.short, self.depth = depths
        self.gate, all_depths = gate, (*depths, depths[0], depths[1], depths[1])
        self.expected = [quantised(kind, COLUMNS, depth)[1] for depth in all_depths]
        self.layers = nn.ModuleList(
            BlockLinear(
                packed_blocks(quantised(kind, COLUMNS, depth)[0]), None, COLUMNS,
                precise=number == PRECISE,
            )
            for number, depth in enumerate(all_depths)
        )  # fmt: skip

    def forward(self, rows):
        short = rows[..., : self.short]
        gated = self.layers[3](rows) * self.gate(self.layers[4](rows))
        return self.layers[0](short), self.layers[1](rows), self.layers[2](short).sigmoid(), gated


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own calls
@pytest.mark.parametrize(  # of 4 bits and of 8
    ("kind", "gate", "precise"),
    [("Q4_1", nn.functional.silu, False), ("Q6_K", nn.GELU("tanh"), True)],
    ids=["Q4_1", "Q6_K, precise"],
)
def test_a_row_is_what_the_dequantised_weights_give_alone_and_among_others(kind, gate, precise, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")  # torch's caches do not see our kernels' sources
    if not multiplies_integers():
        pytest.skip("this processor has no kernel for them")
    torch.manual_seed(3)
    model = Products(kind, gate).eval()
    rows = torch.randn(1, 256, model.depth).bfloat16()
    path = tmp_path / "blocks.pt2"
    with torch.no_grad(), own_kernels(precise=precise), weights_apart(weights_beside(path)) as apart:
        dynamic = ({1: torch.export.Dim("rows", min=2, max=256)},)
        program = torch.export.export(model, (rows[:, :4],), strict=False, dynamic_shapes=dynamic)
        merge_products(program)
        gate_products(program)
        products = [node for node in program.graph.nodes if "multiply_blocks" in str(node.target)]
        aoti_compile_and_package(program, package_path=str(path), inductor_configs=OPTIONS | apart)
    assert len(products) == 3
    package = CompiledLibrary(path)
    whole = package.run([rows])
    assert [each.dtype for each in whole] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    assert not torch.equal(whole[PRECISE], whole[PRECISE].bfloat16().float())
    for count in (1, 2, 5, 8, 15, 16, 17, 31, 32, 33, 100, 256):
        results = package.run([rows[:, :count].contiguous()])
        for number, (result, among_all) in enumerate(zip(results, whole, strict=True)):
            weights = model.expected[number].double()
            expected = rows[0, :count, : weights.shape[1]].double() @ weights.T
            if number == 2:
                expected = expected.sigmoid()
            if number == 3:
                expected *= gate(rows[0, :count].double() @ model.expected[4].double().T)
            error = (result[0] - expected).norm(dim=-1) / expected.norm(dim=-1)
            if number == PRECISE:  # rows in 8 bits: half a step is 1 / 254 of a block's largest number
                assert (error.max() < 1e-3) == precise
            assert error.max() < 2e-2
            assert torch.equal(result[0], among_all[0, :count])
    broken = rows[:, :3].clone()
    broken[0, 1, 5] = torch.inf
    for result in package.run([broken])[: len(DEPTHS)]:
        assert not result[0, 1].isfinite().any()
        assert result[0, ::2].isfinite().all()


class Combined(nn.Module):
    """What a function makes of parts of a product, so wide each."""

    def __init__(self, function, width):
        super().__init__()
        self.layer = BlockLinear(packed_blocks(quantised("Q8_0", COLUMNS, 64)[0]), None, COLUMNS, precise=False)
        self.function, self.width = function, width

    def forward(self, rows):
        return self.function(*self.layer(rows).chunk(COLUMNS // self.width, -1))


silu = nn.functional.silu


@pytest.mark.parametrize(
    ("function", "width", "gated"),
    [
        (lambda gate, up: silu(gate) * up, COLUMNS // 2, True),
        (lambda gate, up: up * silu(gate), COLUMNS // 2, True),
        (lambda gate, up: silu(up) * gate, COLUMNS // 2, False),
        (lambda gate, up: silu(gate) * up + gate, COLUMNS // 2, False),
        (lambda gate, up: nn.functional.gelu(gate) * up, COLUMNS // 2, False),  # the exact one has no kernel
        (lambda gate, up, _: silu(gate) * up, COLUMNS // 3, False),
    ],
    ids=["gated", "turned", "second half", "read twice", "exact gelu", "thirds"],
)
def test_a_gate_is_taken_into_a_product_if_nothing_else_reads_its_halves(function, width, gated):
    with torch.no_grad():
        program = torch.export.export(Combined(function, width), (torch.zeros(1, 3, 64).bfloat16(),), strict=False)
    gate_products(program)
    (product,) = [node for node in program.graph.nodes if "multiply_blocks" in str(node.target)]
    assert (product.args[3:] == ("silu",)) == gated
