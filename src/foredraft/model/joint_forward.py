"""The uncompiled model as a forward of rows of several sequences: one pass, but attention for each sequence alone.

The attention is the model's own, sinks and caps of scores included. Does not depend on what the rows mean, nor on which
slots a sequence has.
"""

import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foredraft.graph.layout import lay_out_text
from foredraft.model.compiled.export import FunctionalForward, buffer_shapes, joint_arguments, replaced_attention

_EAGER = "eager_attention_forward"  # beside the code of a model: its attention where none is registered


class JointForward:
    """Runs passes of a model with the arguments of `FunctionalForward`, ranges included, which it describes.

    `shapes` are those of the buffers, keys and then values: key heads and their size.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._forward = model, FunctionalForward(model).eval()
        self.shapes = buffer_shapes(model)
        self._kernel = model.config._attn_implementation  # noqa: SLF001  # transformers has no public name for it
        self._attended = 0  # layers, in the last pass

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        self._attended = 0
        with replaced_attention(self._model, self._attend):
            results: tuple[torch.Tensor, ...] = self._forward(*arguments)
        return results

    def joins(self, dtype: torch.dtype) -> bool:
        """Run two sequences of one token, and return whether every layer asked transformers which attention to use."""
        layouts, layers = [lay_out_text(np.zeros(1, np.int64), 0)] * 2, len(self._forward.window_of)
        buffers = [torch.zeros(1, heads, 2, size, dtype=dtype) for heads, size in self.shapes]
        arguments = joint_arguments(layouts, [0, 1], [True, True], self._forward.windows, dtype)
        self(*arguments, buffers[:layers], buffers[layers:])
        return self._attended == layers

    def _attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Attend as transformers' interface asks, [1, heads, R, D] to [1, key heads, C, D], by what `module` uses."""
        own = ALL_ATTENTION_FUNCTIONS.get(self._kernel) or vars(sys.modules[type(module).__module__])[_EAGER]
        ranges, counts = self._forward.ranges[int(module.layer_idx)].unique_consecutive(dim=1, return_counts=True)  # type: ignore[arg-type]  # every attention of transformers has it
        self._attended += 1
        attended, row = [], 0
        for (start, width), count in zip(ranges.T.tolist(), counts.tolist(), strict=True):
            rows, slots = slice(row, row + count), slice(start, start + width)
            seen = mask[:, :, rows, :width] if count > 1 else None  # one row sees all of its range
            attended.append(own(module, query[:, :, rows], key[:, :, slots], value[:, :, slots], seen, **options)[0])
            row += count
        return torch.cat(attended, 1), None


@torch.inference_mode()
def joint_forward(model: Any, dtype: torch.dtype) -> JointForward | None:
    """Return the joint forward of a model whose keys and values are of `dtype`, or None if it has none."""
    try:
        forward = JointForward(model)
        return forward if forward.joins(dtype) else None
    except Exception:  # noqa: BLE001  # there is no list of what attention that is not transformers' raises
        return None
