"""What a recurrent layer keeps: the last inputs of its convolutions, and the matrices of its recurrences.

All recurrences are one: row `i`, with parent `p`, makes of its parent's matrix `S_i = exp(g_i) S_p + k_i u_i^T`, and
reads `q_i S_i`. A pass changes nothing that is committed: it leaves a record of each row, and to commit, the records of
the accepted rows are applied. So a pass that fails, a rejected draft and rows that are held need no copies of states.
Does not know which layer's code calls the operators, nor what they compute `g`, `k` and `u` from.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from foredraft.graph.layout import Layout
from foredraft.graph.tree import I64
from foredraft.model.kv_cache import Span, TreeCache, TreeLayer
from foredraft.model.mask import seen_rows

try:
    from transformers.cache_utils import LinearAttentionCacheLayerMixin
except ImportError:  # transformers before 5.8, whose recurrent models are refused
    LinearAttentionCacheLayerMixin = object  # type: ignore[misc,assignment]  # a class instead of another


class Rows:
    """The R rows of a pass after H held ones, as recurrences need them."""

    def __init__(self, layout: Layout, prompt: int, device: torch.device) -> None:
        self.held = len(layout.held)
        self._sees = seen_rows(layout)
        self._chain = layout.ancestors is None
        self._device = device
        self.sees = torch.from_numpy(np.ascontiguousarray(self._sees)).to(device)  # bool[R, H + R], itself included
        self.in_prompt = torch.from_numpy(layout.positions < prompt).to(device)  # bool[R]
        self._windows: dict[int, torch.Tensor] = {}

    @cached_property
    def lineage(self) -> list[tuple[int, I64]]:
        """Each row's parent, by its index among held rows and rows, or -1, and the held rows among its ancestors."""
        found = []
        for row, sees in enumerate(self._sees):
            before = np.flatnonzero(sees[: self.held + row])
            found.append((int(before[-1]) if len(before) else -1, before[before < self.held]))
        return found

    @cached_property
    def last_child(self) -> dict[int, int]:
        """The index of the last row of the pass whose parent has this index."""
        return {parent: at for at, (parent, _) in enumerate(self.lineage, start=self.held)}

    def windows(self, taps: int) -> torch.Tensor:
        """Return the last `taps` inputs that each row's convolution sees, its own last, int64[R, taps].

        They are indices into the `taps - 1` committed inputs, then those of the held rows, then of the pass's.
        """
        if taps not in self._windows:
            if self._chain:
                index = np.add.outer(np.arange(len(self._sees)), np.arange(taps))
            else:
                committed = np.arange(taps - 1)
                own = (np.flatnonzero(row) + taps - 1 for row in self._sees)
                index = np.stack([np.append(committed, each)[-taps:] for each in own])
            self._windows[taps] = torch.from_numpy(index).to(self._device)
        return self._windows[taps]


@dataclass(slots=True, eq=False)
class Convolution:
    """The inputs of one causal depthwise convolution of D channels and L taps."""

    history: torch.Tensor  # [L - 1, D], of the last committed tokens
    inputs: torch.Tensor  # [H + R, D], of the rows held and of the last pass

    def commit(self, kept: I64) -> None:
        self.history = torch.cat([self.history, self.inputs[kept]])[-len(self.history) :]


