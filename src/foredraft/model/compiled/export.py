"""A model's forward as a function of tensors alone, as an ahead-of-time compiler needs it.

The cache's buffers are arguments and are written in place; masks, positions and slots are arguments too. Uses
transformers' forward and attention interface, and torch's exporter. Does not depend on how it is compiled.
"""

from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import chain
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import Cache

from foredraft.errors import UsageError
from foredraft.graph.layout import Layout, lay_out_text
from foredraft.graph.tree import I64
from foredraft.model.compiled.attention import LANES, compiled_attention
from foredraft.model.compiled.library import CompiledLibrary
from foredraft.model.compiled.package import MOST_ROWS
from foredraft.model.compiled.recurrence import Lineage, TracedLayer, layer_shapes, lineage
from foredraft.model.families import UNMASKED_LAYERS
from foredraft.model.kv_cache import BufferLayer, Span, TreeCache, allocated
from foredraft.model.layers import LAST, tapped_states, usual_taps
from foredraft.model.mask import joined_mask
from foredraft.model.recurrent.adoption import adopt
from foredraft.model.recurrent.layer import BothLayer, OperatorLayer
from foredraft.model.recurrent.state import JointLayer, StateLayer
from foredraft.model.support import cache_argument, inspect
from foredraft.sampling.logits import block_maxima

CONTEXT = 200  # slots in use when a forward is traced, compared and timed; chosen
_TRACED_SEQUENCES = 5  # when it is traced; unlike all other sizes, so that the exporter tells them apart


