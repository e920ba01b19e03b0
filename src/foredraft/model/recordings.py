"""A model's forward with fixed shapes at fixed addresses, so that a CUDA device can record a pass and replay it.

A recording (CUDA calls it a graph) is one launch where a pass is hundreds, which is what a pass of few rows spends its
time on. It fixes what a tensor's shape is and where it lies, so rows are padded to the next of a few counts, attention
looks at the next of a few numbers of slots, and the slots are those of one store that successive sequences use. What
changes from pass to pass is copied to the device from pinned memory; slots and masks are made of it there. Padded rows
repeat the first row, write behind all others and are dropped. On other devices all of it runs without being recorded.
Does not know what rows mean, or who asks.
"""

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from foredraft.contracts import Scores, TokenIds
from foredraft.errors import ForedraftError, ForedraftWarning, UsageError, told
from foredraft.graph.layout import Layout
from foredraft.graph.tree import BoolArray
from foredraft.model.compiled.export import FunctionalForward
from foredraft.model.device_draw import RowDraws
from foredraft.model.kv_cache import TreeCache
from foredraft.model.mask import seen_rows, slot_mask
from foredraft.model.rounding import relative_error, within_rounding
from foredraft.model.support import inspect

ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Passes of more rows run as they are."""

COLUMNS = 256
"""Rows held and rows of the pass, together at most: what a row says one by one whether it sees it."""

_LEAST_SLOTS = 512
_WARM_UPS = 2
_NUMBERS = 2  # how many are committed, and how many are stored

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""float[R, V] logits, float[R, D] last hidden states, and int64[R], the most probable token after each row, -1 where
its score is not finite."""
Compute = Callable[[], Outputs]
Rows = tuple[torch.Tensor, torch.Tensor]
"""int64[2 + 2 R]: how many tokens are committed, how many slots are in use, token ids, positions; bool[R, COLUMNS]:
whether a row may attend to the slots behind the committed ones."""


