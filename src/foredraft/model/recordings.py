"""A model's forward with fixed shapes at fixed addresses, so that a CUDA device can record a pass and replay it.

Launching hundreds of kernels dominates the time of a pass of few rows; a recording (a CUDA graph) is one launch. It
fixes shapes and addresses: rows are padded to one of a few counts, and successive sequences use the slots of one store.
What is recorded is compiled first, which fuses small kernels (fused.py). Inputs are copied from pinned memory; slots
and masks are computed from them on the device. Padding repeats the first row, writes after all other rows, and is
dropped. Other devices run the same code without compiling or recording. Does not depend on what rows mean.
"""

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from foredraft.contracts import Scores
from foredraft.errors import ForedraftError, ForedraftWarning, UsageError, told
from foredraft.graph.layout import Layout
from foredraft.model.device_draw import DrawnRows, Record, RowDraws
from foredraft.model.fused import COLUMNS, Outputs, Pass, scored_pass
from foredraft.model.kv_cache import TreeCache
from foredraft.model.mask import seen_rows
from foredraft.model.rounding import error_beyond_rounding
from foredraft.model.support import inspect

ROW_COUNTS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # that passes are padded to; passes of more are not recorded
# rows that passes are padded to where fewer come out otherwise; for a 7B on an H200, 64 take 1.10 times as long as one
_ALIKE = 64
_LEAST_SLOTS = 512
_WARM_UPS = 2  # runs before a recording, in which libraries load kernels and choose algorithms

T = TypeVar("T")


class Rows:
    """The inputs of a pass of R rows, views of one block of memory, so that one copy sends them all."""

    def __init__(self, rows: int, windows: int, **where: Any) -> None:
        sizes = (2 * 8, rows * 8, rows * 8, windows * rows * COLUMNS)
        self.memory = torch.zeros(sum(sizes), dtype=torch.uint8, **where)
        bounds, ids, positions, sees = self.memory.split(sizes)
        self.bounds = bounds.view(torch.int64)  # the number of tokens committed, and of slots in use
        self.token_ids, self.positions = ids.view(torch.int64), positions.view(torch.int64)  # int64[R]
        # bool[windows, R, COLUMNS]: whether a row may attend to each slot after the committed ones
        self.sees = sees.view(torch.bool).view(windows, rows, COLUMNS)

    def write(self, layout: Layout, stored: int, windows: Sequence[int | None]) -> None:
        """Write a layout's rows, after `stored` slots in use; padding repeats the first row."""
        count = layout.rows
        self.bounds.numpy()[:] = stored - len(layout.held), stored
        for written, values in ((self.token_ids, layout.token_ids), (self.positions, layout.positions)):
            row_of = written.numpy()
            row_of[:count], row_of[count:] = values, values[0]
        for sees, window in zip(self.sees.numpy(), windows, strict=True):
            seen = seen_rows(layout, window)
            sees[:] = False
            sees[:count, : seen.shape[1]] = seen
            sees[count:] = sees[0]


class RecordedPass:
    """A pass of R rows over a store, recorded at its first use, and what sampling draws after them.

    The store, float[2 L, heads, C, head_dim], holds every layer's keys, and then every layer's values. `drawn` tells
    the tokens after the rows of the last pass.
    """

    def __init__(
        self, compute: Pass, rows: int, windows: Sequence[int | None], store: torch.Tensor, record: Record,
        record_draws: Record,
    ) -> None:  # fmt: skip
        self._windows, self._record = windows, record
        self._sent = Rows(rows, len(windows), pin_memory=store.is_cuda)
        received = Rows(rows, len(windows), device=store.device)
        self._received = received.memory
        keys, values = (list(half.split(1)) for half in store.chunk(2))
        inputs = received.bounds, received.token_ids, received.positions, received.sees, keys, values
        self._compute: Callable[[], Outputs] = lambda: compute(*inputs)
        self._replay: Callable[[], Outputs] | None = None
        self.drawn = DrawnRows(received.positions, record_draws)

    def __call__(self, layout: Layout, stored: int) -> Outputs:
        """Score a layout's rows after `stored` slots in use; the next call overwrites the result.

        The previous one must have finished on the device, because the memory that is sent must not change on its way.
        """
        self._sent.write(layout, stored, self._windows)
        self._received.copy_(self._sent.memory, non_blocking=True)
        if self._replay is None:
            self._replay = self._record(self._compute)
        outputs = self._replay()
        self.drawn.logits = outputs[0]
        return outputs


