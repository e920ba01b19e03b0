"""Attention masks: which slots each row of a pass may attend to, as values added to attention scores.

They are 0 where a row may attend, else the dtype's lowest value. Made from layouts and cache slots, not from the model.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit

from foredraft.graph.layout import Layout
from foredraft.graph.tree import BoolArray


def seen_rows(layout: Layout, window: int | None = None) -> BoolArray:
    """Return which of the H held rows and its own R rows each row of a pass may attend to, bool[R, H + R]."""
    seen = np.tri(layout.rows, dtype=np.bool_) if layout.ancestors is None else layout.ancestors
    if window is None:
        return seen
    near: BoolArray = layout.positions[:, None] - np.append(layout.held, layout.positions) < window
    return seen & near


def joined_mask(
    layouts: Sequence[Layout], committed: Sequence[int], dtype: torch.dtype, window: int | None = None
) -> torch.Tensor:
    """Return the additive mask of several sequences' R rows, [1, 1, R, W]; a row's columns are its sequence's slots.

    These are so many `committed` ones before the root, then the held rows and the pass's own; W is the largest sum of
    the three. A row sees no more than `window` positions, its own included; None for all. The mask is on the CPU.
    """
    rows = sum(layout.rows for layout in layouts)
    width = max(count + len(layout.held) + layout.rows for count, layout in zip(committed, layouts, strict=True))
    lowest = _lowest(dtype)
    mask, first = np.zeros((1, 1, rows, width), lowest.dtype), 0  # numpy's calls take a third of the time of torch's
    for layout, count in zip(layouts, committed, strict=True):
        own = mask[0, 0, first : first + layout.rows]
        if layout.rows > 1 or len(layout.held):  # a row alone sees all rows
            _hide(own, seen_rows(layout, window), count, lowest)
        if window is not None:
            before = np.arange(layout.at - count, layout.at)
            own[:, :count][layout.positions[:, None] - before >= window] = lowest
        first += layout.rows
    return torch.from_numpy(mask).view(dtype)


@njit(cache=True)
def _hide(mask: Any, seen: BoolArray, first: int, lowest: Any) -> None:
    """Set what is not seen, of columns from `first` on, to `lowest`, in one call: each takes some 10 microseconds."""
    for row in range(len(seen)):
        for column in range(seen.shape[1]):
            if not seen[row, column]:
                mask[row, first + column] = lowest


@cache
def _lowest(dtype: torch.dtype) -> np.signedinteger[Any]:
    """Return the bits of a dtype's lowest value; numpy has no bfloat16."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    found: np.signedinteger[Any] = torch.tensor([torch.finfo(dtype).min], dtype=dtype).view(bits).numpy()[0]
    return found


def slot_mask(
    committed: torch.Tensor, positions: torch.Tensor, sees: torch.Tensor, window: int | None, visible: int,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return the additive mask of one sequence, [1, 1, R, visible], computed on the device, for recorded passes.

    A row at one of the `positions`, int64[R], sees the first `committed` slots, int64[], which hold the positions from
    0 on, as far as its `window` reaches, and those of the next C that `sees`, bool[R, C], says.
    """
    slots = torch.arange(visible, device=sees.device)
    after = slots - committed
    seen = sees.index_select(1, after.clamp(0, sees.shape[1] - 1)) & (after < sees.shape[1]) & (after >= 0)
    before = after < 0 if window is None else (after < 0) & (positions[:, None] - slots < window)
    mask = torch.zeros(seen.shape, dtype=dtype, device=sees.device)
    return mask.masked_fill(~(seen | before), torch.finfo(dtype).min)[None, None]