class RecordedForward:
    """The passes of a model that were recorded so far; others are when they are first asked for.

    The store grows when a sequence needs it to, and what was recorded over the smaller one goes. A newer sequence takes
    it over; the one before it goes on in buffers of its own, and runs as it is. For one thread at a time.

    Args:
        model: a causal language model in evaluation mode.

    Raises:
        UsageError: a model that is not recorded, with the reason.
    """

    def __init__(self, model: Any) -> None:
        support = inspect(model.config)
        devices = {str(parameter.device) for parameter in model.parameters()}
        if len(devices) > 1:
            raise UsageError(
                f"The model is spread over {', '.join(sorted(devices))}, and a recording is one device's; it runs as "
                "it is. Load it onto one device."
            )
        if any(window is not None for window in support.windows):
            raise UsageError(
                f"This {support.family} model has sliding windows, which foredraft does not record; it runs as it is."
            )
        self._functional = FunctionalForward(model)
        self._store: torch.Tensor | None = None
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._owner: Callable[[], TreeCache | None] = lambda: None
        self._made_room: weakref.WeakSet[TreeCache] = weakref.WeakSet()
        self._draws: RowDraws | None = RowDraws()  # None where the host draws
        self._failed = False

    @torch.inference_mode()
    def forward(
        self, layout: Layout, cache: TreeCache, own: Callable[[], torch.Tensor], *, hidden: bool = False
    ) -> Scores | None:
        """Score the rows of `layout`; their states lie behind the committed ones.

        Args:
            layout: R rows.
            cache: its sequence's.
            own: gives the model's own logits of the same rows, float[R, V]; asked whenever a pass was recorded.
            hidden: whether the last hidden states are wanted.

        Returns:
            The scores; None where the model must run as it is: too many rows, a sequence that made room for another, or
            a failure to record or to agree, of which a warning tells once.
        """
        rows = next((count for count in ROW_COUNTS if count >= layout.rows), None)
        if self._failed or rows is None or len(layout.held) + layout.rows > COLUMNS:
            return None
        try:
            return self._replayed(layout, cache, rows, own, hidden=hidden) if self._settle(cache, rows) else None
        except Exception as error:  # noqa: BLE001  # there is no list of what recording raises; the model runs without
            self._failed, self._store = True, None
            self._passes.clear()
            warnings.warn(
                f"This model's forward cannot be recorded on its device ({told(error)}); it runs as it is.",
                ForedraftWarning,
                stacklevel=4,
            )
            return None

    def _settle(self, cache: TreeCache, rows: int) -> bool:
        """Have a sequence's slots lie in the store with room for `rows` more; say whether they do."""
        needed = cache.length + cache.held + rows
        settled = self._store is not None and cache.store is self._store
        if settled and needed <= _capacity(self._store):
            return True
        buffers = cache.reserved_buffers(0)
        if not buffers or (cache in self._made_room and not settled):
            return False
        if len({(each.shape, each.dtype) for each in buffers}) > 1:
            raise ForedraftError("its layers keep states of several shapes")
        before = self._owner()
        if before is not None and before is not cache:
            self._made_room.add(before)
            if before.store is not None:
                before.move_out()
        first = buffers[0]
        needed = max(needed, first.shape[2])  # what the cache has room for by itself, it will soon ask for
        if needed > _capacity(self._store):
            self._passes.clear()
            self._store = first.new_empty((len(buffers), first.shape[1], slots_for(needed), first.shape[3]))
            if first.is_cuda:  # a new pool: torch takes none again whose recordings are gone
                self._pool = torch.cuda.graph_pool_handle()
                self._stream = self._stream or torch.cuda.Stream(first.device)
        assert self._store is not None
        cache.move_into(self._store)
        self._owner = weakref.ref(cache)
        return True

    def _replayed(
        self, layout: Layout, cache: TreeCache, rows: int, own: Callable[[], torch.Tensor], *, hidden: bool
    ) -> Scores:
        """Score the rows of `layout` with a pass of `rows` rows, which is recorded where there is none yet."""
        assert self._store is not None
        stored = cache.length + cache.held
        shape = rows, slots_for(stored + rows)
        new = shape not in self._passes
        if new:
            record = partial(recorded, stream=self._stream, pool=self._pool)
            self._passes[shape] = _Pass(self._functional, self._store, shape, record)
        cache.reserve(layout.rows)
        logits, states, best = (each[: layout.rows] for each in self._passes[shape].run(layout, stored))
        logits = logits.clone()  # the next replay writes over it
        best = best.cpu()  # waits for the device, so that a pass takes the time that it is said to take
        if new:
            error = relative_error(logits.float(), own().float())
            if not within_rounding(error, self._functional.model):
                raise ForedraftError(f"its scores are not the model's own, relative error {error:.1e}")
        return Scores(
            logits,
            states.clone() if hidden else None,
            best,
            partial(self._draw, logits, torch.from_numpy(layout.positions)),
        )

    def _draw(self, logits: torch.Tensor, positions: torch.Tensor, *law: Any) -> list[int] | None:
        """Draw after rows on their device; None where that failed, of which a warning tells once."""
        if self._draws is None:
            return None
        try:
            return self._draws.draw(logits, positions, *law)
        except Exception as error:  # noqa: BLE001  # as above: the host can draw
            self._draws = None
            warnings.warn(
                f"Tokens cannot be drawn on this device ({told(error)}); the host draws them.",
                ForedraftWarning,
                stacklevel=2,
            )
            return None


class _Pass:
    """A pass of one shape: the memory that it reads its rows from, and what runs it.

    Args:
        functional: the forward.
        store: float[2 L, heads, C, head_dim], the slots of every layer, keys and then values.
        shape: rows, and the slots that they look at.
        record: makes of a computation what repeats it.
    """

    def __init__(
        self,
        functional: FunctionalForward,
        store: torch.Tensor,
        shape: tuple[int, int],
        record: Callable[[Compute], Compute],
    ) -> None:
        rows, visible = shape
        self._sent = empty_rows(rows, pin_memory=store.is_cuda)
        self._received = received = empty_rows(rows, device=store.device)
        self._compute: Compute = lambda: scored(functional, store, received, visible)
        self._record = record
        self._replay: Compute | None = None

    def run(self, layout: Layout, stored: int) -> Outputs:
        """Send the rows of `layout`, behind `stored` slots in use, and compute; the result is the next run's too.

        The run before must have ended on the device: what is sent must not change on its way.
        """
        numbers, sees = (each.numpy() for each in self._sent)
        write_rows(numbers, sees, layout, stored)
        for sent, received in zip(self._sent, self._received, strict=True):
            received.copy_(sent, non_blocking=True)
        if self._replay is None:
            self._replay = self._record(self._compute)
        return self._replay()


