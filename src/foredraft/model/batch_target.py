"""Forward passes over the rows of several sequences at once, each row attending to its own sequence's slots.

A batch is one pass over slots of one arena: of a compiled forward whose kernels give a row the same bits whatever other
rows are in the pass, or of the uncompiled model. Where neither is possible, each sequence gets its own pass: slower,
with the same text. Does not depend on what the rows mean, nor on how a batch is put together.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import torch

from foredraft.contracts import Scores, TokenIds
from foredraft.errors import OutOfMemoryError
from foredraft.graph.layout import Layout
from foredraft.model.arena import MOST_SLOTS, Arena, Lease
from foredraft.model.compiled.export import flat, row_arguments
from foredraft.model.compiled.package import MOST_ROWS, runs_on_cpu
from foredraft.model.joint_forward import JointForward
from foredraft.model.layers import LAST
from foredraft.model.target import PREFILL_ROWS, TorchTarget, device_errors, scores_of_pass, states_of_pass

Pass = Callable[..., Sequence[torch.Tensor]]


class Result(NamedTuple):
    """The result of one sequence's rows in a pass."""

    scores: Scores | OutOfMemoryError | None  # None if they are not scored, an error if the pass found no memory
    nanoseconds: int  # of the pass, which others may share
    states: torch.Tensor | None = None  # of rows that are not scored, as `TorchTarget.run` returns them


class SequentialBatch:
    """Runs a pass for each sequence of a batch."""

    keeps_prefixes = False

    def __init__(self, target: TorchTarget) -> None:
        self.target = target
        self.most_rows = PREFILL_ROWS if target.compiled is None else MOST_ROWS
        self.memory_use = 0.0

    def open(self, _token_ids: TokenIds, _capacity: int, _owner: str) -> Any:
        return self.target.new_cache()

    def close(self, _cache: Any) -> None:
        """Do nothing: the cache is freed with its sequence."""

    def reserve(self, _cache: Any, _layout: Layout) -> None:
        """Do nothing: the pass reserves its own room."""

    def forward(
        self, layouts: Sequence[Layout], caches: Sequence[Any], scored: Sequence[bool],
        hidden: Sequence[tuple[int, ...]],
    ) -> list[Result]:  # fmt: skip
        """Run each sequence's rows, and return their scores where they are `scored`, and the states of `hidden`."""
        found: list[Result] = []
        for layout, cache, wanted, layers in zip(layouts, caches, scored, hidden, strict=True):
            start, states = perf_counter_ns(), None
            scores: Scores | OutOfMemoryError | None = None
            try:
                if wanted:
                    scores = self.target.forward(layout, cache, hidden=layers)
                else:
                    states = self.target.run(layout, cache, layers)
            except OutOfMemoryError as error:
                scores = error
            found.append(Result(scores, perf_counter_ns() - start, states))
        return found


