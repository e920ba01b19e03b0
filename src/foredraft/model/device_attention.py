"""Attention on a CUDA device from the rows of a draft tree to the slots of a KV cache, written in Triton.

torch's own kernels give each head of a pass to one block of threads, or copy the keys that grouped heads share, so a
pass of few rows leaves most of the device idle. Here the slots are split among blocks, heads that share keys share a
block, and a second kernel joins the splits (Dao et al., "Flash-Decoding for long-context inference", 2023). The splits
lie at fixed slots, so a row's result does not depend on how many rows or slots there are. Registers itself as
`foredraft.model.compiled.kernels.attend` on CUDA devices when it is imported, which needs Triton, a part of torch's
builds for CUDA. Does not know what rows mean.
"""

import torch
import triton
import triton.language as tl

from foredraft.model.compiled.kernels import attend

_SPLIT = 128  # slots of a split: 64 and 256 take 1.1 and 0.9 times as long for 64 rows of a 7B, 1.0 and 1.3 of SmolLM2
_TILE = 4096  # numbers of keys multiplied at once: 32 slots of heads of 128; 64 slots take 1.6 times as long
_JOINED = 16  # splits that are joined at once; chosen: 2,048 slots
_LEAST_SIZE = 16  # of a side of a product, a limit of Triton's
_ROWS = (_LEAST_SIZE, 32, 64)  # of a block, for each head that shares its keys: the least that holds all; chosen


@triton.jit
def _split_kernel(
    query, key, value, mask, counts, sums, weights, scaling, rows, groups, size, columns, splits,
    key_head, key_slot, value_head, value_slot,
    split_slots: tl.constexpr, block_rows: tl.constexpr, block_slots: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    """Attend from the rows of the heads that share keys to one split of the slots."""
    shared, number = tl.program_id(1), tl.program_id(2)
    each = tl.program_id(0) * block_rows + tl.arange(0, block_rows)  # of the heads' rows, head by head
    row, head = each % rows, shared * groups + each // rows
    there = each < groups * rows
    start, stop = number * split_slots, tl.minimum((number + 1) * split_slots, tl.load(counts).to(tl.int32))
    if start >= stop:
        return
    numbers = tl.arange(0, block_size)
    inside = numbers[None, :] < size
    q = tl.load(query + (head * rows + row)[:, None] * size + numbers[None, :], there[:, None] & inside, other=0.0)
    largest = tl.full([block_rows], -float("inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    summed = tl.zeros([block_rows, block_size], tl.float32)
    for at in range(start, stop, block_slots):
        slot = at + tl.arange(0, block_slots)
        used = (slot < stop)[:, None] & inside
        k = tl.load(key + shared * key_head + slot[:, None] * key_slot + numbers[None, :], used, other=0.0)
        v = tl.load(value + shared * value_head + slot[:, None] * value_slot + numbers[None, :], used, other=0.0)
        seen = there[:, None] & (slot < stop)[None, :]
        added = tl.load(mask + row[:, None] * columns + slot[None, :], seen, other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling + added
        scores = tl.where(seen, scores, -float("inf"))
        before, largest = largest, tl.maximum(largest, tl.max(scores, 1))
        level = tl.where(largest == -float("inf"), 0.0, largest)
        share, kept = tl.exp(scores - level[:, None]), tl.exp(before - level)
        total = total * kept + tl.sum(share, 1)
        summed = summed * kept[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
    place = (number * groups * tl.num_programs(1) + head) * rows + row
    tl.store(sums + place[:, None] * size + numbers[None, :], summed, there[:, None] & inside)
    tl.store(weights + place, largest, there)
    tl.store(weights + splits * groups * tl.num_programs(1) * rows + place, total, there)


@triton.jit
def _join_kernel(
    sums, weights, counts, found, rows, heads, size, splits,
    split_slots: tl.constexpr, at_once: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    """Join the splits of a row of a head."""
    row, head, stop = tl.program_id(0), tl.program_id(1), tl.cdiv(tl.load(counts).to(tl.int32), split_slots)
    numbers = tl.arange(0, block_size)
    largest, total, summed = -float("inf"), 0.0, tl.zeros([block_size], tl.float32)
    for at in range(0, stop, at_once):
        number = at + tl.arange(0, at_once)
        used = number < stop
        place = (number * heads + head) * rows + row
        levels = tl.load(weights + place, used, other=-float("inf"))
        totals = tl.load(weights + splits * heads * rows + place, used, other=0.0)
        inside = used[:, None] & (numbers[None, :] < size)
        parts = tl.load(sums + place[:, None] * size + numbers[None, :], inside, other=0.0)
        before, largest = largest, tl.maximum(largest, tl.max(levels, 0))
        share, kept = tl.exp(levels - largest), tl.exp(before - largest)
        total = total * kept + tl.sum(totals * share, 0)
        summed = summed * kept + tl.sum(parts * share[:, None], 0)
    out = found + (row * heads + head) * size + numbers
    tl.store(out, (summed / total).to(found.dtype.element_ty), numbers < size)


def attend_on_device(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, ranges: torch.Tensor,
    scaling: float,
) -> torch.Tensor:  # fmt: skip
    """Attend as `attend` does, with tensors on a CUDA device, in float32, bfloat16 or float16.

    All rows must have the same range, from the first slot on.
    """
    heads, rows, size = query.shape
    key_heads, slots = key.shape[:2]
    groups, splits = heads // key_heads, triton.cdiv(slots, _SPLIT)
    query, mask = query.contiguous(), mask.contiguous()
    found = query.new_empty(rows, heads * size)
    sums = query.new_empty((splits, heads, rows, size), dtype=torch.float32)
    weights = query.new_empty((2, splits, heads, rows), dtype=torch.float32)  # the largest score, and the sum
    block = next((each for each in _ROWS if each >= groups * rows), _ROWS[-1])
    block_size = max(_LEAST_SIZE, triton.next_power_of_2(size))
    _split_kernel[triton.cdiv(groups * rows, block), key_heads, splits](
        query, key, value, mask, ranges[1], sums, weights, scaling, rows, groups, size, mask.shape[1], splits,
        *key.stride()[:2], *value.stride()[:2],
        split_slots=_SPLIT, block_rows=block, block_slots=_TILE // block_size, block_size=block_size,
    )  # fmt: skip
    _join_kernel[rows, heads](
        sums, weights, ranges[1], found, rows, heads, size, splits,
        split_slots=_SPLIT, at_once=_JOINED, block_size=block_size, num_warps=1,
    )  # fmt: skip
    return found


attend.register_kernel("cuda", attend_on_device)