class FunctionalForward(nn.Module):
    """The logits and last hidden states of a pass, from its rows and the buffers of a cache.

    The model is in evaluation mode; its layers of one sliding window share slots and mask. Recurrent layers keep
    `records`, or read the `states` that are set for a pass. If it `summarises`, the results of `block_maxima` and
    `logsumexp` of the logits come with them, as `top_by_blocks` takes them, and the states that enter the layers that
    EAGLE-3 reads, if there are such layers. A `HeadModel`'s rows are no tokens, and its hidden states the next ones.
    """

    def __init__(self, model: Any, *, summarises: bool = False, records: bool = True) -> None:
        super().__init__()
        self.model, self._summarises = model, summarises
        self.width: int = getattr(model, "embedded_width", 0)  # of a head's rows; 0 for a model that reads tokens
        self.taps = usual_taps(model) if summarises and not self.width else ()
        self._scores_some = "logits_to_keep" in signature(model.forward).parameters
        self._cache_argument = cache_argument(model)
        support = inspect(model.config)
        self._layers = len(support.layer_types)
        recorded = [number for number, each in enumerate(support.recurrent) if each and records]
        both = [number for number in recorded if support.layer_types[number] not in UNMASKED_LAYERS]
        attending = {n: window for n, window in enumerate(support.windows) if n in both or n not in recorded}
        self.windows = tuple(dict.fromkeys(attending.values()))
        # the number of each layer's window, where it keeps keys and values or nothing
        self._attending = {n: self.windows.index(window) for n, window in attending.items()}
        # the same of all layers, after these that of records; and after the layers, those of the states of layers that
        # keep keys and values too
        self.window_of = [self._attending.get(n, len(self.windows)) for n in range(self._layers + len(both))]
        # of each layer that keeps records, where the buffers of its state are
        self._records = {n: self._layers + both.index(n) if n in both else n for n in recorded}
        # the number of each mask, None for none, by the names that layers know them by
        recurrent = ["linear_attention"] * any(support.recurrent)  # also of layers that attend too
        self._masks = dict.fromkeys((*support.layer_types, *recurrent)) | {
            name: self.windows.index(window) for name, window in support.masks.items()
        }
        self._attends = bool(support.masks)
        self._one_mask = self._attends and len(self._masks if records else support.masks) == 1
        # of the current pass, by layer; empty if all rows have the first slots
        self.ranges: dict[int, torch.Tensor] = {}
        self.keys: Sequence[torch.Tensor] = ()  # the same, that the pass is given
        self.states: Mapping[int, Sequence[StateLayer]] = {}  # the same, of each sequence; for layers without records

    def forward(
        self,
        rows: torch.Tensor,  # int64[1, R], tokens; or float[1, R, W], what a head reads in their place
        positions: torch.Tensor,  # int64[1, R]
        scored: torch.Tensor | None,  # int64[S], the rows that are scored; None for all
        masks: list[torch.Tensor],  # for each window, float[1, 1, R, W], added to attention scores
        slots: list[torch.Tensor],  # for each window, int64[R], the slots that the rows' states go to
        ranges: list[torch.Tensor] | None,  # for each window, int64[2, R], as `attend` takes them
        steps: list[torch.Tensor] | None,  # a `Lineage`, where layers keep records
        keys: list[torch.Tensor],  # for each layer, float[1, heads, C, head_dim], written in place
        values: list[torch.Tensor],  # the same; of a layer that keeps a state, both as `RecordLayer` has them
        matrices: list[torch.Tensor],  # for each layer that has some, float32[N, H, V / T, K, T], written in place
    ) -> tuple[torch.Tensor, ...]:
        """Score rows, and write their states into the cache's buffers.

        A row's range is the slot that the first column of its mask stands for, and how many of the columns it has;
        without ranges, all rows have the first W slots. Returns logits float[S, V], last hidden states float[S, D], and
        if it summarises float[S, V / 64], float[S] and the states of the `taps`, float[R, K * D] for K layers.
        """
        layers: list[Any] = []  # transformers' list type takes no subclass
        self.ranges = {} if ranges is None else {layer: ranges[window] for layer, window in self._attending.items()}
        self.keys = keys
        operators: dict[int, OperatorLayer] = {layer: JointLayer(of) for layer, of in self.states.items()}
        if steps is not None:
            places = sorted(place for place in self._records.values() if values[place].shape[-1])
            own = dict(zip(places, matrices, strict=True))
            operators = {
                layer: TracedLayer(Lineage(*steps), keys[place], values[place], own.get(place))
                for layer, place in self._records.items()
            }
        for layer in range(self._layers):
            if layer not in self._attending:
                layers.append(operators[layer])
                continue
            window = self._attending[layer]
            visible = masks[window].shape[-1] if ranges is None else keys[layer].shape[2]
            torch._check(visible <= keys[layer].shape[2])  # noqa: SLF001  # the documented way to tell the exporter
            buffer = BufferLayer(keys[layer], values[layer], slots[window], visible)
            layers.append(BothLayer(buffer, operators[layer]) if layer in operators else buffer)
        mask: Any = {name: None if of is None else masks[of] for name, of in self._masks.items()}
        if self._one_mask:  # then layers that attend to nothing are given none
            (mask,) = (each for each in mask.values() if each is not None)
        options = {} if scored is None or not self._scores_some else {"logits_to_keep": scored}
        given = {"attention_mask": mask, "position_ids": positions} if self._attends else {}
        with tapped_states(self.model, {LAST, *chain.from_iterable(self.taps)}) as states:
            output = self.model(
                use_cache=True,
                **{"inputs_embeds" if self.width else "input_ids": rows},
                **{self._cache_argument: Cache(layers=layers)},
                **given,
                **options,
            )
        self.ranges, self.keys = {}, ()  # the exporter objects to attributes that a forward leaves changed
        logits, hidden = output.logits[0], (output.hidden_states[-1] if self.width else states[LAST])[0]
        if scored is not None and not options:
            logits, hidden = logits[scored], hidden[scored]
        if not self._summarises:
            return logits, hidden
        logits = logits.float()
        tapped = [torch.cat([states[number][0] for number in layers], dim=-1) for layers in self.taps]
        return logits, hidden, block_maxima(logits), logits.logsumexp(-1), *tapped

    def layer_of(self, attention: nn.Module) -> int:
        """Return the number of the layer that an attention is of, or of another one with its window.

        A block that several layers share, as Zamba 2's do, does not know which of them calls it; then -1 if they may
        have several windows.
        """
        number = int(attention.layer_idx)  # type: ignore[arg-type]  # every attention of transformers has it, as an int
        return next(iter(self.ranges)) if number < 0 and len(self.windows) == 1 else number


