"""Recurrent layers of a traced forward: records of rows in slots, and the rows' tree, are arguments, as masks are.

A slot holds what a row gives its descendants: the input of its convolution, and its key, update and decay. They are
moved like keys when rows are committed. A pass first applies the records of the rows that were committed since the last
one to the matrices, then walks the tree step by step (`delta_rows`), so that a row's bits depend on its ancestors
alone. Does not know which models have such layers, nor how the kernel is compiled (delta.cpp.jinja).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.library import custom_op
from transformers.cache_utils import Cache, DynamicLayer

from foredraft.errors import UsageError
from foredraft.graph.layout import Layout
from foredraft.model.kv_cache import LayerShape, Span
from foredraft.model.mask import seen_rows
from foredraft.model.recurrent.layer import OperatorLayer, Reading
from foredraft.model.recurrent.state import convolution_windows, parents_of
from foredraft.model.support import cache_argument

_PROMPTS_DIFFER = "This model limits the steps of a prompt's tokens alone; it is not compiled."
_SHAPED = (1, 2)  # sequences, and tokens of each, that show what a model writes into its cache
_COLUMNS = 64  # of a matrix that are walked together; with keys of 128 they fill a first cache of 32 KiB


class Lineage(NamedTuple):
    """How the R rows of a pass and the H held ones before them descend from each other."""

    windows: torch.Tensor  # int64[R, L], the slots whose inputs each row's convolution takes
    slots: torch.Tensor  # int64[R], those of the rows, one after another; those of held rows come before them
    parents: torch.Tensor  # int64[H + R], as `parents_of` returns them
    pending: torch.Tensor  # int64[1], the number of records before them that are applied to the matrices first


def lineage(layout: Layout, span: Span) -> Lineage:
    """Return that of the rows of one sequence, whose records are in the slots of `span`."""
    assert span.window is not None, "of records, it is the taps of a convolution"
    held, taps = len(layout.held), span.window
    seen, chain = seen_rows(layout), layout.ancestors is None
    windows = convolution_windows(seen, taps, chain=chain) + (span.stored - held - (taps - 1))
    parents = np.arange(-1, layout.rows - 1) if chain else parents_of(seen)
    slots = np.arange(span.stored, span.stored + layout.rows)
    return Lineage(*(torch.from_numpy(each) for each in (windows, slots, parents, np.array([span.pending]))))


class TracedLayer(OperatorLayer):
    """A recurrent layer of a pass that is traced; its buffers are written in place."""

    def __init__(
        self, steps: Lineage, inputs: torch.Tensor, records: torch.Tensor, matrices: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self._steps, self._inputs, self._records, self._matrices = steps, inputs, records, matrices

    def in_prompt(self) -> torch.Tensor:
        raise UsageError(_PROMPTS_DIFFER)

    def convolution(self, taps: int, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        del taps
        self._inputs.index_copy_(2, self._steps.slots, inputs[None, None])
        return self._inputs[0, 0], self._steps.windows

    def read(self, asked: Reading) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys, values, gates, strengths = asked
        matrices, advanced = self._matrices
        decays, (_, *steps) = gates[..., 0].exp(), self._steps
        read = delta_rows(queries, keys, values, decays, strengths, *steps, matrices, advanced, self._records)
        return read, matrices


@custom_op("foredraft::delta_rows", mutates_args=())
def delta_rows(
    query: torch.Tensor,  # float32[R, Hk, K]
    key: torch.Tensor,  # float32[R, Hk, K]; each serves H / Hk heads in a row, as each query does
    value: torch.Tensor,  # float32[R, H, V]
    decay: torch.Tensor,  # float32[R, H]
    strength: torch.Tensor | None,  # float32[R, H], of the delta rule; None where the update is the value
    slots: torch.Tensor,  # these three as `Lineage` has them
    parents: torch.Tensor,
    pending: torch.Tensor,
    matrices: torch.Tensor,  # float32[H, V / T, K, T], after the last applied record
    advanced: torch.Tensor,  # the same, written: with the pending records applied; not written if there are none
    records: torch.Tensor,  # float32[1, 1, C, Hk K + H V + H], written: keys, updates, decays
) -> torch.Tensor:
    """Return what rows read, float32[R, H, V]; used where nothing is compiled, and to test the kernel.

    The compiler is not told that two buffers are written: nothing else in the graph touches them, and it would copy
    what it believes to change.
    """
    heads, groups = value.shape[1], value.shape[1] // key.shape[1]
    sizes = (key[0].numel(), value[0].numel(), heads)
    rows, first = len(query), int(slots[0]) - (len(parents) - len(query))

    def record(slot: int) -> list[torch.Tensor]:
        keys, updates, decays = records[0, 0, slot].split(sizes)
        return [keys.view(*key.shape[1:]).repeat_interleave(groups, 0), updates.view(heads, -1), decays[:, None, None]]

    def applied(state: torch.Tensor, slot: int) -> torch.Tensor:
        keys, updates, decays = record(slot)
        return state * decays + keys[..., None] * updates[:, None]

    state = matrices.transpose(1, 2).flatten(2)
    for slot in range(first - int(pending), first):
        state = applied(state, slot)
    if int(pending):
        advanced.copy_(state.unflatten(2, (-1, matrices.shape[-1])).transpose(1, 2))
    states, read = {-1: state}, []
    for node, parent in enumerate(parents.tolist()):
        row, slot = node - (len(parents) - rows), first + node
        if row >= 0:
            new = value[row]
            if strength is not None:
                seen = (states[parent] * key[row].repeat_interleave(groups, 0)[..., None]).sum(1)
                new = strength[row][:, None] * (new - decay[row][:, None] * seen)
            records[0, 0, slot] = torch.cat([key[row].flatten(), new.flatten(), decay[row]])
        if parent != node:
            states[node] = applied(states[parent], slot)
        if row >= 0:
            read.append((states[node] * query[row].repeat_interleave(groups, 0)[..., None]).sum(1))
    return torch.stack(read)


@delta_rows.register_fake
def _(_query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_others: object) -> torch.Tensor:
    return torch.empty_like(value)


class _ShapeLayer(OperatorLayer):
    """A recurrent layer that finds out what its operators are given."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[LayerShape] = []

    def in_prompt(self) -> torch.Tensor:
        raise UsageError(_PROMPTS_DIFFER)

    def convolution(self, taps: int, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes.append(LayerShape(1, inputs.shape[1], taps))
        return inputs, torch.zeros(len(inputs), taps, dtype=torch.int64)

    def read(self, asked: Reading) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = asked.keys, asked.values
        heads, size = values.shape[1:]
        tile = next(each for each in (_COLUMNS, _COLUMNS // 2, _COLUMNS // 4, 1) if size % each == 0)
        matrices = (heads, size // tile, keys.shape[-1], tile)
        record = keys[0].numel() + values[0].numel() + heads
        whole = [each._replace(record=record, matrices=matrices) for each in self.shapes]
        # what the kernel has no code for: matrices without a convolution, and decays or vectors of other sizes
        self.shapes = whole if tile > 1 and asked.gates.shape[-1] == 1 else []
        return values, values


def write_states(model: Any, layers: list[Any]) -> None:
    """Run a model uncompiled with these layers of a cache, into which it writes the states of one text."""
    ids = torch.zeros(_SHAPED, dtype=torch.int64)
    cache = {cache_argument(model): Cache(layers=layers)}
    with torch.inference_mode():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **cache)


def layer_shapes(model: Any, recurrent: Sequence[bool]) -> tuple[LayerShape, ...]:
    """Return the shapes of what each layer keeps, as the model writes it; UsageError where that is not compiled."""
    layers: list[Any] = [_ShapeLayer() if each else DynamicLayer() for each in recurrent]
    write_states(model, layers)
    shapes = []
    for number, layer in enumerate(layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(layer, _ShapeLayer):
            if len(layer.shapes) != 1:
                raise UsageError(
                    f"Layer {number} of this model keeps a recurrent state other than one convolution and matrices "
                    "with one decay a head and values of a multiple of 16 numbers; it is not compiled."
                )
            shapes += layer.shapes
        elif keys is None or values is None or keys.shape != values.shape:
            raise UsageError(f"Layer {number} of this model keeps no keys and values of one shape; it is not compiled.")
        else:
            shapes.append(LayerShape(keys.shape[1], keys.shape[3]))
    return tuple(shapes)
