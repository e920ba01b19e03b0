"""Recurrent layers of a traced forward: records of rows in slots, and the rows' tree, are arguments, as masks are.

A slot holds what a row gives its descendants: the input of its convolution, and its key, update and decay. They are
moved like keys when rows are committed. A pass first applies the records of the rows that were committed since the last
one to the matrices, then walks the trees of its sequences step by step (`delta_rows`), so that a row's bits depend on
its ancestors alone. Does not know which models have such layers, nor how the kernel is compiled (delta.cpp.jinja).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache

from foredraft.errors import UsageError
from foredraft.graph.layout import Layout, lay_out_text
from foredraft.graph.tree import I64
from foredraft.model.compiled.package import MOST_ROWS
from foredraft.model.kv_cache import PENDING, LayerShape, Span, TreeLayer
from foredraft.model.mask import seen_rows
from foredraft.model.recurrent.layer import BothLayer, OperatorLayer, Reading
from foredraft.model.recurrent.state import Rows, StateLayer, convolution_windows, parents_of
from foredraft.model.support import cache_argument, inspect

_SHAPED = (1, 2)  # sequences, and tokens of each, that show what a model writes into its cache
_COLUMNS = 64  # of a matrix that are walked together; with keys of 128 they fill a first cache of 32 KiB


class Lineage(NamedTuple):
    """How the R rows of a pass and the H held ones before them descend from each other, and from what was committed."""

    windows: torch.Tensor  # int64[R, L], the slots whose inputs each row's convolution takes
    slots: torch.Tensor  # int64[R], those of the rows, one after another; those of held rows come before them
    parents: torch.Tensor  # int64[H + R], as `parents_of` returns them; of sequence `b`, a root's is -1 - b
    # int64[B, 5], of each sequence: the place of the matrices that are read, and of those that are written or -1, the
    # first slot of the records that are applied first and their number, and 1 if all its rows are too, as known text is
    sequences: torch.Tensor
    prompt: torch.Tensor  # bool[R], which rows are of a prompt


def lineage(layout: Layout, span: Span, prompt: int = 0) -> Lineage:
    """Return that of the rows of one sequence, whose records are in the slots of `span`, after so long a `prompt`."""
    assert span.window is not None, "of records, it is the taps of a convolution"
    root = span.stored - len(layout.held)
    slots = np.arange(root - (span.window - 1), span.stored + layout.rows)
    windows, parents = _descent(layout, slots)
    written = 1 - span.at if span.pending >= PENDING else -1
    sequences = np.array([[span.at, written, root - span.pending, span.pending, 0]])
    given = (windows, slots[-layout.rows :], parents, sequences, layout.positions < prompt)
    return Lineage(*map(torch.from_numpy, given))


def _descent(layout: Layout, slots: I64) -> tuple[I64, I64]:
    """Return the windows and the parents of one sequence's rows.

    The slots are those of the committed inputs that its first row takes, then of the held rows, and of its rows.
    """
    seen, chain = seen_rows(layout), layout.ancestors is None
    windows = convolution_windows(seen, len(slots) - seen.shape[1] + 1, chain=chain)
    return slots[windows], np.arange(-1, layout.rows - 1) if chain else parents_of(seen)


class RecordStates:
    """The states of several sequences in numbered places, each made by a pass from that in another place.

    A state is not changed once it is committed. Its place has matrices, and slots for the inputs and records that they
    do not contain yet; slots before all of these are for the rows of a pass. Place 0 is the state before a text.
    """

    def __init__(self, shapes: Sequence[LayerShape], dtype: torch.dtype, most: int) -> None:
        """Make `most` places for layers of these shapes; memory is taken when it is written to."""
        self._taken = max(each.taps for each in shapes) - 1  # committed inputs that a first row's convolution takes
        self._next = 0  # the slot after the last pass's rows
        self._rows: dict[int, tuple[int, int]] = {}  # by the place that they make: the first, and how many are applied
        self._pending = [0] * most  # the number of each place's records
        planes = {number: (each.size, dtype) for number, each in enumerate(shapes) if each.taps}
        planes |= {len(shapes) + number: (shapes[number].values, torch.float32) for number in planes}
        self._stores, self.buffers = list[torch.Tensor](), dict[int, torch.Tensor]()
        for size, kind in dict.fromkeys(planes.values()):
            numbers = [number for number, plane in planes.items() if plane == (size, kind)]
            store = torch.empty(len(numbers), 1, self._first(most), size, dtype=kind)
            store[:, :, : self._first(1)] = 0
            self._stores.append(store)
            self.buffers |= dict(zip(numbers, store.split(1), strict=True))
        self.matrices = [torch.empty(most, *each.matrices) for each in shapes if each.matrices]
        for each in self.matrices:
            each[0] = 0

    def _first(self, place: int) -> int:
        """Return the first slot of a place."""
        return MOST_ROWS + place * (self._taken + MOST_ROWS)

    def begin(self, layouts: Sequence[Layout], places: Sequence[tuple[int, int]]) -> Lineage:
        """Return the lineage of a pass's rows; each sequence's read the first of its places, and make the second."""
        # not over rows that are not committed yet, where a batch is run in parts
        start = self._next if self._next + sum(layout.rows for layout in layouts) <= MOST_ROWS else 0
        windows, parents, sequences, row = list[I64](), list[I64](), [], start
        for number, (layout, (before, after)) in enumerate(zip(layouts, places, strict=True)):
            first, pending, known = self._first(before), self._pending[before], layout.ancestors is None
            committed = np.arange(first + pending, first + pending + self._taken)
            taken, own = _descent(layout, np.append(committed, np.arange(row, row + layout.rows)))
            windows.append(taken)
            parents.append(np.where(own < 0, -1 - number, own + row - start))
            sequences.append([before, after, first + self._taken, pending, known])
            self._rows[after] = row, layout.rows * known
            row += layout.rows
        self._next, slots = row, np.arange(start, row)
        prompt = np.zeros(len(slots), np.bool_)  # where it matters which are of one, texts share no passes
        given = (np.concatenate(windows), slots, np.concatenate(parents), np.array(sequences, np.int64), prompt)
        return Lineage(*map(torch.from_numpy, given))

    def commit(self, before: int, after: int, kept: I64) -> None:
        """Commit these of a sequence's rows in the last pass, ascending, to the place that it was given."""
        row, applied = self._rows[after]
        assert applied in (0, len(kept)), "known text is committed whole"
        committed = np.arange(self._first(before), self._first(before) + self._taken + self._pending[before])
        self._pending[after] = len(kept) - applied
        moved = np.append(committed, kept + row)
        moved = moved[len(moved) - self._taken - self._pending[after] :]  # not of -0 on, where none are kept
        for store in self._stores:
            store[:, :, self._first(after) : self._first(after) + len(moved)] = store[:, :, moved]