class RecordedForward:
    """Records the passes of a causal language model at their first use, and replays them.

    Libraries choose other kernels for other numbers of rows, which may round in another way, and drafts must not change
    a text. So with `same_bits`, a number of rows is used if its first pass gives the same bits as one of 64 rows does;
    once one does not, passes are padded to the next number that did, at most 64. Passes of more rows may differ, and so
    may those of models whose attention is not replaced (fused.py).

    The store grows when a sequence needs more room, which discards the recordings made over the smaller one. A newer
    sequence takes the store over; the previous one continues in buffers of its own, without recordings until the cache
    of the newer one is gone. A sequence that finds no memory for the store goes on without. Not thread-safe. Raises
    UsageError with the reason if the model cannot be recorded.
    """

    def __init__(self, model: Any, *, same_bits: bool = True) -> None:
        devices = sorted({str(parameter.device) for parameter in model.parameters()})
        if len(devices) > 1:
            raise UsageError(
                f"The model is spread over {', '.join(devices)}, and only a model on one device can be recorded; it "
                "runs unrecorded. Load it onto one device."
            )
        support = inspect(model.config)
        if any(support.recurrent):
            raise UsageError(
                f"The recurrent layers of this {support.family} model cannot be recorded; it runs unrecorded."
            )
        self._model, self._windows = model, tuple(dict.fromkeys(support.windows))
        self._pass: Pass | None = None
        self._store: torch.Tensor | None = None
        self._passes: dict[int, RecordedPass] = {}  # by number of rows
        self.same_bits = same_bits
        self._usable: dict[int, bool] = {}  # whether passes of a number of rows may be used, where that was tried
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None  # of the memory of recorded passes
        self._draw_pool: Any = None  # of draws: once one cannot be recorded, torch may record nothing in its pool again
        self._owner: Callable[[], TreeCache | None] = lambda: None  # the sequence that uses the store
        self._evicted: weakref.WeakSet[TreeCache] = weakref.WeakSet()
        self._draws, self._number = RowDraws(), 0  # of the last pass
        self.failed = ""  # why nothing is recorded any more

    @torch.inference_mode()
    def forward(
        self, layout: Layout, cache: TreeCache, own: Callable[[], torch.Tensor], *, hidden: bool = False
    ) -> Scores | None:
        """Score R rows; their keys and values are written after the committed ones of their sequence.

        `own` returns the model's own logits of the same rows, float[R, V], and is called after each new recording.
        Returns None if the model must run unrecorded: too many rows, a sequence that lost the store, or a recording
        that failed or gave other logits, for which one warning is issued.
        """
        rows = next((n for n in ROW_COUNTS if n >= layout.rows and self._usable.get(n, True)), None)
        if self.failed or rows is None or len(layout.held) + layout.rows > COLUMNS:
            return None
        self._number += 1  # also of a pass that fails, as it may have overwritten what the last one left
        try:
            store = self._settled(cache, max(rows, _ALIKE) if self.same_bits else rows)
            if store is None:
                return None
            stored = cache.length + cache.held
            cache.reserve(layout.rows)
            if self.same_bits and rows < _ALIKE and rows not in self._usable:
                rows = self._alike(rows, layout, stored, store)
            # before the pass, whose keys and values stay
            expected = None if rows in self._usable else own().clone()
            logits, states, found = self._run(rows, layout, stored, store)
            tokens = found.cpu().numpy()[: layout.rows]  # waits for the device, so that the pass is timed in full
            logits, states = logits[: layout.rows].clone(), states[: layout.rows]  # the next replay overwrites them
            if expected is not None and (error := error_beyond_rounding(logits, expected, self._model)):
                raise ForedraftError(f"its scores are not the model's own, relative error {error:.1e}")
            self._usable[rows] = True
        except Exception as error:  # noqa: BLE001  # recording can raise anything, and the model can run without it
            self._store, self._owner = None, weakref.ref(cache)
            self._forget()
            self._evicted.add(cache)
            if isinstance(error, torch.OutOfMemoryError):  # a shorter text may find room
                sentence = (
                    f"Passes after {cache.length} tokens find no memory to be recorded; the text goes on without."
                )
            else:
                sentence = f"This model's forward cannot be recorded on its device ({told(error)}); it runs unrecorded."
                self.failed = sentence
            warnings.warn(sentence, ForedraftWarning, stacklevel=4)
            return None
        draw = partial(self._drawn, self._number, self._passes[rows].drawn, layout.rows)
        best, (top, bits) = tokens[:, 0], np.split(tokens[:, 1:], 2, axis=1)
        return Scores(logits, states.clone() if hidden else None, best, (top, bits.view(np.float32)), draw)

    def _drawn(self, number: int, drawn: DrawnRows, count: int, *law: Any) -> list[int] | None:
        """Return what `RowDraws.draw` does; None once a later pass has overwritten the logits of this one."""
        return self._draws.draw(drawn, count, *law) if number == self._number else None

    def _settled(self, cache: TreeCache, rows: int) -> torch.Tensor | None:
        """Move a sequence's slots into the store, with room for `rows` more; return it, or None if it was lost."""
        needed = cache.length + cache.held + rows
        size = 0 if self._store is None else self._store.shape[2]
        settled = self._store is not None and cache.store is self._store
        if settled and needed <= size:
            return self._store
        buffers = cache.reserved_buffers(0)
        before = self._owner()
        lost = cache in self._evicted and not settled and before is not None
        if not buffers or lost or set(cache.spans) != {None}:
            return None
        if len({(each.shape, each.dtype) for each in buffers}) > 1:
            raise ForedraftError("its layers have keys and values of several shapes")
        if before is not None and before is not cache:
            self._evicted.add(before)
            if before.store is not None:
                before.move_out()
        first = buffers[0]
        needed = max(needed, first.shape[2])  # the cache expects to grow to its own capacity
        if self._store is None or needed > size:
            self._forget()
            self._store = first.new_empty((len(buffers), first.shape[1], slots_for(needed), first.shape[3]))
            if first.is_cuda:  # torch cannot reuse a pool whose recordings were deleted
                self._pool, self._draw_pool = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
                self._stream = self._stream or torch.cuda.Stream(first.device)
        cache.move_into(self._store)
        self._owner = weakref.ref(cache)
        return self._store

    def _forget(self) -> None:
        self._passes.clear()
        self._usable.clear()

    def _alike(self, rows: int, layout: Layout, stored: int, store: torch.Tensor) -> int:
        """Return the number of rows to pad a layout to: `rows` if that gives the same bits as 64 rows, or else 64."""
        found = [self._run(count, layout, stored, store)[0][: layout.rows].clone() for count in (_ALIKE, rows)]
        if torch.equal(*(each.view(torch.uint8) for each in found)):  # NaN is not equal to itself
            return rows
        del self._passes[rows]
        self._usable = {count: False for count in ROW_COUNTS if count < _ALIKE} | self._usable
        return _ALIKE

    def _run(self, rows: int, layout: Layout, stored: int, store: torch.Tensor) -> Outputs:
        if rows not in self._passes:
            if self._pass is None:
                self._pass = scored_pass(self._model, self._windows, store)
            records = (partial(recorded, stream=self._stream, pool=pool) for pool in (self._pool, self._draw_pool))
            self._passes[rows] = RecordedPass(self._pass, rows, self._windows, store, *records)
        return self._passes[rows](layout, stored)