class Subject:
    """A model's functional forward, with arguments to trace and time it.

    Raises UsageError for attention that has no kernel, and for a layer that keeps something else than keys and values,
    or records and matrices.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.forward = model, FunctionalForward(model, summarises=True).eval()
        self.dtype = model.dtype
        adopt(model)
        self.shapes = layer_shapes(model)
        self._check_attention()

    def _check_attention(self) -> None:
        """Raise UsageError unless `attend` can take the place of the model's attention."""
        for shape in self.shapes:
            if not shape.taps and shape.size % LANES:
                raise UsageError(
                    f"This model's heads have {shape.size} numbers, and the compiled attention takes multiples of "
                    f"{LANES}; it runs uncompiled."
                )
        support = inspect(self.model.config)
        arguments = (*self.arguments(np.zeros(2, np.int64)), *self.buffers())
        unread = patch.object(TracedLayer, "read", lambda _layer, asked: (asked.values, asked.values))
        try:  # whether its layers ask transformers which attention to use shows only when they run
            with torch.inference_mode(), unread, compiled_attention(self.forward, _unattended) as attended:
                self.forward(*arguments)
            replaced = len(attended) == sum(kind not in UNMASKED_LAYERS for kind in support.layer_types)
        except UsageError:
            raise
        except Exception:  # noqa: BLE001  # there is no list of what other attention raises
            replaced = False
        if not replaced:
            raise UsageError(
                f"This {support.family} model attends in a way of its own, for which there is no kernel; it runs "
                "uncompiled."
            )

    def dynamic(self) -> tuple[Any, ...]:
        """Return the dimensions that vary: of each window, the slots in use and allocated; and the rows."""
        # from 2: the exporter takes a dimension that may be 1 for a constant
        rows, scored = (torch.export.Dim(name, min=2, max=MOST_ROWS) for name in ("rows", "scored"))
        # the exporter wants room after the slots in use; without any the code runs too
        windows = range(len(self.forward.windows))
        visible = [torch.export.Dim(f"visible{window}", min=2, max=2**20 - 1) for window in windows]
        capacity = [torch.export.Dim(f"capacity{window}", min=3, max=2**20) for window in (*windows, len(windows))]
        buffers = [{2: capacity[window]} for window in self.forward.window_of]
        masks, slots = [{2: rows, 3: dim} for dim in visible], [{0: rows} for _ in visible]
        of_rows = [{1: rows} for _ in visible]
        nodes = torch.export.Dim("nodes", min=2, max=2 * MOST_ROWS)  # with those that are held
        sequences = torch.export.Dim("sequences", min=2, max=MOST_ROWS)
        steps = [{0: rows}, {0: rows}, {0: nodes}, {0: sequences}, {0: rows}] if self.recurrent else None
        places = torch.export.Dim("places", min=2, max=2**20)
        matrices = [{0: places}] * sum(bool(shape.matrices) for shape in self.shapes)
        return ({1: rows}, {1: rows}, {0: scored}, masks, slots, of_rows, steps, buffers, list(buffers), matrices)

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state."""
        return any(shape.taps for shape in self.shapes)

    def buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Return what every layer keeps, with room for the most rows after some context."""
        # windows differ in what is allocated, so that the exporter tells them apart
        room = [CONTEXT + MOST_ROWS + 56 + 8 * window for window in self.forward.window_of]
        cache, layers = self.new_cache(), len(room)
        buffers = [allocated(each, slots) for each, slots in zip(cache.reserved_buffers(0), 2 * room, strict=True)]
        return buffers[:layers], buffers[layers:], cache.matrices()

    def new_cache(self) -> TreeCache:
        """Return an empty cache, in which all attention layers keep all positions."""
        return TreeCache.of_shapes([None] * len(self.shapes), self.shapes, self.dtype)

    def arguments(self, token_ids: I64, scored: int | None = None) -> tuple[Any, ...]:
        """Return the arguments of `FunctionalForward.forward` before the buffers: a chain after `CONTEXT` slots."""
        rows, places = np.arange(len(token_ids)), {window: [(0, CONTEXT)] for window in self.forward.windows}
        rows = rows if scored is None else rows[-scored:]
        taps, layout, steps = max(shape.taps for shape in self.shapes), lay_out_text(token_ids, CONTEXT), None
        if self.recurrent:
            steps = lineage(layout, Span(taps, stored=CONTEXT, pending=1))
            if scored is not None:  # one sequence alone would be taken for a constant
                steps = steps._replace(sequences=steps.sequences.repeat(_TRACED_SEQUENCES, 1))
        ids, *others = row_arguments([layout], places, rows, self.dtype, steps=steps)
        embedded = self.embedded(len(token_ids))
        return (ids if embedded is None else embedded[None], *others)

    def embedded(self, rows: int) -> torch.Tensor | None:
        """Return noise in the place of a head's rows, float[R, W]; None for a model that reads tokens."""
        noise, width = torch.Generator().manual_seed(rows), self.forward.width
        return torch.randn(rows, width, generator=noise).to(self.dtype) if width else None


