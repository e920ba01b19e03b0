"""The target's key-value cache: preallocated in blocks, written past the committed length, committed by gathering.

There is no rollback. A forward pass writes its rows behind what is committed; the accepted rows are gathered down and
the length moves; the others are overwritten by the next pass. Rows may be held for the passes that follow, so that a
tree can grow level by level before any of it is committed. A sliding-window layer keeps its window and some slack,
not the whole context. Does not know what the rows mean or how a mask is made.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from transformers.cache_utils import Cache, CacheLayerMixin

from foredraft.addresses import array_at

BLOCK = 256
"""Slots are allocated in multiples of this many tokens."""


def _round_up(slots: int) -> int:
    return -(-slots // BLOCK) * BLOCK


class Span:
    """The slots that all layers of one attention type use alike.

    Attributes:
        window: how many positions a query sees, itself included; None for full attention.
        base: absolute position of the token in slot 0.
        stored: how many slots are in use; slot `j` holds the token at position `base + j`, except for rows held: the
            last `TreeCache.held` slots in use, which are committed to no position yet.
        capacity: how many slots are allocated.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.base = 0
        self.stored = 0
        self.capacity = 0

    def surplus(self, rows: int) -> int:
        """Return how many leading slots must go so that `rows` more fit without growing; 0 while there is room."""
        if self.window is None or self.stored + rows <= self.capacity:
            return 0
        return max(0, self.stored - (self.window - 1))

    def needed_capacity(self, rows: int) -> int:
        """Return the slots to allocate for `rows` more, growing by at least a quarter so that copying stays rare."""
        needed = self.stored + rows
        if needed <= self.capacity:
            return self.capacity
        if self.window is not None:  # slack of one window: shifting down then happens once a window, not every step
            return max(_round_up(needed), _round_up(min(2 * self.window, needed + self.window)))
        return _round_up(max(needed, self.capacity + self.capacity // 4))


class TreeLayer(CacheLayerMixin):
    """One layer's keys and values, [1, heads, capacity, head_dim] each, allocated at the first write.

    Derives from transformers' layer class because `Cache` promises its users layers of that kind.
    """

    is_compileable = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, span: Span) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it without annotations
        self.span = span

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the shapes of the first states, [1, heads, rows, head_dim]."""
        self.keys = self._allocated(key_states, self.span.capacity)
        self.values = self._allocated(value_states, self.span.capacity)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows' states behind what is committed; return all that these rows may attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.span.stored
        stop = start + key_states.shape[-2]
        self.keys[:, :, start:stop] = key_states
        self.values[:, :, start:stop] = value_states
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def resize(self, drop: int, keep: int, capacity: int) -> None:
        """Move slots `drop .. drop + keep` to the front of a buffer of `capacity` slots."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old: torch.Tensor = getattr(self, name)
            new = old if capacity == old.shape[-2] else self._allocated(old, capacity)
            new[:, :, :keep] = old[:, :, drop : drop + keep].clone() if new is old else old[:, :, drop : drop + keep]
            setattr(self, name, new)

    def go_on_in(self, keys: torch.Tensor, values: torch.Tensor, count: int) -> None:
        """Copy the first `count` slots into other buffers, and use those from now on."""
        keys[:, :, :count] = self.keys[:, :, :count]
        values[:, :, :count] = self.values[:, :, :count]
        self.keys, self.values = keys, values

    def go_on_apart(self, capacity: int, count: int) -> None:
        """Copy the first `count` slots into buffers of the layer's own, and use those from now on."""
        self.go_on_in(self._allocated(self.keys, capacity), self._allocated(self.values, capacity), count)

    def gather(self, start: int, index: torch.Tensor) -> None:
        """Copy the slots `start + index`, int64[n] and ascending, to `start .. start + n`."""
        if not self.is_initialized:  # a layer that never writes, such as one that shares another's keys
            return
        index = index.to(self.keys.device)
        _gather(self.keys, start, index)
        _gather(self.values, start, index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of visible slots and the position of the first."""
        return self.span.stored + query_length, self.span.base

    def get_seq_length(self) -> int:
        """Return how many tokens are committed, those that left a sliding window included."""
        return self.span.base + self.span.stored

    def get_max_length(self) -> int:
        """Return -1: the buffer grows."""
        return -1

    get_max_cache_shape = get_max_length  # the name of the same method in transformers before 5.20

    @staticmethod
    def _allocated(like: torch.Tensor, capacity: int) -> torch.Tensor:
        # zeros, because a masked slot is still multiplied by weight 0, and 0 * NaN is NaN
        return like.new_zeros((*like.shape[:-2], capacity, like.shape[-1]))


def _gather(slots: torch.Tensor, start: int, index: torch.Tensor) -> None:
    """Copy the slots `start + index` of float[B, heads, C, head_dim] to `start .. start + n`."""
    slots[:, :, start : start + len(index)] = slots[:, :, start:].index_select(2, index)


@njit(cache=True)
def move_rows(address: int, planes: int, capacity: int, width: int, start: int, rows: npt.NDArray[np.int64]) -> None:
    """Do the same with all slots at once, where they lie together on the CPU; torch takes twenty times as long for it.

    Args:
        address: of the first of [planes, capacity, width] numbers of 16 bits.
        planes: layers, keys and values, and heads.
        capacity: slots of each.
        width: of a slot.
        start: where the rows go.
        rows: int64[n], ascending, behind `start`.
    """
    slots = array_at(address, planes * capacity * width, np.uint16(0)).reshape((planes, capacity, width))
    for plane in range(planes):
        for place in range(len(rows)):
            slots[plane, start + place] = slots[plane, start + rows[place]]


class TreeCache(Cache):
    """The cache of one sequence. Derives from transformers' `Cache`, which models are written against.

    Args:
        windows: for each layer, its sliding window, or None for full attention.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.spans = {window: Span(window) for window in dict.fromkeys(windows)}
        self._tree_layers = [TreeLayer(self.spans[window]) for window in windows]
        super().__init__(layers=list(self._tree_layers))
        self._store: torch.Tensor | None = None
        self._shape: tuple[int, int, int, int] | None = None  # of the store, as `move_rows` takes it
        self._buffers: list[torch.Tensor] = []  # as long as no layer gets others
        self._length = 0
        self._rows = 0
        self._held = 0

    @property
    def held(self) -> int:
        """How many rows are held: written, visible to later passes, and not committed."""
        return self._held

    @property
    def length(self) -> int:
        """How many tokens are committed."""
        return self._length

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002  # transformers' signature
        """Return how many tokens are committed."""
        return self._length

    def take_shapes(self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        """Lay out every layer before anything is written to it, on the CPU.

        Args:
            shapes: for each layer, its key heads and their size.
            dtype: of keys and values.
        """
        for layer, (heads, size) in zip(self._tree_layers, shapes, strict=True):
            nothing = torch.empty(1, heads, 0, size, dtype=dtype)
            layer.lazy_initialization(nothing, nothing)

    def reserve(self, rows: int) -> None:
        """Make room for `rows` more rows, growing full layers and shifting sliding ones when they are full.

        Rows that are to be held need their room before the first of them: slots cannot be shifted under them.
        """
        for span in self.spans.values():
            drop = span.surplus(rows) if not self._held else 0
            if drop:
                self._resize(span, drop, span.capacity)
            capacity = span.needed_capacity(rows)
            if capacity != span.capacity:
                self._resize(span, 0, capacity)
        self._rows = rows

    def reserved_buffers(self, rows: int, *, together: bool = False) -> list[torch.Tensor]:
        """Make room for `rows` more rows, and return the buffers of every layer: all keys, then all values.

        Empty until every layer was written to once, or told its shape, as only then it is known what the buffers look
        like. Together, they lie in one tensor where that can be, so that a commit moves the rows of all layers at once.
        """
        self.reserve(rows)
        if not self._buffers and all(layer.is_initialized for layer in self._tree_layers):
            self._buffers = self._all_buffers()
            if together and self._store is None and self._are_alike(self._buffers):
                first = self._buffers[0]
                self.move_into(first.new_empty((len(self._buffers), *first.shape[1:])))
                self._buffers = self._all_buffers()
        return self._buffers

    def _all_buffers(self) -> list[torch.Tensor]:
        return [layer.keys for layer in self._tree_layers] + [layer.values for layer in self._tree_layers]

    def _are_alike(self, buffers: Sequence[torch.Tensor]) -> bool:
        """Say whether buffers could lie in one tensor: none slides, and all are of one shape and dtype in one place."""
        kinds = {(each.shape, each.dtype, each.device) for each in buffers}
        return set(self.spans) == {None} and len(kinds) == 1

    @property
    def store(self) -> torch.Tensor | None:
        """The one tensor that every layer's slots lie in, where `move_into` gave one and they still do."""
        return self._store

    @torch.inference_mode()
    def move_into(self, store: torch.Tensor) -> None:
        """Keep all slots in `store` from now on, float[2 L, heads, C, head_dim]: the keys of L layers, then the values.

        For caches without sliding windows, whose layers are of one shape and were all written to.
        """
        (span,) = self.spans.values()
        parts = [half.split(1) for half in store.chunk(2)]
        for layer, keys, values in zip(self._tree_layers, *parts, strict=True):
            layer.go_on_in(keys, values, span.stored)
        store[:, :, span.stored :] = 0  # whatever another sequence left there: weight 0 times NaN is NaN
        span.capacity, self._store, self._buffers = store.shape[2], store, []
        planes, width = store.shape[0] * store.shape[1], store.shape[3] * store.element_size() // 2
        on_cpu = store.device.type == "cpu"
        self._shape = (store.data_ptr(), planes, store.shape[2], width) if on_cpu else None

    @torch.inference_mode()
    def move_out(self) -> None:
        """Keep all slots, those of the last pass included, in buffers of the layers' own again."""
        (span,) = self.spans.values()
        count = span.stored + self._rows
        span.capacity, self._store, self._buffers = _round_up(count), None, []
        for layer in self._tree_layers:
            layer.go_on_apart(span.capacity, count)

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows, ascending, of those held and then those of the last pass; forget the others.

        Raises:
            ValueError: rows that are not ascending, or beyond the last pass.
        """
        rows, last = list(rows), self._held + self._rows
        contiguous = rows == list(range(len(rows)))
        if (rows and not 0 <= rows[0] <= rows[-1] < last) or not (contiguous or rows == sorted(set(rows))):
            raise ValueError(
                f"Rows {rows} must be ascending and below {last}, the rows held and those of the last pass."
            )
        if not contiguous and self._store is not None and self._shape is not None:
            move_rows(*self._shape, self._length, np.array(rows))  # no window: slots are positions
        elif not contiguous:
            self._gather(torch.tensor(rows))
        for span in self.spans.values():
            span.stored += len(rows) - self._held
        self._length += len(rows)
        self._rows = self._held = 0

    @torch.inference_mode()
    def _gather(self, index: torch.Tensor) -> None:
        """Move these rows, int64[n], down to the first of the rows held or of the last pass."""
        if self._store is not None:
            _gather(self._store, self._length, index.to(self._store.device))  # no window: slots are positions
            return
        for layer in self._tree_layers:
            layer.gather(layer.span.stored - self._held, index)

    def hold(self) -> None:
        """Keep the rows of the last pass in sight of the passes that follow, until `commit` says which of them stay."""
        for span in self.spans.values():
            span.stored += self._rows
        self._held += self._rows
        self._rows = 0

    @torch.inference_mode()
    def _resize(self, span: Span, drop: int, capacity: int) -> None:
        keep = span.stored - drop
        self._store, self._buffers = None, []
        for layer in self._tree_layers:
            if layer.span is span:
                layer.resize(drop, keep, capacity)
        span.base += drop
        span.stored = keep
        span.capacity = capacity
