"""Which slots each row of a pass may attend to, as what transformers adds to attention scores.

Every mask of the package is made here. Knows layouts and the slots of a cache; not the model.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from foredraft.graph.layout import Layout
from foredraft.graph.tree import BoolArray
from foredraft.model.kv_cache import Span

_BITS = {torch.float32: (np.uint32, 0xFF7FFFFF), torch.bfloat16: (np.uint16, 0xFF7F)}
"""Of the dtypes that a compiled pass has: the unsigned integer of the same size, and the dtype's least value in it."""


def attention_mask(layout: Layout, span: Span, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the additive mask [1, 1, R, S + R]: 0 where a row may attend, else the dtype's least value.

    Args:
        layout: R rows.
        span: S slots are stored, those of the rows held included.
        dtype: of the mask.
        device: where it is wanted.
    """
    rows, committed = layout.rows, span.stored - len(layout.held)
    if rows == 1 and span.window is None and not len(layout.held):
        return torch.zeros((1, 1, 1, span.stored + 1), dtype=dtype, device=device)
    if layout.ancestors is not None and span.window is None and device.type == "cpu" and dtype in _BITS:
        unsigned, least = _BITS[dtype]
        bits = np.zeros((1, 1, rows, span.stored + rows), unsigned)
        _block(bits[0, 0], layout.ancestors, committed, least)
        return torch.from_numpy(bits).view(dtype)
    blocked = np.zeros((rows, span.stored + rows), np.bool_)
    if layout.ancestors is not None:
        np.logical_not(layout.ancestors, out=blocked[:, committed:])
    elif rows > 1:
        blocked[:, span.stored :] = ~np.tri(rows, dtype=np.bool_)
    if span.window is not None:
        keys = np.concatenate([np.arange(span.base, span.base + committed), layout.held, layout.positions])
        blocked |= layout.positions[:, None] - keys[None, :] >= span.window
    return _additive(torch.from_numpy(blocked), dtype).to(device)


@njit(cache=True)
def _block(
    bits: npt.NDArray[np.uint16] | npt.NDArray[np.uint32], ancestors: BoolArray, committed: int, least: int
) -> None:
    """Set `bits`, [R, S + R], to `least` where a row may not attend to a slot behind the committed ones."""
    for row in range(ancestors.shape[0]):
        for slot in range(ancestors.shape[1]):
            if not ancestors[row, slot]:
                bits[row, committed + slot] = least


def ranged_mask(layouts: Sequence[Layout], committed: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask of several sequences' rows, [1, 1, R, W]; columns are the row's own sequence's slots.

    Args:
        layouts: R rows in all.
        committed: how many slots each sequence has committed; the rows' own follow, W is the most of both together.
        dtype: of the mask, float32 or bfloat16.
    """
    unsigned, least = _BITS[dtype]
    rows = sum(layout.rows for layout in layouts)
    width = max(at + layout.rows for at, layout in zip(committed, layouts, strict=True))
    bits = np.zeros((rows, width), unsigned)
    first = 0
    for layout, at in zip(layouts, committed, strict=True):
        if layout.ancestors is not None:
            _block(bits[first : first + layout.rows], layout.ancestors, at, least)
        elif layout.rows > 1:
            _block_later(bits[first : first + layout.rows], at, least)
        first += layout.rows
    return torch.from_numpy(bits[None, None]).view(dtype)


@njit(cache=True)
def _block_later(bits: npt.NDArray[np.uint16] | npt.NDArray[np.uint32], committed: int, least: int) -> None:
    """Set `bits`, [R, W], to `least` where a row of a text stands before the slot of a later row."""
    for row in range(len(bits)):
        bits[row, committed + row + 1 : committed + len(bits)] = least


def first_slots(rows: int, count: int) -> torch.Tensor:
    """Return the ranges of a pass whose rows all look at the first `count` slots, int64[2, R]: starts and counts."""
    ranges = np.zeros((2, rows), np.int64)
    ranges[1] = count
    return torch.from_numpy(ranges)


def slot_mask(committed: torch.Tensor, sees: torch.Tensor, visible: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the same mask made on the device alone, for passes that are recorded.

    Args:
        committed: int64[], how many slots every row sees.
        sees: bool[R, C], which of those behind them each row sees besides; none that follow.
        visible: how many slots there are.
        dtype: the mask's.

    Returns:
        float[1, 1, R, visible], 0 where a row may attend, else the dtype's least value.
    """
    behind = torch.arange(visible, device=sees.device) - committed
    chosen = sees.index_select(1, behind.clamp(0, sees.shape[1] - 1)) & (behind < sees.shape[1])
    return _additive(~(chosen | (behind < 0)), dtype)


def _additive(blocked: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float[1, 1, R, S]: the dtype's least value where bool[R, S] is true, else 0."""
    mask = torch.zeros(blocked.shape, dtype=dtype, device=blocked.device)
    return mask.masked_fill_(blocked, torch.finfo(dtype).min)[None, None]
