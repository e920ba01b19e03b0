"""Which slots each row of a pass may attend to, as what transformers adds to attention scores.

Knows layouts and the slots of a cache; not the model.
"""

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
    mask = torch.zeros(blocked.shape, dtype=dtype)
    mask.masked_fill_(torch.from_numpy(blocked), torch.finfo(dtype).min)
    return mask[None, None].to(device)


@njit(cache=True)
def _block(
    bits: npt.NDArray[np.uint16] | npt.NDArray[np.uint32], ancestors: BoolArray, committed: int, least: int
) -> None:
    """Set `bits`, [R, S + R], to `least` where a row may not attend to a slot behind the committed ones."""
    for row in range(ancestors.shape[0]):
        for slot in range(ancestors.shape[1]):
            if not ancestors[row, slot]:
                bits[row, committed + slot] = least
