"""Which slots each row of a pass may attend to, as what transformers adds to attention scores.

Every mask of the package is made here. Knows layouts and the slots of a cache; not the model.
"""

from collections.abc import Sequence

import numpy as np
import torch

from foredraft.graph.layout import Layout
from foredraft.graph.tree import BoolArray
from foredraft.model.kv_cache import Span


def seen_rows(layout: Layout) -> BoolArray:
    """Return bool[R, H + R]: which of the H rows held and then of its own R each row of a pass may attend to."""
    return np.tri(layout.rows, dtype=np.bool_) if layout.ancestors is None else layout.ancestors


def attention_mask(layout: Layout, span: Span, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the additive mask [1, 1, R, S + R]: 0 where a row may attend, else the dtype's least value.

    Args:
        layout: R rows.
        span: S slots are stored, those of the rows held included.
        dtype: of the mask.
        device: where it is wanted.
    """
    committed = span.stored - len(layout.held)
    mask = joined_mask([layout], [committed], dtype)
    if span.window is not None:
        keys = np.concatenate([np.arange(span.base, span.base + committed), layout.held, layout.positions])
        too_far = torch.from_numpy(layout.positions[:, None] - keys[None, :] >= span.window)
        mask.masked_fill_(too_far, torch.finfo(dtype).min)
    return mask.to(device)


def joined_mask(layouts: Sequence[Layout], committed: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask of several sequences' rows, [1, 1, R, W]; columns are the row's own sequence's slots.

    Args:
        layouts: R rows in all.
        committed: how many slots each sequence has committed; the rows held and the pass's own follow, and W is the
            most of all these together.
        dtype: of the mask.
    """
    rows = sum(layout.rows for layout in layouts)
    width = max(at + len(layout.held) + layout.rows for at, layout in zip(committed, layouts, strict=True))
    mask = torch.zeros((1, 1, rows, width), dtype=dtype)
    first = 0
    for layout, at in zip(layouts, committed, strict=True):
        blocked = torch.from_numpy(~seen_rows(layout))
        own = mask[0, 0, first : first + layout.rows, at : at + blocked.shape[1]]
        own.masked_fill_(blocked, torch.finfo(dtype).min)
        first += layout.rows
    return mask


def first_slots(rows: int, count: int) -> torch.Tensor:
    """Return the ranges of a pass whose rows all look at the first `count` slots, int64[2, R]: starts and counts."""
    return torch.tensor([[0], [count]]).repeat(1, rows)


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
    mask = torch.zeros(chosen.shape, dtype=dtype, device=sees.device)
    return mask.masked_fill_(~(chosen | (behind < 0)), torch.finfo(dtype).min)[None, None]