def recorded(compute: Callable[[], T], stream: torch.cuda.Stream | None, pool: Any) -> Callable[[], T]:
    """Record `compute` on a CUDA device, and return a function that replays it; without a stream, return `compute`.

    It reads and writes the same memory at every call, and never waits for the device. The stream is used for recording
    only; the pool holds intermediate results.
    """
    if stream is None:
        return compute
    with torch.cuda.device(stream.device):
        before = torch.cuda.current_stream()
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    compute()
            before.wait_stream(stream)
            recording = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recording, pool=pool, stream=stream, capture_error_mode="thread_local"):
                outputs = compute()
        finally:
            torch.cuda.set_stream(before)  # torch does not restore it when recording fails

    def replay() -> T:
        recording.replay()
        return outputs

    return replay


def slots_for(needed: int) -> int:
    """Return the smallest of 512, 768, 1024, 1536, 2048, ... slots that holds `needed`."""
    power = max(_LEAST_SLOTS, 1 << (needed - 1).bit_length())
    return power * 3 // 4 if power > _LEAST_SLOTS and needed <= power * 3 // 4 else power


def recorded_forward(model: Any, *, same_bits: bool = True) -> RecordedForward | None:
    """Return a model's recorded forward; None with a warning if the model cannot be recorded."""
    try:
        return RecordedForward(model, same_bits=same_bits)
    except UsageError as error:
        warnings.warn(str(error), ForedraftWarning, stacklevel=2)
        return None