class TracedLayer(OperatorLayer):
    """A recurrent layer of a pass that is traced; its buffers are written in place."""

    def __init__(
        self, steps: Lineage, inputs: torch.Tensor, records: torch.Tensor, matrices: torch.Tensor | None
    ) -> None:
        super().__init__()
        self._steps, self._inputs, self._records, self._matrices = steps, inputs, records, matrices

    def in_prompt(self) -> torch.Tensor:
        return self._steps.prompt

    def convolution(self, taps: int, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        del taps
        self._inputs.index_copy_(2, self._steps.slots, inputs[None, None])
        return self._inputs[0, 0], self._steps.windows

    def read(self, asked: Reading) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys, values, gates, strengths, factors = asked.joined()
        assert self._matrices is not None, "its shape has matrices"
        steps = (self._steps.slots, self._steps.parents, self._steps.sequences)
        decays, rates = (gates.exp(), None) if factors is None else (gates, factors[1].T.contiguous())
        buffers = (self._matrices, self._records)
        read = torch.ops.foredraft.delta_rows(queries, keys, values, decays, strengths, *steps, *buffers, rates)
        return read if factors is None else read.mT, self._matrices


# Only compiled code walks trees: it returns what rows read, float32[R, H, V]. It is given queries and keys,
# float32[R, Hk, K], of which each serves H / Hk heads in a row; values, float32[R, H, V]; decays, float32[R, H, 1], or
# [R, H, K] with one for each number of a key, or [R, 1, V] with `rates`, float32[K, V], which multiplied by these are
# the logarithms of decays; strengths of the delta rule, float32[R, H], or None where the update is the value; slots,
# parents and sequences as `Lineage` has them; matrices, float32[N, H, V / T, K, T], written in the places of
# sequences; and records, float32[1, 1, C, D], written: keys, updates, decays.
# The compiler is not told that two buffers are written: nothing else in the graph touches them, and it would copy what
# it believes to change. No sequence reads a place that another one writes.
torch.library.define(
    "foredraft::delta_rows",
    "(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? strength, Tensor slots, Tensor parents, "
    "Tensor sequences, Tensor matrices, Tensor records, Tensor? rates=None) -> Tensor",
)
torch.library.register_fake("foredraft::delta_rows", lambda _query, _key, value, *_others: torch.empty_like(value))


class _ShapeLayer(OperatorLayer):
    """A recurrent layer that finds out what its operators are given."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[LayerShape] = []
        self._prompts = False

    def in_prompt(self) -> torch.Tensor:
        self._prompts = True
        return torch.ones(_SHAPED[1], dtype=torch.bool)

    def convolution(self, taps: int, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes.append(LayerShape(1, inputs.shape[1], 0, taps))
        return inputs, torch.zeros(len(inputs), taps, dtype=torch.int64)

    def read(self, asked: Reading) -> tuple[torch.Tensor, torch.Tensor]:
        _, keys, values, gates, *_ = asked.joined()
        heads, size = values.shape[1:]
        tile = next(each for each in (_COLUMNS, _COLUMNS // 2, _COLUMNS // 4, 1) if size % each == 0)
        matrices = (heads, size // tile, keys.shape[-1], tile)
        record = keys[0].numel() + values[0].numel() + gates[0].numel()
        # what the kernel has no code for: matrices without a convolution, several of them, and vectors of other sizes
        one = tile > 1 and not any(each.matrices for each in self.shapes)
        whole = [each._replace(values=record, prompts=self._prompts, matrices=matrices) for each in self.shapes]
        self.shapes = whole if one else []
        return asked.values, values


def write_states(model: Any, layers: list[Any]) -> None:
    """Run a model uncompiled with these layers of a cache, into which it writes the states of one text."""
    ids = torch.zeros(_SHAPED, dtype=torch.int64)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if (width := getattr(model, "embedded_width", 0)) > 0:  # a head's rows
        positions = torch.arange(_SHAPED[1]).expand(_SHAPED)
        given = {"inputs_embeds": torch.zeros(*_SHAPED, width, dtype=model.dtype), "position_ids": positions}
    with torch.inference_mode():
        model(use_cache=True, **given, **{cache_argument(model): Cache(layers=layers)})


def layer_shapes(model: Any) -> tuple[LayerShape, ...]:
    """Return the shapes of what each layer keeps, as the model writes it; UsageError where that is not compiled.

    After those of all layers come those of the states of layers that keep keys and values too.
    """
    recurrent = inspect(model.config).recurrent
    states = {number: _ShapeLayer() for number, each in enumerate(recurrent) if each}
    kept = [TreeLayer(Span(None, capacity=_SHAPED[1])) for _ in recurrent]
    write_states(model, [BothLayer(each, states[n]) if n in states else each for n, each in enumerate(kept)])
    shapes, both = list[LayerShape](), list[LayerShape]()
    for number, layer in enumerate(kept):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        own = states.get(number)
        if own is not None:
            if len(own.shapes) != 1:
                raise UsageError(
                    f"Layer {number} of this model keeps a recurrent state other than one convolution and matrices "
                    "with values of a multiple of 16 numbers; it is not compiled."
                )
            (shapes if keys is None else both).extend(own.shapes)
        if keys is None and own is not None:
            continue
        if keys is None or values is None:  # it attends to nothing, or to another layer's
            shapes.append(LayerShape(0, 0, 0))
        elif values.shape[3] not in (0, keys.shape[3]):
            raise UsageError(f"Layer {number} of this model keeps no keys and values of one shape; it is not compiled.")
        else:
            shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3]))
    return (*shapes, *both)


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
