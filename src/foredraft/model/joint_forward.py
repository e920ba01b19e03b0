"""The uncompiled model as a forward of rows of several sequences: one pass, but attention for each sequence alone.

The attention is the model's own, sinks and caps of scores included. Does not depend on what the rows mean, nor on which
slots a sequence has.
"""

import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foredraft.errors import UnsupportedModelError
from foredraft.graph.layout import lay_out_text
from foredraft.model.compiled.export import FunctionalForward, replaced_attention, row_arguments
from foredraft.model.compiled.recurrence import write_states
from foredraft.model.support import inspect

_EAGER = "eager_attention_forward"  # beside a model's code: its attention where none is registered


class JointForward:
    """Runs passes of a model with the arguments of `FunctionalForward`, ranges included, and its buffers' `shapes`.

    The buffers are of `dtype`. UnsupportedModelError unless every layer asks transformers which attention to use, as a
    pass of two sequences shows.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._model, self._forward = model, FunctionalForward(model).eval()
        self._kernel, self._attended = model.config._attn_implementation, 0  # noqa: SLF001  # transformers has no public name for it
        self.shapes, layers = buffer_shapes(model), len(self._forward.window_of)
        rows, places = np.arange(2), {window: [(0, 0), (1, 0)] for window in self._forward.windows}
        buffers = [torch.zeros(1, heads, 2, size, dtype=dtype) for heads, size in self.shapes]
        arguments = row_arguments([lay_out_text(np.zeros(1, np.int64), 0)] * 2, places, rows, dtype)
        self(*arguments, buffers[:layers], buffers[layers:])
        if self._attended != layers:
            raise UnsupportedModelError("The model's attention is not transformers', and takes one sequence at a time.")

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        with replaced_attention(self._model, self._attend):
            results: tuple[torch.Tensor, ...] = self._forward(*arguments, [])  # no layer keeps matrices
        return results

    def _attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor, **options: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Attend as transformers' interface asks, [1, heads, R, D] to [1, key heads, C, D], by what `module` uses."""
        own = ALL_ATTENTION_FUNCTIONS.get(self._kernel) or vars(sys.modules[type(module).__module__])[_EAGER]
        layer = int(module.layer_idx)  # type: ignore[arg-type]  # every attention of transformers has it
        ranges, counts = self._forward.ranges[layer].unique_consecutive(dim=1, return_counts=True)
        attended, row = [], 0
        for (start, width), count in zip(ranges.T.tolist(), counts.tolist(), strict=True):
            rows, slots = slice(row, row + count), slice(start, start + width)
            options["attention_mask"] = attention_mask[:, :, rows, :width] if count > 1 else None  # one row sees all
            attended.append(own(module, query[:, :, rows], key[:, :, slots], value[:, :, slots], **options)[0])
            row += count
        self._attended += 1
        return torch.cat(attended, 1), None


def buffer_shapes(model: Any) -> tuple[tuple[int, int], ...]:
    """Return the number of key heads and their size of each layer's keys and then each layer's values.

    They are those that the model writes; (0, 0) for a layer that writes none, such as one that reads another's.
    """
    layers = [DynamicLayer() for _ in inspect(model.config).windows]
    write_states(model, layers)
    states = [layer.keys for layer in layers] + [layer.values for layer in layers]
    return tuple((0, 0) if each is None else (each.shape[1], each.shape[3]) for each in states)
