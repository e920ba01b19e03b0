"""Forward passes over the rows of several sequences at once, each row attending to its own sequence's slots.

A batch is one pass over slots of one arena: of a compiled forward whose kernels give a row the same bits whatever other
rows are in the pass, or of the uncompiled model, whose own attention, sinks and caps of scores included, runs for each
sequence alone. Does not depend on what the rows mean, nor on how a batch is put together.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from torch import nn

from foredraft.contracts import PassResult, Rows, Scores, TokenIds
from foredraft.errors import OutOfMemoryError, UnsupportedModelError
from foredraft.graph.layout import Layout, lay_out_text
from foredraft.model.arena import MOST_SLOTS, STATE_TOKENS, Arena, Lease
from foredraft.model.compiled.attention import replaced_attention
from foredraft.model.compiled.export import FunctionalForward, flat, row_arguments
from foredraft.model.compiled.package import MOST_ROWS, CompiledForward, runs_on_cpu
from foredraft.model.compiled.recurrence import RecordStates, written_shapes
from foredraft.model.families import INDEXED, UNMASKED_LAYERS
from foredraft.model.kv_cache import LayerShape
from foredraft.model.layers import LAST
from foredraft.model.recurrent.state import JointStates
from foredraft.model.support import inspect
from foredraft.model.target import TorchTarget, device_errors, scores_of_pass, states_of_pass

_EAGER = "eager_attention_forward"  # beside a model's code: its attention where none is registered
_PENDING = 16  # accepted rows of a step that a state is counted with; memory for more is taken when they occur; chosen
_LEAST_PLACES = 3  # of states: before a text, the one that a text's pass reads, and the one that it makes
_MOST_PLACES, _PLACES = 128, 32  # those of a batch, and of one that may fill the model's window; chosen


class _Uncompiled:
    """Runs passes of a model with the arguments of `FunctionalForward`, ranges included, and its buffers' `shapes`.

    The buffers are of `dtype`; a state of its recurrent layers has `state_size` bytes. UnsupportedModelError if a layer
    chooses tokens by an index, or does not ask transformers which attention to use, as a pass of two sequences shows.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # takes seconds to import

        self._model, self._forward = model, FunctionalForward(model, records=False).eval()
        self._kernel = ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation)  # noqa: SLF001  # transformers has no public name for it
        self._attended = 0
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
        own = self._kernel or vars(sys.modules[type(module).__module__])[_EAGER]
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


class _Compiled:
    """Runs compiled passes over several sequences, as `_Uncompiled` does others."""

    def __init__(self, target: TorchTarget, compiled: CompiledForward) -> None:
        self._library, self._dtype = compiled.library, target.dtype
        self._layers = compiled.record.shapes
        attending = zip(target.support.windows, self._layers, strict=False)  # after which states may come
        self.windows = tuple(dict.fromkeys(window for window, shape in attending if not shape.taps))
        attended = [LayerShape(0, 0, 0) if each.taps else each for each in self._layers]
        self.shapes = [(each.heads, each.size) for each in attended]
        self.shapes += [(each.heads, each.values) for each in attended]
        self.state_size = sum(
            (each.taps - 1 + _PENDING) * (each.size * target.dtype.itemsize + 4 * each.values)
            + 4 * (prod(each.matrices) if each.matrices else 0)
            for each in self._layers
            if each.taps
        )

    def states(self, most: int) -> RecordStates:
        """Return so many places for states."""
        return RecordStates(self._layers, self._dtype, most)

    def __call__(self, *arguments: Any) -> list[torch.Tensor]:
        return self._library.run(flat(arguments))