class Recurrence:
    """The matrices of one recurrence, of H heads with keys of size K and values of size V, and the rows' records.

    All is in float32, or float64 for a model in float64.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, gates: torch.Tensor) -> None:
        """Begin with matrices of zeros, in the shapes of these rows: [R, H, K], [R, H, V], and [R, H, K] or [R, H, 1].

        `gates` are logarithms of decays, of each key channel or of a whole head.
        """
        self.state = keys.new_zeros(*keys.shape[1:], values.shape[-1])  # [H, K, V], after the last committed token
        # of the T rows held and of the last pass
        self.keys, self.updates, self.gates = keys[:0], values[:0], gates[:0]
        self.decays = gates[:0]  # the sums of the gates along each row's path from the last committed token on

    def record(self, rows: Rows, keys: torch.Tensor, gates: torch.Tensor) -> None:
        """Replace the last pass's keys and gates by those of these rows, as before."""
        self.keys = torch.cat([self.keys[: rows.held], keys])
        self.gates = torch.cat([self.gates[: rows.held], gates])
        own = torch.einsum("rt,thk->rhk", rows.sees.to(gates), self.gates)
        self.decays = torch.cat([self.decays[: rows.held], own])

    def after(self, path: I64) -> torch.Tensor:
        """Return the matrices after these recorded rows, [H, K, V]: a path from the last committed token on."""
        if not len(path):
            return self.state
        decays = self.decays[path]
        left = (decays[-1:] - decays).exp() * self.keys[path]
        return self.state * decays[-1].exp()[..., None] + torch.einsum("nhk,nhv->hkv", left, self.updates[path])

    def commit(self, kept: I64) -> None:
        self.state = self.after(kept)


def begin(cache: TreeCache, layout: Layout, device: torch.device) -> None:
    """Give the recurrent layers of a cache the rows of the next pass."""
    rows = Rows(layout, cache.prompt, device)
    for layer in cache.layers:
        if isinstance(layer, StateLayer):
            layer.begin(rows)


class StateLayer(TreeLayer, LinearAttentionCacheLayerMixin):
    """A layer with states, and with keys and values too if it writes any.

    A mixer of transformers that finds no earlier state in the cache runs its code for many rows, whose operators are
    replaced (adoption.py). So `has_previous_state` stays False here, and what the mixer hands over is not kept.
    """

    rows: Rows  # of the running pass

    def __init__(self, span: Span) -> None:
        TreeLayer.__init__(self, span)
        LinearAttentionCacheLayerMixin.__init__(self)
        self.is_initialized = False
        self.has_previous_state = defaultdict(bool)
        self._convolutions: list[Convolution] = []
        self._recurrences: list[Recurrence] = []
        self._called = [0, 0]  # the convolutions and recurrences that the running pass has called

    def lazy_initialization(self, *states: Any, **_options: Any) -> None:
        if len(states) == 2:  # keys and values
            TreeLayer.lazy_initialization(self, *states)

    def update_conv_state(self, conv_states: torch.Tensor, *_args: object, **_options: object) -> torch.Tensor:
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *_: object, **_options: object) -> torch.Tensor:
        return recurrent_states

    def begin(self, rows: Rows) -> None:
        """Take the rows of the next pass."""
        self.rows, self._called = rows, [0, 0]

    def convolution(self, taps: int, inputs: torch.Tensor) -> Convolution:
        """Return the next convolution of the pass, with the inputs of its rows, [R, D], recorded."""
        if len(self._convolutions) == self._called[0]:
            self._convolutions.append(Convolution(inputs.new_zeros(taps - 1, inputs.shape[1]), inputs))
        found = self._convolutions[self._called[0]]
        self._called[0] += 1
        found.inputs = torch.cat([found.inputs[: self.rows.held], inputs])
        return found

    def recurrence(self, keys: torch.Tensor, values: torch.Tensor, gates: torch.Tensor) -> Recurrence:
        """Return the next recurrence of the pass, with the keys and gates of its rows recorded."""
        if len(self._recurrences) == self._called[1]:
            self._recurrences.append(Recurrence(keys, values, gates))
        found = self._recurrences[self._called[1]]
        self._called[1] += 1
        found.record(self.rows, keys, gates)
        return found

    def commit(self, kept: I64) -> None:
        """Commit these of the rows held and of the last pass, a path from the last committed token on."""
        for convolution in self._convolutions:
            convolution.commit(kept)
        for recurrence in self._recurrences:
            recurrence.commit(kept)