def _unattended(query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_others: object) -> torch.Tensor:
    """Return zeros in the place of what `attend` returns, which only compiled code computes."""
    return query.new_zeros(query.shape[1], query.shape[0] * value.shape[2])


def run_pass(
    package: CompiledLibrary, layout: Layout, cache: TreeCache, spans: Mapping[int | None, Span], dtype: torch.dtype,
    scored: int | None = None, embedded: torch.Tensor | None = None,
) -> list[torch.Tensor] | None:  # fmt: skip
    """Run a compiled forward for the rows of one sequence, whose layers with a window have the slots of its span.

    A head is given `embedded`, float[R, W], for their tokens. Returns what `FunctionalForward.forward` does, for the
    last `scored` rows or all; None before all of the cache's layers are initialised.
    """
    buffers = cache.reserved_buffers(layout.rows)
    if not buffers:
        return None
    rows, places = np.arange(layout.rows), {window: [(0, span.stored)] for window, span in spans.items()}
    rows = rows if scored is None else rows[-scored:]
    steps = None if cache.records is None else lineage(layout, cache.records, cache.prompt)
    arguments = row_arguments([layout], places, rows, dtype, steps=steps)
    inputs = flat(arguments) if embedded is None else [embedded[None], *flat(arguments)[1:]]
    result = package.run([*inputs, *buffers, *cache.matrices()])
    cache.advance()
    return result


def flat(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return arguments of `FunctionalForward.forward` in the order in which the exporter flattens them."""
    groups = (each if isinstance(each, list) else [each] for each in arguments)
    return [each for group in groups for each in group if each is not None]


def row_arguments(
    layouts: Sequence[Layout], places: Mapping[int | None, Sequence[tuple[int, int]]], scored: I64,
    dtype: torch.dtype, *, steps: Lineage | Mapping[int, Sequence[StateLayer]] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments of `FunctionalForward.forward` before the buffers, for the rows of one or more sequences.

    Takes, for each window, each sequence's first slot that is read and how many from there on hold earlier rows; which
    rows are scored, int64[S]; the masks' dtype; and the rows' lineage, where layers keep records, or the states
    that `JointStates.begin` returns.
    """
    total, masks, slots, bounds = sum(layout.rows for layout in layouts), [], [], []
    for window, place in places.items():
        committed = [stored - len(layout.held) for layout, (_, stored) in zip(layouts, place, strict=True)]
        masks.append(joined_mask(layouts, committed, dtype, window))
        own, seen, row = np.empty(total, np.int64), np.empty((2, total), np.int64), 0
        for layout, (first, count) in zip(layouts, place, strict=True):
            end, last = row + layout.rows, first + count + layout.rows
            own[row:end] = np.arange(last - layout.rows, last)
            seen[0, row:end], seen[1, row:end] = first, last - first
            row = end
        slots.append(torch.from_numpy(own))
        bounds.append(torch.from_numpy(seen))
    return (
        torch.from_numpy(np.concatenate([layout.token_ids for layout in layouts])[None]),
        torch.from_numpy(np.concatenate([layout.positions for layout in layouts])[None]),
        torch.from_numpy(scored),
        masks,
        slots,
        bounds,
        list(steps) if isinstance(steps, Lineage) else steps,
    )
