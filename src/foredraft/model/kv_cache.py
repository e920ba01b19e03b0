"""The target's KV cache: allocated in blocks, written after the committed length, committed by gathering rows.

There is no rollback: to commit, the accepted rows of a pass are gathered down and the length increases; the next pass
overwrites the others. Rows may be held for the next passes, so that a tree can grow before any of it is committed. A
sliding-window layer stores its window and some slack. Does not depend on the rows' meaning, nor on how masks are made.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from transformers.cache_utils import Cache, CacheLayerMixin

BLOCK = 256  # slots are allocated in multiples of this many tokens
PENDING = 4
"""Committed records from which on a pass writes back the matrices that it applied them to. Fewer are applied again by
the next pass, which takes less time than writing (measured on Zen 4, docs/results/log.md)."""


def whole_blocks(slots: int) -> int:
    """Return a number of slots rounded up to whole blocks."""
    return -(-slots // BLOCK) * BLOCK


@dataclass(slots=True, eq=False)
class Span:
    """The slots of all layers with the same attention type.

    Slot `j` holds the token at position `base + j`, except for the last `TreeCache.held` slots in use, which hold
    uncommitted rows.
    """

    window: int | None  # number of positions that a query sees, itself included; None for full attention
    base: int = 0  # absolute position of the token in slot 0
    stored: int = 0  # number of slots in use
    capacity: int = 0  # number of slots allocated
    pending: int = 0  # number of committed records that the layers' matrices do not contain yet
    at: int = 0  # of records, which of two places the matrices are in


class LayerShape(NamedTuple):
    """The shape of what a layer keeps where passes are compiled.

    Of attention these are its key heads and the numbers of a key and of a value; latents, of which both are made, are
    kept as keys alone. Of a recurrent layer, in slots, the inputs of a convolution of `size` channels and `taps` taps,
    and records of `values` float32 numbers, none for a layer that has a convolution alone; and its matrices.
    """

    heads: int
    size: int
    values: int
    taps: int = 0
    prompts: bool = False  # whether a prompt's tokens leave other records than the same tokens as they are written
    matrices: tuple[int, ...] = ()  # as the kernel of recurrences takes them


class TreeLayer(CacheLayerMixin):
    """One layer's keys and values, [1, heads, capacity, head_dim] each, allocated at the first write.

    Latents (MLA) of two sizes are both kept as keys, side by side, and values are empty.
    """

    is_compileable = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, span: Span) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it without annotations
        self.span = span

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = allocated(key_states, self.span.capacity)
        self.values = allocated(value_states, self.span.capacity)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = side_by_side(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        start, stop = self.span.stored, self.span.stored + key_states.shape[-2]
        self.keys[:, :, start:stop] = keys
        self.values[:, :, start:stop] = values
        return apart(self.keys[:, :, :stop], self.values[:, :, :stop], key_states.shape[-1])

    def update_indexer(self, index_keys: torch.Tensor) -> torch.Tensor:
        """Return keys to choose tokens by, float[1, S, D], for as many slots as `update` returns.

        In texts of at most `Support.window` tokens all are chosen, whatever these keys are; so they are not stored.
        """
        _, rows, size = index_keys.shape
        return index_keys.new_zeros(1, self.span.stored + rows, size)

    def move(self, keys: torch.Tensor, values: torch.Tensor, start: int, stop: int) -> None:
        """Copy the slots from `start` to `stop` to the front of these buffers, and use the buffers from now on."""
        for old, new in ((self.keys, keys), (self.values, values)):
            kept = old[:, :, start:stop]
            new[:, :, : stop - start] = kept.clone() if new is old else kept
        self.keys, self.values = keys, values

    def take_shape(self, shape: LayerShape, dtype: torch.dtype) -> None:
        """Initialise the layer on the CPU, before anything is written."""
        self.lazy_initialization(
            *(torch.empty(1, shape.heads, 0, size, dtype=dtype) for size in (shape.size, shape.values))
        )

    def commit(self, kept: npt.NDArray[np.int64]) -> None:
        """Commit what these rows leave besides keys and values, which the cache gathers: nothing."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.span.stored + query_length, self.span.base

    def get_seq_length(self) -> int:
        return self.span.base + self.span.stored  # including those that left a sliding window

    def get_max_length(self) -> int:
        return -1  # the buffer grows

    get_max_cache_shape = get_max_length  # the name of the same method in transformers before 5.20


