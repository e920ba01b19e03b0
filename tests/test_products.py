"""Products of compiled forwards: ours divide them among threads, and make one of those that take the same rows."""

import pytest
import torch
from torch import nn
from torch._inductor import aoti_compile_and_package

from foredraft.model.compiled.build import OPTIONS
from foredraft.model.compiled.kernels import own_kernels
from foredraft.model.compiled.library import CompiledLibrary, weights_apart, weights_beside
from foredraft.model.compiled.rewriting import merge_products

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own calls

# as many strips of columns as threads or more; fewer, so that rows are divided too; deeper than half of a cache
SHAPES = ((96, 640), (64, 30), (6016, 48))


class Products(nn.Module):
    """Products of the first numbers of each row by weights of several shapes, in float32 and in bfloat16."""

    def __init__(self):
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16)
        self.layers = nn.ModuleList(nn.Linear(*shape, bias=False, dtype=each) for each in dtypes for shape in SHAPES)

    def forward(self, rows):
        return tuple(layer(rows[:, : layer.in_features].to(layer.weight.dtype)) for layer in self.layers)


@pytest.fixture
def three_threads():
    """Packages of whole models have one thread in these tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_products_are_right_however_they_are_divided(three_threads, tmp_path):
    torch.manual_seed(3)
    model, rows = Products().eval(), torch.randn(256, max(depth for depth, _ in SHAPES))
    any_rows = torch.export.Dim("rows", min=2, max=256)
    path = tmp_path / "products.pt2"
    with torch.no_grad(), own_kernels(), weights_apart(weights_beside(path)) as apart:
        program = torch.export.export(model, (rows[:4],), strict=False, dynamic_shapes=({0: any_rows},))
        aoti_compile_and_package(program, package_path=str(path), inductor_configs=OPTIONS | apart)
    package = CompiledLibrary(path)
    whole = package.run([rows])
    for count in (1, 2, 5, 8, 16, 17, 31, 33, 256):
        results = package.run([rows[:count]])
        for layer, result, among_all in zip(model.layers, results, whole, strict=True):
            given = rows[:count, : layer.in_features].to(layer.weight.dtype)
            expected = given.double() @ layer.weight.double().T
            assert torch.allclose(result.double(), expected, atol=2e-2, rtol=2e-2)
            assert torch.equal(result, among_all[:count])


class Attending(nn.Module):
    """Queries, keys and values of the same rows, with a bias or without, and a gate that is not taken apart."""

    def __init__(self, *, bias):
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(32, size, bias=bias) for size in (48, 16, 16))
        self.gate = nn.Linear(32, 8)

    def forward(self, rows):
        heads = [
            layer(rows).view(1, -1, layer.out_features // 16, 16) for layer in (self.queries, self.keys, self.values)
        ]
        return *heads, self.gate(rows).sigmoid()


@pytest.mark.parametrize("bias", [False, True])
def test_what_is_taken_apart_into_heads_is_one_product_and_nothing_else(bias):
    torch.manual_seed(7)
    model, rows = Attending(bias=bias).eval(), torch.randn(1, 5, 32)
    program = torch.export.export(model, (rows,), strict=False)
    merge_products(program)
    linear = [node for node in program.graph.nodes if node.target is torch.ops.aten.linear.default]
    assert [node.meta["val"].shape[-1] for node in linear] == [80, 8]
    for ours, theirs in zip(program.module()(rows), model(rows), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
