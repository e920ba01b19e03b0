"""Forward passes over the rows of several sequences at once, each row attending to its own sequence's slots.

If the compiled kernels give a row the same bits whatever other rows are in the pass, a batch is one pass over slots of
one arena. Otherwise each sequence gets its own pass: slower, with the same text. Does not depend on what the rows mean,
nor on how a batch is put together.
"""

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import torch

from foredraft.contracts import Scores, TokenIds
from foredraft.errors import OutOfMemoryError
from foredraft.graph.layout import Layout
from foredraft.model.arena import MOST_SLOTS, Arena, Lease
from foredraft.model.compiled.library import CompiledLibrary
from foredraft.model.compiled.package import MOST_ROWS, CompiledForward
from foredraft.model.mask import joined_mask
from foredraft.model.target import PREFILL_ROWS, TorchTarget, device_errors, scores_of_pass


class Result(NamedTuple):
    """The result of one sequence's rows in a pass."""

    scores: Scores | OutOfMemoryError | None  # None if they are not scored, an error if the pass found no memory
    nanoseconds: int  # of the pass, which others may share


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
        self, layouts: Sequence[Layout], caches: Sequence[Any], scored: Sequence[bool], *, hidden: bool = False
    ) -> list[Result]:
        found: list[Result] = []
        for layout, cache, wanted in zip(layouts, caches, scored, strict=True):
            start = perf_counter_ns()
            scores: Scores | OutOfMemoryError | None = None
            try:
                if wanted:
                    scores = self.target.forward(layout, cache, hidden=hidden)
                else:
                    self.target.run(layout, cache)
            except OutOfMemoryError as error:
                scores = error
            found.append(Result(scores, perf_counter_ns() - start))
        return found


class JointBatch:
    """Runs a batch in one pass of a compiled target.

    With at most `most_bytes` of keys and values; None is room for two texts that fill the model's window.
    """

    keeps_prefixes = True

    def __init__(self, target: TorchTarget, compiled: CompiledForward, most_bytes: int | None) -> None:
        heads, size = compiled.record.shapes[0]
        layers = len(compiled.record.shapes)
        slot = 2 * layers * heads * size * target.dtype.itemsize
        self.target, self._compiled, self._dtype = target, compiled, target.dtype
        slots = 2 * (target.window or MOST_SLOTS) if most_bytes is None else most_bytes // slot
        self._arena = Arena(layers, heads, size, target.dtype, slots)
        self.open, self.close = self._arena.open, self._arena.close
        self.most_rows = MOST_ROWS

    @property
    def memory_use(self) -> float:
        """The share of the slots that is leased to unfinished sequences."""
        return self._arena.used / self._arena.most_slots

    def reserve(self, cache: Lease, layout: Layout) -> None:
        cache.reserve(layout.token_ids)

    @torch.inference_mode()
    def forward(
        self, layouts: Sequence[Layout], caches: Sequence[Lease], scored: Sequence[bool], *, hidden: bool = False
    ) -> list[Result]:
        start = perf_counter_ns()
        try:
            with device_errors(sum(layout.rows for layout in layouts), max(cache.length for cache in caches)):
                scores = self._pass(layouts, caches, scored, hidden=hidden)
                return [Result(each, perf_counter_ns() - start) for each in scores]
        except OutOfMemoryError as error:
            if len(layouts) == 1:
                return [Result(error, perf_counter_ns() - start)]
        found: list[Result] = []
        for layout, cache, wanted in zip(layouts, caches, scored, strict=True):  # smaller passes may find memory
            found += self.forward([layout], [cache], [wanted], hidden=hidden)
        return found

    def _pass(
        self, layouts: Sequence[Layout], caches: Sequence[Lease], scored: Sequence[bool], *, hidden: bool
    ) -> list[Scores | None]:
        rows = [layout.rows for layout in layouts]
        which = np.flatnonzero(np.repeat(scored, rows)) if any(scored) else np.zeros(1, np.int64)
        starts, committed = np.array([(cache.start, cache.length) for cache in caches], np.int64).T
        firsts = zip(starts + committed, rows, strict=True)
        arguments = [
            torch.from_numpy(np.concatenate([layout.token_ids for layout in layouts])[None]),
            torch.from_numpy(np.concatenate([layout.positions for layout in layouts])[None]),
            torch.from_numpy(which),
            joined_mask(layouts, committed.tolist(), self._dtype),
            torch.from_numpy(np.concatenate([np.arange(first, first + count) for first, count in firsts])),
            torch.from_numpy(np.repeat(np.stack([starts, committed + rows]), rows, axis=1)),
        ]
        package = _batch_package(self._compiled, sum(rows))
        assert package is not None, "`batch_target` has checked it"
        with self.target.waiting.one_pass(compiled=True):
            results = package.run([*arguments, *self._arena.buffers])
        found: list[Scores | None] = []
        start = 0
        for count, wanted in zip(rows, scored, strict=True):
            own = [each[start : start + count] for each in results] if wanted else []
            found.append(scores_of_pass(*own, hidden=hidden) if wanted else None)
            start += count if wanted else 0
        return found


def _batch_package(compiled: CompiledForward, rows: int) -> CompiledLibrary | None:
    """Return the package for a pass over several sequences, even if the uncompiled model would be faster."""
    fits = (each for each in compiled.record.packages if each.ranges and each.takes(rows))
    return next((compiled.packages[each.name] for each in fits), None)


def batch_target(target: TorchTarget, most_bytes: int | None) -> JointBatch | SequentialBatch:
    """Return what runs a target's batches: a `JointBatch` where it gives the same bits, else a `SequentialBatch`."""
    compiled = target.compiled
    if compiled is not None and compiled.record.same_bits and set(target.support.windows) == {None}:
        one_shape = len(set(compiled.record.shapes)) == 1
        if one_shape and all(_batch_package(compiled, rows) for rows in (1, 2, MOST_ROWS)):
            return JointBatch(target, compiled, most_bytes)
    return SequentialBatch(target)