class BufferLayer(TreeLayer):
    """One layer's buffers as transformers' cache layer: rows go to given slots, attention sees the first ones.

    Its length is 0, as positions and masks are given, and nobody needs to derive them.
    """

    is_compileable = True

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, visible: int) -> None:
        super().__init__(Span(None))
        self.keys, self.values, self.is_initialized = keys, values, True
        self._slots, self._visible = slots, visible

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = side_by_side(key_states, value_states)
        self.keys.index_copy_(2, self._slots, keys)
        if values.shape[-1]:
            self.values.index_copy_(2, self._slots, values)
        visible = slice(self._visible)
        return apart(self.keys[:, :, visible], self.values[:, :, visible], key_states.shape[-1])


class RecordLayer(TreeLayer):
    """A recurrent layer of compiled passes: in place of keys, inputs of a convolution, and of values, records of rows.

    The records of committed rows are pending until a pass applies them to the matrices in one of two places; it writes
    the result to the other, so that a pass that fails changes nothing.
    """

    matrices: torch.Tensor  # float32[2, H, V / T, K, T]

    def take_shape(self, shape: LayerShape, dtype: torch.dtype) -> None:
        inputs, records = torch.empty(1, 1, 0, shape.size, dtype=dtype), torch.empty(1, 1, 0, shape.values)
        self.lazy_initialization(inputs, records)
        self.matrices = torch.zeros(2, *(shape.matrices or (0,)))


