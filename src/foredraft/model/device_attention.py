"""`attend_by_position` on a CUDA device, written in Triton.

torch's own kernels give each head of a pass to one block of threads, or copy the keys that grouped heads share, so a
pass of few rows leaves most of the device idle. Here the far slots are split among blocks, and heads that share keys
share a block; a second kernel attends to each row's near slots and joins the splits (Dao et al., "Flash-Decoding for
long-context inference", 2023). The splits lie at fixed slots, so a row's result does not depend on how many rows or
slots there are. Registers itself when it is imported, which needs Triton, a part of torch's builds for CUDA.
"""

import torch
import triton
import triton.language as tl

from foredraft.model.position_attention import TILE, attend_by_position

# slots of a split, by whether key heads are few; the other number took 1.4 times as long for 64 rows of a 7B, and 1.2
# times of SmolLM2, on an H200 without near slots
_SPLIT = {False: 128, True: 64}
_FEW_HEADS = 4  # key heads at most that are few; SmolLM2 has 3, and 8 took less time with large splits
_TILE = 4096  # numbers of keys multiplied at once, 32 slots of heads of 128; 64 took 1.3 times as long there
_JOINED = 16  # splits that are joined at once; chosen: 2,048 slots
_LEAST_SIZE = 16  # of a side of a product, a limit of Triton's
_ROWS = 64  # of a block; one number, because the device multiplies fewer by other instructions; chosen


@triton.jit
def _split_kernel(
    query, key, value, bounds, sums, weights, scaling, rows, groups, size, splits,
    query_head, query_row, key_head, key_slot, value_head, value_slot,
    split_slots: tl.constexpr, block_rows: tl.constexpr, block_slots: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    """Attend from the rows of the heads that share keys to one split of the far slots."""
    shared, number = tl.program_id(1), tl.program_id(2)
    each = tl.program_id(0) * block_rows + tl.arange(0, block_rows)  # of the heads' rows, head by head
    row, head = each % rows, shared * groups + each // rows
    there = each < groups * rows
    begin = tl.load(bounds + row, mask=there, other=0).to(tl.int32)
    middle = tl.load(bounds + rows + row, mask=there, other=0).to(tl.int32)
    start, stop = number * split_slots, tl.minimum((number + 1) * split_slots, tl.max(middle, 0))
    if start >= stop:
        return
    numbers = tl.arange(0, block_size)
    inside = numbers[None, :] < size
    places = head * query_head + row * query_row
    q = tl.load(query + places[:, None] + numbers[None, :], there[:, None] & inside, other=0.0)
    largest = tl.full([block_rows], -float("inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    summed = tl.zeros([block_rows, block_size], tl.float32)
    for at in range(start, stop, block_slots):
        slot = at + tl.arange(0, block_slots)
        used = (slot < stop)[:, None] & inside
        k = tl.load(key + shared * key_head + slot[:, None] * key_slot + numbers[None, :], used, other=0.0)
        v = tl.load(value + shared * value_head + slot[:, None] * value_slot + numbers[None, :], used, other=0.0)
        seen = (slot[None, :] >= begin[:, None]) & (slot[None, :] < tl.minimum(middle, stop)[:, None])
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
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
    query, key, value, near, bounds, sums, weights, found, scaling, rows, heads, groups, size, splits, width,
    query_head, query_row, key_head, key_slot, value_head, value_slot,
    split_slots: tl.constexpr, at_once: tl.constexpr, tile: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    """Attend from a row of a head to its near slots, and join the splits of its far ones."""
    row, head = tl.program_id(0), tl.program_id(1)
    begin, middle = tl.load(bounds + row).to(tl.int32), tl.load(bounds + rows + row).to(tl.int32)
    count = tl.load(bounds + 2 * rows + row).to(tl.int32)
    numbers = tl.arange(0, block_size)
    exists = numbers < size
    q = tl.load(query + head * query_head + row * query_row + numbers, exists, other=0.0).to(tl.float32)
    largest, total, summed = -float("inf"), 0.0, tl.zeros([block_size], tl.float32)
    for at in range(0, count, tile):
        place = at + tl.arange(0, tile)
        used = place < count
        slot = tl.load(near + row * width + place, used, other=0)
        inside = used[:, None] & exists[None, :]
        shared = head // groups
        k = tl.load(key + shared * key_head + slot[:, None] * key_slot + numbers[None, :], inside, other=0.0)
        v = tl.load(value + shared * value_head + slot[:, None] * value_slot + numbers[None, :], inside, other=0.0)
        scores = tl.where(used, tl.sum(k.to(tl.float32) * q[None, :], 1) * scaling, -float("inf"))
        before, largest = largest, tl.maximum(largest, tl.max(scores, 0))
        share, kept = tl.exp(scores - largest), tl.exp(before - largest)
        total = total * kept + tl.sum(share, 0)
        summed = summed * kept + tl.sum(share[:, None] * v.to(tl.float32), 0)
    last = tl.where(begin < middle, tl.cdiv(middle, split_slots), 0)
    for at in range(begin // split_slots, last, at_once):
        number = at + tl.arange(0, at_once)
        used = number < last
        place = (number * heads + head) * rows + row
        levels = tl.load(weights + place, used, other=-float("inf"))
        totals = tl.load(weights + splits * heads * rows + place, used, other=0.0)
        inside = used[:, None] & exists[None, :]
        parts = tl.load(sums + place[:, None] * size + numbers[None, :], inside, other=0.0)
        before, largest = largest, tl.maximum(largest, tl.max(levels, 0))
        share, kept = tl.exp(levels - largest), tl.exp(before - largest)
        total = total * kept + tl.sum(totals * share, 0)
        summed = summed * kept + tl.sum(parts * share[:, None], 0)
    out = found + (row * heads + head) * size + numbers
    tl.store(out, (summed / total).to(found.dtype.element_ty), exists)


def attend_on_device(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, near: torch.Tensor, bounds: torch.Tensor,
    scaling: float,
) -> torch.Tensor:  # fmt: skip
    """Attend as `attend_by_position` does, with tensors on a CUDA device, in float32, bfloat16 or float16."""
    heads, rows, size = query.shape
    key_heads, slots = key.shape[:2]
    split = _SPLIT[key_heads <= _FEW_HEADS]
    groups, splits = heads // key_heads, triton.cdiv(slots, split)
    if query.stride(2) != 1:
        query = query.contiguous()
    found = query.new_empty(rows, heads * size)
    sums = query.new_empty((splits, heads, rows, size), dtype=torch.float32)
    weights = query.new_empty((2, splits, heads, rows), dtype=torch.float32)  # the largest score, and the sum
    block_size = max(_LEAST_SIZE, triton.next_power_of_2(size))
    strides = *query.stride()[:2], *key.stride()[:2], *value.stride()[:2]
    _split_kernel[triton.cdiv(groups * rows, _ROWS), key_heads, splits](
        query, key, value, bounds, sums, weights, scaling, rows, groups, size, splits, *strides,
        split_slots=split, block_rows=_ROWS, block_slots=max(_LEAST_SIZE, _TILE // block_size), block_size=block_size,
    )  # fmt: skip
    _join_kernel[rows, heads](
        query, key, value, near, bounds, sums, weights, found, scaling, rows, heads, groups, size, splits,
        near.shape[1], *strides,
        split_slots=split, at_once=_JOINED, tile=TILE, block_size=block_size,
    )  # fmt: skip
    return found


attend_by_position.register_kernel("cuda", attend_on_device)
