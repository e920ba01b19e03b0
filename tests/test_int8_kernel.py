"""The kernel of compiled forwards for products of eight-bit integers: exact, whatever the shapes."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from foredraft.model.compiled.kernels import INT8_VECTORS, LANES, multiply_int8, own_kernels, packed


class Product(nn.Module):
    """Rows by weights that a compiler may take for constants."""

    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, rows):
        return multiply_int8(rows, self.weight)


def integers(*shape):
    return torch.from_numpy(np.random.default_rng(sum(shape)).integers(-128, 128, shape).astype(np.int8))


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "size"), [(48, 64), (7, 10), (200, 384)], ids=["strip", "uneven", "strips"])
def test_the_kernel_multiplies_exactly(columns, size, tmp_path):
    weight = integers(columns, size)
    rows_of = torch.export.Dim("rows", min=2, max=256)
    with warnings.catch_warnings(), own_kernels():
        warnings.simplefilter("ignore")  # torch's compiler warns of its own calls
        program = torch.export.export(Product(weight), (integers(4, size),), dynamic_shapes=({0: rows_of},))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "product.pt2"), inductor_configs={"freezing": True}
        )
        compiled = torch._inductor.aoti_load_package(path)
    for count in (2, 7, 8, 9, 30):
        rows = integers(count, size)
        expected = rows.long() @ weight.long().t()
        assert torch.equal(compiled(rows).long(), expected)
        assert torch.equal(multiply_int8(rows, weight).long(), expected)


def test_packed_weights_hold_every_weight_once():
    weight = integers(50, 9)
    strips, start = packed(weight)
    assert strips.shape == (2, 3, INT8_VECTORS * LANES, 4)
    lines = strips.transpose(1, 2).flatten(2).flatten(0, 1)
    assert torch.equal(lines[:50, :9], weight)
    assert not lines[50:].any()
    assert not lines[:, 9:].any()
    assert torch.equal(start[:50], -128 * weight.sum(1, dtype=torch.int32))
