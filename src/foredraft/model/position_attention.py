"""Attention from the rows of a draft tree to the slots of a KV cache, in the order of positions.

A drafted token's ancestors lie at other slots than in plain decoding, and a sum in another order rounds in another way.
So each row has two parts. Its far positions are committed whatever is drafted, and lie at the slots of their numbers:
rows share what is read. Its near positions are gathered from their slots, for each row. Where the parts meet depends on
the row's position alone, as long as it is at most `DEPTH` after the committed tokens. Does not know what rows mean.
"""

import torch
from torch.library import custom_op
from torch.nn.functional import scaled_dot_product_attention

# positions after the committed ones up to which a row is summed as in plain decoding: twice the depth of `auto`'s draft
DEPTH = 32
TILE = 32  # near positions that are summed together, from a multiple of it on; chosen


@custom_op("foredraft::attend_by_position", mutates_args=(), device_types="cpu")
def attend_by_position(
    query: torch.Tensor,  # float[heads, R, D]
    key: torch.Tensor,  # float[key heads, C, D]; each serves heads / key heads query heads in a row
    value: torch.Tensor,  # the same
    near: torch.Tensor,  # int32[R, W], as `near_slots` returns them
    bounds: torch.Tensor,  # int64[3, R], the same
    scaling: float,  # of the scores
) -> torch.Tensor:
    """Attend from `R` rows to their slots: what runs on CPUs, and what the kernels for devices are tested by.

    Returns float[R, heads * D] in the dtype of `query`; sums are in float32.
    """
    attended = []
    for row, (first, middle, count) in enumerate(bounds.T.tolist()):
        slots = torch.cat([torch.arange(first, middle), near[row, :count]])
        rows, keys, values = (each.float() for each in (query[:, row, None], key[:, slots], value[:, slots]))
        attended.append(scaled_dot_product_attention(rows, keys, values, scale=scaling, enable_gqa=True)[:, 0])
    return torch.stack(attended).to(query.dtype).flatten(1)


@attend_by_position.register_fake
def _(query: torch.Tensor, *_others: object) -> torch.Tensor:
    heads, rows, size = query.shape
    return query.new_empty(rows, heads * size)


def near_slots(
    committed: torch.Tensor, positions: torch.Tensor, sees: torch.Tensor, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots of each row's near positions, int32[R, W], and its bounds, int64[3, R], computed on the device.

    These are the first of its far slots, the slot after the last, and the number of its near ones. Rows are told as to
    `slot_mask`; what `sees` says, in order, holds the positions up to the row's own.
    """
    width = sees.shape[1]
    seen = sees.sum(dim=1)
    first = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0)
    middle = torch.minimum(positions - DEPTH, committed).div(TILE, rounding_mode="floor") * TILE
    middle = torch.maximum(middle, first)
    columns = torch.arange(width, device=sees.device)
    rank = torch.where(sees, sees.cumsum(dim=1) - 1, width)
    order = sees.new_zeros((sees.shape[0], width + 1), dtype=torch.int64)
    order = order.scatter(1, rank, columns.expand_as(rank))
    at = middle[:, None] + torch.arange(width + TILE, device=sees.device)
    own = at - (positions + 1 - seen)[:, None]
    slots = torch.where(own < 0, at, committed + order.gather(1, own.clamp(0, width)))
    return slots.to(torch.int32), torch.stack([first, middle, positions + 1 - middle])
