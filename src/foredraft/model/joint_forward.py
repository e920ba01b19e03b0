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

from foredraft.errors import UnsupportedModelError
from foredraft.graph.layout import lay_out_text
from foredraft.model.compiled.attention import replaced_attention
from foredraft.model.compiled.export import FunctionalForward, row_arguments
from foredraft.model.compiled.recurrence import write_states
from foredraft.model.families import INDEXED, UNMASKED_LAYERS
from foredraft.model.kv_cache import Span, TreeLayer
from foredraft.model.recurrent.joint import JointStates
from foredraft.model.recurrent.state import Rows, StateLayer
from foredraft.model.support import inspect

_EAGER = "eager_attention_forward"  # beside a model's code: its attention where none is registered


class JointForward:
    """Runs passes of a model with the arguments of `FunctionalForward`, ranges included, and its buffers' `shapes`.

    The buffers are of `dtype`; a state of its recurrent layers has `state_size` bytes. UnsupportedModelError if a layer
    chooses tokens by an index, or does not ask transformers which attention to use, as a pass of two sequences shows.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._model, self._forward = model, FunctionalForward(model, records=False).eval()
        self._kernel, self._attended = model.config._attn_implementation, 0  # noqa: SLF001  # transformers has no public name for it
        self.windows, support = self._forward.windows, inspect(model.config)
        if INDEXED in support.layer_types:
            raise UnsupportedModelError("The model chooses tokens by an index of the slots of all sequences.")
        self._recurrent = [number for number, each in enumerate(support.recurrent) if each]
        self.shapes, self.state_size = written_shapes(model)
        layouts, rows = [lay_out_text(np.zeros(1, np.int64), 0)] * 2, np.arange(2)
        places = {window: [(0, 0), (1, 0)] for window in self.windows}
        buffers = [torch.zeros(1, heads, 2, size, dtype=dtype) for heads, size in self.shapes]
        half = len(buffers) // 2
        steps = self.states(3).begin(layouts, [(0, 1), (0, 2)])
        self(*row_arguments(layouts, places, rows, dtype, steps=steps), buffers[:half], buffers[half:], [])
        if self._attended != sum(kind not in UNMASKED_LAYERS for kind in support.layer_types):
            raise UnsupportedModelError("The model's attention is not transformers', and takes one sequence at a time.")

    def states(self, _most: int) -> JointStates:
        """Return places for states, which take memory when they are written to."""
        return JointStates(self._recurrent, self._model.device)

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        *rows, ranges, states, keys, values, matrices = arguments
        self._forward.states = states or {}
        # a layer that keeps what keys are computed from (MLA) computes them of all slots that it is given
        used = max(int(each.sum(dim=0).max()) for each in ranges)
        keys, values = ([buffer[:, :, :used] for buffer in buffers] for buffers in (keys, values))
        with replaced_attention(self._model, self._attend):
            results: tuple[torch.Tensor, ...] = self._forward(*rows, ranges, None, keys, values, matrices)
        return results

    def _attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor, **options: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Attend as transformers' interface asks, [1, heads, R, D] to [1, key heads, C, D], by what `module` uses."""
        own = ALL_ATTENTION_FUNCTIONS.get(self._kernel) or vars(sys.modules[type(module).__module__])[_EAGER]
        ranges = self._forward.ranges[self._forward.layer_of(module)]
        ranges, counts = ranges.unique_consecutive(dim=1, return_counts=True)
        attended, row = [], 0
        for (start, width), count in zip(ranges.T.tolist(), counts.tolist(), strict=True):
            rows, slots = slice(row, row + count), slice(start, start + width)
            options["attention_mask"] = attention_mask[:, :, rows, :width] if count > 1 else None  # one row sees all
            attended.append(own(module, query[:, :, rows], key[:, :, slots], value[:, :, slots], **options)[0])
            row += count
        self._attended += 1
        return torch.cat(attended, 1), None


def written_shapes(model: Any) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return the numbers of key heads and their sizes of all layers' keys and then values, as the model writes them.

    They are (0, 0) for a layer that writes none, such as one that reads another's. With them comes the number of bytes
    of a state of the recurrent layers.
    """
    layers: list[Any] = [
        (StateLayer if each else TreeLayer)(Span(None, capacity=2)) for each in inspect(model.config).recurrent
    ]
    states = [layer for layer in layers if isinstance(layer, StateLayer)]
    for layer in states:
        layer.begin(Rows(lay_out_text(np.zeros(2, np.int64), 0), 0, model.device))
    write_states(model, layers)
    for layer in states:
        layer.commit(np.arange(2))
    written = [getattr(layer, name, None) for name in ("keys", "values") for layer in layers]
    shapes = tuple((0, 0) if each is None else (each.shape[1], each.shape[3]) for each in written)
    return shapes, sum(layer.size for layer in states)