def side_by_side(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is stored as keys and as values, float[1, heads, R, D]; latents, of two sizes, are stored as keys."""
    if keys.shape[1] > 1 or keys.shape[-1] == values.shape[-1]:
        return keys, values
    return torch.cat((keys, values), dim=-1), values[..., :0]


def apart(keys: torch.Tensor, values: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys, of this size, and values of which `side_by_side` made these."""
    return (keys, values) if keys.shape[-1] == size else (keys[..., :size], keys[..., size:])


def allocated(like: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return a buffer of `capacity` slots for states of this shape, float[1, heads, any number, head_dim]."""
    # zeros, because a masked slot is still multiplied by weight 0, and 0 * NaN is NaN
    return like.new_zeros((*like.shape[:-2], capacity, like.shape[-1]))


def kept_rows(rows: Sequence[int], count: int) -> npt.NDArray[np.int64]:
    """Return the rows to commit, int64[n]; raises ValueError if they are not ascending, or `count` or more."""
    if any(row >= after for row, after in pairwise([-1, *rows, count])):  # numpy takes ten times as long for so few
        raise ValueError(f"Rows {list(rows)} must be ascending and below {count}, the rows held and of the last pass.")
    return np.array(rows, np.int64)


def move_rows(buffers: torch.Tensor, start: int, rows: npt.NDArray[np.int64]) -> None:
    """Copy the slots `start + rows`, int64[n] and ascending, to `start` onwards, in float[B, heads, C, head_dim]."""
    if buffers.device.type == "cpu":
        _move_words(buffers.view(torch.int16).numpy(), start, rows)
    else:
        index = torch.from_numpy(rows + start).to(buffers.device)
        buffers[:, :, start : start + len(rows)] = buffers.index_select(2, index)


# compiled at import, and not at its first use, which is in the middle of a text
@njit(["void(int16[:,:,:,::1], int64, int64[::1])", "void(int16[:,:,:,:], int64, int64[::1])"], cache=True)
def _move_words(slots: npt.NDArray[np.int16], start: int, rows: npt.NDArray[np.int64]) -> None:
    """Do the same in memory that is seen as words, several times faster than torch."""
    for buffer in range(slots.shape[0]):
        for head in range(slots.shape[1]):
            for place in range(len(rows)):
                slots[buffer, head, start + place] = slots[buffer, head, start + rows[place]]


class TreeCache(Cache):
    """The cache of one sequence for transformers' models; `windows` are the layers', None for full attention.

    `kinds` are the classes of layers that keep more than keys and values; None if there are none. Those that keep
    records of rows have convolutions of so many `taps`.
    """

    def __init__(
        self, windows: Sequence[int | None], kinds: Sequence[type[TreeLayer]] | None = None, taps: int = 1
    ) -> None:
        classes = [TreeLayer] * len(windows) if kinds is None else kinds
        recorded = [kind is RecordLayer for kind in classes]
        attending = [window for window, each in zip(windows, recorded, strict=True) if not each]
        self.spans = {window: Span(window) for window in dict.fromkeys(attending)}
        # before a text, a convolution sees zeros
        records = Span(taps, stored=taps - 1)
        self.records = records if any(recorded) else None
        self._spans = [*self.spans.values(), *([records] if any(recorded) else [])]
        given = [records if each else self.spans[window] for window, each in zip(windows, recorded, strict=True)]
        self._tree_layers = [kind(span) for kind, span in zip(classes, given, strict=True)]
        # layers that keep more than keys and values: asking all of them takes 8 microseconds of a step
        self._keeping = [each for each in self._tree_layers if type(each).commit is not TreeLayer.commit]
        super().__init__(layers=list(self._tree_layers))
        self.length = 0  # number of committed tokens
        self.held = 0  # number of rows held: written, visible to later passes, and not committed
        self._rows = 0  # of the last pass
        self.prompt = 1  # number of tokens of the prompt, whose last one is run with the first draft
        self.store: torch.Tensor | None = None  # that holds every layer's slots, if one does

    @classmethod
    def of_shapes(cls, windows: Sequence[int | None], shapes: Sequence[LayerShape], dtype: torch.dtype) -> "TreeCache":
        """Return the cache of a compiled model, initialised on the CPU.

        After the layers that `windows` are of may come the states of those that keep keys and values too.
        """
        kinds = [RecordLayer if shape.taps else TreeLayer for shape in shapes]
        both = [None] * (len(shapes) - len(windows))
        cache = cls([*windows, *both], kinds, max(shape.taps for shape in shapes))
        for layer, shape in zip(cache._tree_layers, shapes, strict=True):
            layer.take_shape(shape, dtype)
        return cache

    def reserve(self, rows: int) -> None:
        """Make room for `rows` more rows, growing full-attention layers and shifting sliding ones when they are full.

        Room for all rows that will be held must be reserved before the first of them: held rows cannot be shifted.
        """
        for span in self._spans:
            drop = 0
            if span.window is not None and not self.held and span.stored + rows > span.capacity:
                drop = max(0, span.stored - max(span.window - 1, span.pending))
            self._grow(span, rows, drop)
        self._rows = rows

    def reserve_text(self, tokens: int) -> None:
        """Make room for so many more tokens at once, where no window limits what is kept; growing copies everything."""
        if None in self.spans:
            self._grow(self.spans[None], tokens)

    def _grow(self, span: Span, rows: int, drop: int = 0) -> None:
        """Drop the first `drop` slots, and allocate slots for `rows` more rows if they do not fit."""
        needed, capacity = span.stored - drop + rows, span.capacity
        if needed > capacity and span.window is None:  # grows by at least a quarter so that copying stays rare
            capacity = whole_blocks(max(needed, capacity + capacity // 4))
        elif needed > capacity and span.window:  # with slack, so that slots are shifted once a window
            capacity = whole_blocks(max(needed, min(2 * span.window, needed + span.window)))
        if drop or capacity != span.capacity:
            self._resize(span, drop, capacity)

    def reserved_buffers(self, rows: int) -> list[torch.Tensor]:
        """Make room for `rows` more rows, and return all layers' keys, then values; none before all are initialised."""
        self.reserve(rows)
        layers = self._tree_layers
        if not all(layer.is_initialized for layer in layers):
            return []
        return [layer.keys for layer in layers] + [layer.values for layer in layers]

    def attended(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values of the committed tokens, as `SequenceView.attended` says."""
        kept = self._tree_layers[layer]
        own = slice(kept.span.stored - self.held)
        return kept.keys[:, :, own], kept.values[:, :, own]

    def matrices(self) -> list[torch.Tensor]:
        """Return the matrices of all recurrent layers that have some."""
        if self.records is None:  # a step has no time to ask every layer
            return []
        layers = (each for each in self._tree_layers if isinstance(each, RecordLayer))
        return [each.matrices for each in layers if each.matrices.numel()]

    def advance(self) -> None:
        """Note that a pass has succeeded, which wrote the matrices if there were `PENDING` records."""
        if self.records is not None and self.records.pending >= PENDING:
            self.records.at, self.records.pending = 1 - self.records.at, 0

    def move_into(self, store: torch.Tensor) -> None:
        """Move all slots into `store`, float[2 L, heads, C, head_dim]: the keys of L layers, then the values.

        Only for caches without sliding windows whose layers have one shape and were all written to.
        """
        (span,) = self.spans.values()
        self._resize(span, 0, store.shape[2], store)
        store[:, :, span.stored :] = 0  # remains of another sequence may be NaN, and weight 0 times NaN is NaN

    def move_out(self) -> None:
        """Move all slots back into buffers of each layer."""
        (span,) = self.spans.values()
        self._resize(span, 0, whole_blocks(span.stored + self._rows))

    def commit(self, rows: Sequence[int]) -> None:
        """Commit these rows of the held rows and then the last pass, ascending, and discard the others."""
        kept = kept_rows(rows, self.held + self._rows)
        for layer in self._keeping:
            layer.commit(kept)
        if len(kept) and kept[-1] >= len(kept):  # not already at the front
            # a layer that never writes, such as one that shares another's keys, has no buffers
            written = [layer for layer in self._tree_layers if layer.is_initialized]
            buffers = [(each, layer.span) for layer in written for each in (layer.keys, layer.values)]
            for buffer, span in buffers if self.store is None else [(self.store, self.spans[None])]:
                move_rows(buffer, span.stored - self.held, kept)
        for span in self._spans:
            span.stored += len(kept) - self.held
        if self.records is not None:
            self.records.pending += len(kept)
        self.length += len(kept)
        self._rows = self.held = 0

    def hold(self) -> None:
        """Keep the rows of the last pass visible to the next passes until `commit` selects from them."""
        for span in self._spans:
            span.stored += self._rows
        self.held += self._rows
        self._rows = 0

    @torch.inference_mode()
    def _resize(self, span: Span, drop: int, capacity: int, store: torch.Tensor | None = None) -> None:
        """Drop the first `drop` slots; move the others, including the last pass's, into `capacity` slots.

        These are buffers of each layer, or those of `store`.
        """
        layers, stop = self._tree_layers, min(span.stored + self._rows, span.capacity)

        def chosen() -> Iterator[tuple[TreeLayer, torch.Tensor, torch.Tensor]]:
            for number, layer in enumerate(layers):
                if layer.span is span and layer.is_initialized:
                    keys, values = layer.keys, layer.values
                    if store is not None:
                        keys, values = store[number, None], store[number + len(layers), None]
                    elif capacity != span.capacity or self.store is not None:
                        keys, values = allocated(keys, capacity), allocated(values, capacity)
                    yield layer, keys, values

        # one by one, which needs memory for one; but without memory outside of a store, all must stay in it
        for layer, keys, values in chosen() if self.store is None else list(chosen()):
            layer.move(keys, values, drop, stop)
        span.base += drop
        span.stored -= drop
        span.capacity, self.store = capacity, store