def recorded(compute: Compute, stream: torch.cuda.Stream | None, pool: Any) -> Compute:
    """Record `compute` on a CUDA device, and return what replays it; without a stream, `compute` itself.

    Args:
        compute: reads and writes the same memory whenever it is called, and never waits for the device.
        stream: of the device, for recording alone; None where it is no CUDA device.
        pool: of `torch.cuda.graph_pool_handle`, for what is computed on the way.
    """
    if stream is None:
        return compute
    with torch.cuda.device(stream.device):
        before = torch.cuda.current_stream()
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):  # what is loaded or chosen at a first call must not be recorded
                    compute()
            before.wait_stream(stream)
            recording = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recording, pool=pool, stream=stream, capture_error_mode="thread_local"):
                outputs = compute()
        finally:
            torch.cuda.set_stream(before)  # torch leaves its own in place where recording fails

    def replay() -> Outputs:
        recording.replay()
        return outputs

    return replay


def slots_for(needed: int) -> int:
    """Return the least of 512, 768, 1024, 1536, 2048, ... slots that holds `needed`."""
    power = max(_LEAST_SLOTS, 1 << (needed - 1).bit_length())
    return power * 3 // 4 if power > _LEAST_SLOTS and needed <= power * 3 // 4 else power


def empty_rows(rows: int, **where: Any) -> Rows:
    """Return memory for what is sent of so many rows."""
    numbers = torch.zeros(_NUMBERS + 2 * rows, dtype=torch.int64, **where)
    return numbers, torch.zeros(rows, COLUMNS, dtype=torch.bool, **where)


def write_rows(numbers: TokenIds, sees: BoolArray, layout: Layout, stored: int) -> None:
    """Write a layout's rows, and the first of them again in the place of those that are missing.

    Args:
        numbers: of `Rows`, as an array.
        sees: the same.
        layout: what is written.
        stored: how many slots are in use, those of the rows held included.
    """
    count, seen = layout.rows, seen_rows(layout)
    numbers[:_NUMBERS] = stored - len(layout.held), stored
    for row_of, values in zip(numbers[_NUMBERS:].reshape(2, -1), (layout.token_ids, layout.positions), strict=True):
        row_of[:count], row_of[count:] = values, values[0]
    sees[:] = False
    sees[:count, : seen.shape[1]] = seen
    sees[count:] = sees[0]


def scored(functional: FunctionalForward, store: torch.Tensor, received: Rows, visible: int) -> Outputs:
    """Score rows from what was received of them, all of it on the device: what is recorded.

    Args:
        functional: the forward.
        store: float[2 L, heads, C, head_dim].
        received: what was sent.
        visible: how many slots the rows look at, those that they are written to included.
    """
    numbers, sees = received
    committed, stored = numbers[0], numbers[1]
    token_ids, positions = numbers[_NUMBERS:].view(2, 1, -1)
    slots = stored + torch.arange(len(sees), device=store.device)
    keys, values = (list(half.split(1)) for half in store.chunk(2))
    mask = slot_mask(committed, sees, visible, store.dtype)
    logits, hidden = functional(token_ids, positions, None, [mask], [slots], None, keys, values)
    largest, best = logits.max(dim=-1)
    return logits, hidden, best.masked_fill(~largest.isfinite(), -1)


def recorded_forward(model: Any) -> RecordedForward | None:
    """Return a model's forward as recordings; None with a warning where it is not recorded."""
    try:
        return RecordedForward(model)
    except UsageError as error:
        warnings.warn(str(error), ForedraftWarning, stacklevel=2)
        return None


def _capacity(store: torch.Tensor | None) -> int:
    return 0 if store is None else store.shape[2]
