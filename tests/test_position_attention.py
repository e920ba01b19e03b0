"""Attention of recorded passes: its sums, and that drafted rows sum in the order of plain decoding."""

import itertools

import numpy as np
import pytest
import torch

from foredraft.graph.layout import lay_out
from foredraft.graph.tree import chain_parents
from foredraft.model.fused import COLUMNS
from foredraft.model.mask import seen_rows, slot_mask
from foredraft.model.position_attention import DEPTH, attend_by_position, near_slots
from support.families import random_tree

DEEP = np.zeros(DEPTH + 20, np.int32), chain_parents(DEPTH + 20)
LAYOUTS = [
    lay_out(1, *tree, at)
    for at in (0, 5, 31, 32, 150, 400)
    for tree in (random_tree(np.random.default_rng(at), 60), (DEEP[0][:0], DEEP[1][:0]), DEEP)
]


def rows_of(layout, window):
    """Return what a recorded pass gets of a layout whose slots from 0 on hold the committed positions."""
    seen = seen_rows(layout, window)
    sees = torch.zeros(layout.rows, COLUMNS, dtype=torch.bool)
    sees[:, : seen.shape[1]] = torch.from_numpy(seen)
    return torch.tensor(int(layout.positions[0])), torch.from_numpy(layout.positions), sees


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_attend_to_what_their_mask_says(layout, window):
    rows, slots = rows_of(layout, window), int(layout.positions[0]) + layout.rows + 9
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(4, layout.rows, 16, generator=generator)
    key, value = torch.randn(2, 2, slots, 16, generator=generator)
    mask = slot_mask(*rows, window, slots, torch.float32)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 0), value.repeat_interleave(2, 0), mask, scale=0.3
    )
    found = attend_by_position(query, key, value, *near_slots(*rows, window), 0.3)
    torch.testing.assert_close(found, expected.transpose(0, 1).flatten(1))


@pytest.fixture
def kernels():
    import foredraft.model.device_attention  # noqa: F401  # registers the kernels of CUDA devices; needs Triton


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(9, 3, 64), (8, 8, 128), (6, 2, 80), (4, 4, 16)])
def test_a_gpu_attends_as_the_reference_does(heads, key_heads, size, dtype, error, kernels):
    for layout, window in itertools.product(LAYOUTS, (None, 3, 100)):
        rows, slots = rows_of(layout, window), int(layout.positions[0]) + layout.rows + 9
        query = torch.randn(layout.rows, heads, size).to(dtype).transpose(0, 1)
        given = query, *torch.randn(2, key_heads, slots, size).to(dtype), *near_slots(*rows, window)
        found = attend_by_position(*(each.to("cuda") for each in given), 0.3)
        torch.testing.assert_close(found.cpu(), attend_by_position(*given, 0.3), atol=error, rtol=error)


@pytest.mark.gpu
def test_on_a_gpu_a_row_has_the_same_bits_alone_and_in_a_tree_of_rows(kernels):
    tree = random_tree(np.random.default_rng(2), 63)
    rows = rows_of(lay_out(1, *tree, 400), None)
    query = torch.randn(64, 9, 64).to("cuda", torch.bfloat16).transpose(0, 1)
    store = torch.randn(2, 3, 512, 64).to("cuda", torch.bfloat16)
    near, bounds = (each.to("cuda") for each in near_slots(*rows, None))
    found = attend_by_position(query, *store, near, bounds, 0.3)
    for row in range(64):
        pair = [row, 0]
        alone = attend_by_position(query[:, pair], *store, near[pair], bounds[:, pair], 0.3)
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_drafted_row_is_divided_as_in_plain_decoding_and_reads_positions_in_order(layout, window):
    committed, positions, sees = rows_of(layout, window)
    near, bounds = near_slots(committed, positions, sees, window)
    for row, at in enumerate(positions):
        alone = torch.zeros(1, COLUMNS, dtype=torch.bool)
        alone[0, 0] = True
        _, plain = near_slots(at, at[None], alone, window)
        first, middle, count = bounds[:, row].tolist()
        if at <= committed + DEPTH:
            assert [first, middle, count] == plain[:, 0].tolist()
        assert middle <= committed or middle == first
        read = [slot if slot < committed else int(positions[slot - committed]) for slot in near[row, :count].tolist()]
        assert read == list(range(middle, at + 1))
        assert all(sees[row, slot - committed] for slot in near[row, :count] if slot >= committed)
