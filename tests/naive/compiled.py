"""Attention and products of compiled forwards, as the operations that have these names."""

import torch

from foredraft.model.compiled.block_layers import rows_of
from foredraft.model.compiled.blocks import STRIP


def attend(query, key, value, mask, ranges, scaling, sinks=None, softcap=0.0):
    precise = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[0] // key.shape[0]
    attended = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
    for start, count in set(map(tuple, ranges.T.tolist())):
        rows = (ranges[0] == start) & (ranges[1] == count)
        slots = slice(start, start + count)
        keys, values = (each[:, slots].to(precise).repeat_interleave(groups, 0) for each in (key, value))
        scores = query[:, rows].to(precise) * scaling @ keys.mT
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = scores + mask[rows, :count].to(precise)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].to(precise).expand(-1, len(mask[rows]), 1)], -1)
        weights = torch.softmax(scores, -1)[..., :count]
        attended[rows] = (weights @ values).to(query.dtype).transpose(0, 1)
    return attended.flatten(1)


def multiply_experts(rows, weights, experts):
    product = rows.new_empty(len(rows), weights.shape[1])
    for expert in experts.unique().tolist():
        product[experts == expert] = rows[experts == expert] @ weights[expert].T
    return product


def multiply_blocks(rows, blocks, precise):
    product = rows.float() @ rows_of(blocks, torch.arange(len(blocks) * STRIP)).T
    return product if precise else product.to(rows.dtype)


def multiply_expert_blocks(rows, blocks, experts):
    matrices = torch.stack([rows_of(each, torch.arange(len(each) * STRIP)) for each in blocks])
    return multiply_experts(rows.float(), matrices, experts).to(rows.dtype)