class JointPasses:
    """Runs one pass for all sequences, see `Passes`: compiled from when that is possible on, before by `forward`.

    Keys, values and states take at most `most_bytes`; None is room for two texts that fill the model's window. There is
    room for `tokens` tokens in any case.
    """

    keeps_prefixes = True
    most_rows = MOST_ROWS

    def __init__(
        self, target: TorchTarget, forward: _Uncompiled | _Compiled, most_bytes: int | None, hidden: tuple[int, ...],
        tokens: int,
    ) -> None:  # fmt: skip
        self.target, self._most_bytes, self._hidden, self._tokens = target, most_bytes, hidden, tokens
        self._begin(forward)

    def _begin(self, forward: _Uncompiled | _Compiled) -> None:
        """Begin with an empty arena for passes of `forward`."""
        self._run, state, most_bytes = forward, forward.state_size, self._most_bytes
        slot = sum(heads * size for heads, size in forward.shapes) * self.target.dtype.itemsize
        slots, places, kept = 2 * (self.target.window or MOST_SLOTS), _PLACES, None
        if most_bytes is not None:
            slots = int(max(most_bytes - _LEAST_PLACES * state, 0) // (slot + state / STATE_TOKENS))
            if self._tokens > slots:
                slots, kept = self._tokens, slots
            places = min(_LEAST_PLACES + slots // STATE_TOKENS, _MOST_PLACES)
        self._arena = Arena(forward.shapes, self.target.dtype, slots, forward.states if state else None, places, kept)
        self.close = self._arena.close
        self._buffers = dict(enumerate(self._arena.buffers))
        if self._arena.states is not None:
            self._buffers |= self._arena.states.buffers

    def returns(self, hidden: tuple[int, ...]) -> bool:
        return not set(hidden) - {LAST} or hidden == self._hidden

    def open(self, token_ids: TokenIds, capacity: int, owner: str) -> Lease:
        """Lease slots to a sequence, as `Arena.open` does."""
        if self._arena.states is not None and not self._arena.used:
            self._compile()  # states of compiled passes are others
        return self._arena.open(token_ids, capacity, owner)

    def _compile(self) -> None:
        """Run compiled passes from now on if the model was compiled meanwhile."""
        compiled = _compiled_pass(self.target, self._hidden) if isinstance(self._run, _Uncompiled) else None
        if compiled is not None and self._arena.states is not None:
            self._begin(compiled)
        elif compiled is not None:
            self._run = compiled

    @property
    def memory_use(self) -> float:
        """The share of the slots that is leased to unfinished sequences."""
        return self._arena.used / self._arena.most_slots

    def reserve(self, cache: Lease, layout: Layout) -> None:
        cache.reserve(layout.token_ids)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Rows]) -> list[PassResult]:
        start = perf_counter_ns()
        try:
            with device_errors(sum(each.layout.rows for each in rows), max(each.cache.length for each in rows)):
                found = self._pass(rows)
                return [PassResult(scores, perf_counter_ns() - start, states) for scores, states in found]
        except OutOfMemoryError as error:
            if len(rows) == 1:
                return [PassResult(error, perf_counter_ns() - start)]
        return [result for each in rows for result in self.forward([each])]  # smaller passes may find memory

    def _pass(self, parts: Sequence[Rows]) -> list[tuple[Scores | None, torch.Tensor | None]]:
        layouts, caches = [part.layout for part in parts], [part.cache for part in parts]
        rows = [layout.rows for layout in layouts]
        which = np.flatnonzero(np.repeat([part.scored for part in parts], rows))
        which = which if len(which) else np.zeros(1, np.int64)  # a pass scores one row at least
        places = {}
        for window in self._run.windows:  # layers with a window read nothing before that of the first row
            counts = [each.length if window is None else min(each.length, window - 1) for each in caches]
            places[window] = [(c.start + c.length - count, count) for c, count in zip(caches, counts, strict=True)]
        states, half = self._arena.states, len(self._buffers) // 2
        if states is None:
            self._compile()
        steps = None if states is None else states.begin(layouts, [(each.place, each.following) for each in caches])
        arguments = row_arguments(layouts, places, which, self.target.dtype, steps=steps)
        buffers = [self._buffers[number] for number in range(2 * half)]
        with self.target.waiting.one_pass(compiled=self.target.compiled is not None):
            results = self._run(*arguments, buffers[:half], buffers[half:], states.matrices if states else [])
        found: list[tuple[Scores | None, torch.Tensor | None]] = []
        start = row = 0  # of the scored rows, and of all, which have the states of layers before the last
        for count, part in zip(rows, parts, strict=True):
            tapped = [each[row : row + count] for each in results[4:]]
            own = [*(each[start : start + count] for each in results[:4]), *tapped]
            scores = scores_of_pass(own, part.hidden) if part.scored else None
            found.append((scores, None if part.scored or LAST in part.hidden else states_of_pass(own, part.hidden)))
            start, row = start + count * part.scored, row + count
        return found


def _compiled_pass(target: TorchTarget, hidden: tuple[int, ...]) -> _Compiled | None:
    """Return what runs joint passes compiled, if it can: not where a pass treats the rows of prompts otherwise."""
    compiled = target.compiled
    if compiled is None or not compiled.returns(hidden) or any(shape.prompts for shape in compiled.record.shapes):
        return None
    return _Compiled(target, compiled)


def joint_passes(
    target: TorchTarget, most_bytes: int | None, hidden: tuple[int, ...] = (), tokens: int = 0
) -> JointPasses | None:
    """Return what runs joint passes of a target's sequences, where it gives the same texts, else None.

    `most_bytes` and `tokens` are as in `JointPasses`, and `hidden` are the layers whose states drafters need.
    """
    forward: _Uncompiled | _Compiled | None = _compiled_pass(target, hidden)
    alone = target.compiled is not None or target.recordings is not None or set(hidden) - {LAST}
    # another family's code may derive a row's position from the cache's length
    if not alone and target.support.tested and runs_on_cpu(target.model):
        # there is no list of what other attention raises
        with suppress(Exception), torch.inference_mode(), target.waiting.lock:
            forward = _Uncompiled(target.model, target.dtype)
    return None if forward is None else JointPasses(target, forward, most_bytes, hidden, tokens)
