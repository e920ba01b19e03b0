"""Forward passes over the rows of several sequences at once, each row attending to its own sequence's slots.

A batch is one pass over slots of one arena: of a compiled forward whose kernels give a row the same bits whatever other
rows are in the pass, or of the uncompiled model. Does not depend on what the rows mean, nor on how a batch is put
together.
"""

from collections.abc import Sequence
from contextlib import suppress
from math import prod
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from foredraft.contracts import PassResult, Rows, Scores, TokenIds
from foredraft.errors import OutOfMemoryError
from foredraft.graph.layout import Layout
from foredraft.model.arena import MOST_SLOTS, STATE_TOKENS, Arena, Lease
from foredraft.model.compiled.export import flat, row_arguments
from foredraft.model.compiled.package import MOST_ROWS, CompiledForward, runs_on_cpu
from foredraft.model.compiled.recurrence import RecordStates
from foredraft.model.joint_forward import JointForward
from foredraft.model.kv_cache import LayerShape
from foredraft.model.layers import LAST
from foredraft.model.target import TorchTarget, device_errors, scores_of_pass, states_of_pass

_PENDING = 16  # accepted rows of a step that a state is counted with; memory for more is taken when they occur; chosen
_LEAST_PLACES = 3  # of states: before a text, the one that a text's pass reads, and the one that it makes
_MOST_PLACES, _PLACES = 128, 32  # those of a batch, and of one that may fill the model's window; chosen


class _Compiled:
    """Runs compiled passes over several sequences, as `JointForward` does uncompiled."""

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

    Keys, values and states take at most `most_bytes`; None is room for two texts that fill the model's window.
    """

    keeps_prefixes = True
    most_rows = MOST_ROWS

    def __init__(
        self, target: TorchTarget, forward: JointForward | _Compiled, most_bytes: int | None, hidden: tuple[int, ...]
    ) -> None:
        self.target, self._most_bytes, self._hidden = target, most_bytes, hidden
        self._begin(forward)

    def _begin(self, forward: JointForward | _Compiled) -> None:
        """Begin with an empty arena for passes of `forward`."""
        self._run, state, most_bytes = forward, forward.state_size, self._most_bytes
        slot = sum(heads * size for heads, size in forward.shapes) * self.target.dtype.itemsize
        slots, places = 2 * (self.target.window or MOST_SLOTS), _PLACES
        if most_bytes is not None:
            slots = int(max(most_bytes - _LEAST_PLACES * state, 0) // (slot + state / STATE_TOKENS))
            places = min(_LEAST_PLACES + slots // STATE_TOKENS, _MOST_PLACES)
        self._arena = Arena(forward.shapes, self.target.dtype, slots, forward.states if state else None, places)
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
        compiled = _compiled_pass(self.target, self._hidden) if isinstance(self._run, JointForward) else None
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


def joint_passes(target: TorchTarget, most_bytes: int | None, hidden: tuple[int, ...] = ()) -> JointPasses | None:
    """Return what runs joint passes of a target's sequences, where it gives the same texts, else None.

    `most_bytes` is as in `JointPasses`, and `hidden` are the layers whose states drafters need.
    """
    forward: JointForward | _Compiled | None = _compiled_pass(target, hidden)
    alone = target.recordings is not None or not runs_on_cpu(target.outline) or set(hidden) - {LAST}
    # another family's code may derive a row's position from the cache's length
    if target.compiled is None and target.support.tested and not alone:
        # there is no list of what other attention raises
        with suppress(Exception), torch.inference_mode(), target.waiting.lock:
            forward = JointForward(target.model, target.dtype)
    return None if forward is None else JointPasses(target, forward, most_bytes, hidden)