class JointBatch:
    """Runs a batch in one pass over buffers of these `shapes`: compiled from when that is possible on, before by `run`.

    A pass takes the arguments of `FunctionalForward`. There are at most `most_bytes` of keys and values; None is room
    for two texts that fill the model's window.
    """

    keeps_prefixes = True
    most_rows = MOST_ROWS

    def __init__(
        self, target: TorchTarget, run: Pass, shapes: Sequence[tuple[int, int]], most_bytes: int | None,
        hidden: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.target, self._run, self._hidden = target, run, hidden
        self._windows = tuple(dict.fromkeys(target.support.windows))
        slot = sum(heads * size for heads, size in shapes) * target.dtype.itemsize
        slots = 2 * (target.window or MOST_SLOTS) if most_bytes is None else most_bytes // slot
        self._arena = Arena(shapes, target.dtype, slots)
        self.open, self.close = self._arena.open, self._arena.close

    @property
    def memory_use(self) -> float:
        """The share of the slots that is leased to unfinished sequences."""
        return self._arena.used / self._arena.most_slots

    def reserve(self, cache: Lease, layout: Layout) -> None:
        cache.reserve(layout.token_ids)

    @torch.inference_mode()
    def forward(
        self, layouts: Sequence[Layout], caches: Sequence[Lease], scored: Sequence[bool],
        hidden: Sequence[tuple[int, ...]],
    ) -> list[Result]:  # fmt: skip
        """Do what `SequentialBatch.forward` does."""
        start = perf_counter_ns()
        try:
            with device_errors(sum(layout.rows for layout in layouts), max(cache.length for cache in caches)):
                found = self._pass(layouts, caches, scored, hidden)
                return [Result(scores, perf_counter_ns() - start, states) for scores, states in found]
        except OutOfMemoryError as error:
            if len(layouts) == 1:
                return [Result(error, perf_counter_ns() - start)]
        results: list[Result] = []
        for layout, cache, wanted, layers in zip(layouts, caches, scored, hidden, strict=True):
            results += self.forward([layout], [cache], [wanted], [layers])  # smaller passes may find memory
        return results

    def _pass(
        self, layouts: Sequence[Layout], caches: Sequence[Lease], scored: Sequence[bool],
        hidden: Sequence[tuple[int, ...]],
    ) -> list[tuple[Scores | None, torch.Tensor | None]]:  # fmt: skip
        rows = [layout.rows for layout in layouts]
        which = np.flatnonzero(np.repeat(scored, rows))
        which = which if len(which) else np.zeros(1, np.int64)  # a pass scores one row at least
        places = {}
        for window in self._windows:  # layers with a window read nothing before that of the first row
            counts = [each.length if window is None else min(each.length, window - 1) for each in caches]
            places[window] = [(c.start + c.length - count, count) for c, count in zip(caches, counts, strict=True)]
        arguments = row_arguments(layouts, places, which, self.target.dtype)
        buffers, half = self._arena.buffers, len(self.target.support.windows)
        self._run = _compiled_pass(self.target, self._hidden) or self._run  # a model may be compiled meanwhile
        with self.target.waiting.one_pass(compiled=self.target.compiled is not None):
            results = self._run(*arguments, buffers[:half], buffers[half:])
        found: list[tuple[Scores | None, torch.Tensor | None]] = []
        start = row = 0  # of the scored rows, and of all, which have the states of layers before the last
        for count, wanted, layers in zip(rows, scored, hidden, strict=True):
            tapped = [each[row : row + count] for each in results[4:]]
            own = [*(each[start : start + count] for each in results[:4]), *tapped]
            scores = scores_of_pass(own, layers) if wanted else None
            found.append((scores, None if wanted or LAST in layers else states_of_pass(own, layers)))
            start, row = start + count * wanted, row + count
        return found


def _compiled_pass(target: TorchTarget, hidden: tuple[int, ...]) -> Pass | None:
    """Return what runs joint passes compiled, if a row then has the same bits whatever other rows are in the pass."""
    compiled = target.compiled
    alone = any(target.support.recurrent)  # states are of one sequence
    if compiled is None or alone or not compiled.record.same_bits or not compiled.returns(hidden):
        return None
    fits = [each for each in compiled.record.packages if each.ranges]
    if not all(any(each.takes(rows) for each in fits) for rows in (1, 2, MOST_ROWS)):
        return None

    def run(rows: torch.Tensor, *arguments: Any) -> list[torch.Tensor]:
        package = next(compiled.packages[each.name] for each in fits if each.takes(rows.shape[1]))
        return package.run(flat((rows, *arguments)))

    return run


def batch_target(
    target: TorchTarget, most_bytes: int | None, hidden: tuple[int, ...] = ()
) -> JointBatch | SequentialBatch:
    """Return what runs a target's batches: a `JointBatch` where it gives the same texts, else a `SequentialBatch`.

    `hidden` are the layers whose states drafters need.
    """
    compiled, run = target.compiled, _compiled_pass(target, hidden)
    if compiled is not None and run is not None:
        shapes = [(each.heads, each.size) for each in compiled.record.shapes]
        return JointBatch(target, run, shapes * 2, most_bytes, hidden)
    own: JointForward | None = None
    # another family's code may derive a row's position from the cache's length; states are of one sequence
    tried = target.support.tested and not any(target.support.recurrent)
    alone = target.recordings is not None or not runs_on_cpu(target.model) or set(hidden) - {LAST}
    if compiled is None and tried and not alone:
        with suppress(Exception), torch.inference_mode():  # there is no list of what other attention raises
            own = JointForward(target.model, target.dtype)
    return SequentialBatch(target) if own is None else JointBatch(target, own, own.shapes, most_bytes, hidden)
