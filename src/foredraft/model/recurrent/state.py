"""What a recurrent layer keeps: the last inputs of its convolutions, and the matrices of its recurrences.

All recurrences are one: row `i`, with parent `p`, makes of its parent's matrix `S_i = exp(g_i) S_p + k_i u_i^T`, and
reads `q_i S_i`. A pass changes nothing that is committed: it leaves a record of each row, and to commit, the records of
the accepted rows are applied. So a pass that fails, a rejected draft and rows that are held need no copies of states.
A pass over several sequences reads each one's state in a numbered place, and makes another one in a second place, so
that a state that is kept for a later text costs no copy. Does not know which layer's code calls the operators, nor what
they compute `g`, `k` and `u` from.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from foredraft.errors import UnsupportedModelError
from foredraft.graph.layout import Layout
from foredraft.graph.tree import I64, BoolArray
from foredraft.model.kv_cache import Span, TreeCache, TreeLayer
from foredraft.model.mask import seen_rows
from foredraft.model.recurrent.layer import OperatorLayer, Reading


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
        paths = (np.flatnonzero(sees[: self.held]) for sees in self._sees)
        return list(zip(parents_of(self._sees)[self.held :].tolist(), paths, strict=True))

    @cached_property
    def last_child(self) -> dict[int, int]:
        """The index of the last row of the pass whose parent has this index."""
        return {parent: at for at, (parent, _) in enumerate(self.lineage, start=self.held)}

    def windows(self, taps: int) -> torch.Tensor:
        """Return what `convolution_windows` does for these rows."""
        if taps not in self._windows:
            index = convolution_windows(self._sees, taps, chain=self._chain)
            self._windows[taps] = torch.from_numpy(index).to(self._device)
        return self._windows[taps]


def parents_of(seen: BoolArray) -> I64:
    """Return the parents of H held rows and R rows, int64[H + R], by what the rows see, bool[R, H + R].

    They are indices of this array, or -1; a held row without descendants among the rows has its own.
    """
    held = seen.shape[1] - len(seen)
    parents = np.append(np.arange(held), np.full(len(seen), -1))
    for row, sees in enumerate(seen, start=held):
        path = np.append(np.flatnonzero(sees[:row]), row)
        parents[path[0]] = -1
        parents[path[1:]] = path[:-1]
    return parents


def convolution_windows(seen: BoolArray, taps: int, *, chain: bool) -> I64:
    """Return the last `taps` inputs that each row's convolution takes, its own last, int64[R, taps].

    They are indices into the `taps - 1` committed inputs, then those of the held rows, then of the R rows, which see
    those of `seen`, bool[R, H + R]: in a `chain` without held rows, all before them.
    """
    if chain:
        return np.add.outer(np.arange(len(seen)), np.arange(taps))
    committed = np.arange(taps - 1)
    return np.stack([np.append(committed, np.flatnonzero(row) + taps - 1)[-taps:] for row in seen])


@dataclass(slots=True, eq=False)
class Convolution:
    """The inputs of one causal depthwise convolution of D channels and L taps."""

    history: torch.Tensor  # [L - 1, D], of the last committed tokens
    inputs: torch.Tensor  # [H + R, D], of the rows held and of the last pass

    def commit(self, kept: I64) -> None:
        self.history = torch.cat([self.history, self.inputs[kept]])[len(kept) :].clone()
        self.inputs = _none(self.inputs)


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
        self.keys, self.updates, self.gates, self.decays = map(
            _none, (self.keys, self.updates, self.gates, self.decays)
        )

    def read(self, rows: Rows, q: torch.Tensor, v: torch.Tensor, beta: torch.Tensor | None) -> torch.Tensor:
        """Return what these recorded rows read with queries [R, H, K], [R, H, V], and record their updates.

        Those are `v`, [R, H, V], or with `beta`, [R, H], those of the delta rule.
        """
        one_decay = self.gates.shape[-1] == 1 and v.shape[-1] > 1
        return (self._read_at_once if one_decay else self._read_in_order)(rows, q, v, beta)

    def _read_at_once(self, rows: Rows, q: torch.Tensor, v: torch.Tensor, beta: torch.Tensor | None) -> torch.Tensor:
        """Do so by masked products of all rows, where each head has one decay.

        With G_i the sum of the gates on row i's path, S_i = exp(G_i) S + sum_j exp(G_i - G_j) k_j u_j^T over its
        ancestors j and itself, so the updates of the delta rule solve a triangular system of equations.
        """
        held, own = rows.held, self.decays[rows.held :]
        since = own.exp()  # the decay of the committed state
        between = own[..., 0].T[:, :, None] - self.decays[..., 0].T[:, None]
        between = between.masked_fill(~rows.sees, -torch.inf).exp()
        updates = v
        if beta is not None:
            keys = self.keys[held:]
            system = torch.einsum("rhk,thk->hrt", keys, self.keys) * between * beta.T[..., None]
            updates = beta[..., None] * (v - torch.einsum("rhk,hkv->rhv", keys * since, self.state))
            updates = updates - torch.einsum("hrt,thv->rhv", system[..., :held], self.updates[:held])
            lower = system[..., held:].tril(-1)  # a parent comes before its children
            solved = torch.linalg.solve_triangular(lower, updates.transpose(0, 1), upper=False, unitriangular=True)
            updates = solved.transpose(0, 1)
        self.updates = torch.cat([self.updates[:held], updates])
        weights = torch.einsum("rhk,thk->hrt", q, self.keys) * between
        committed = torch.einsum("rhk,hkv->rhv", q * since, self.state)
        return committed + torch.einsum("hrt,thv->rhv", weights, self.updates)

    def _read_in_order(self, rows: Rows, q: torch.Tensor, v: torch.Tensor, beta: torch.Tensor | None) -> torch.Tensor:
        """Do so row by row, each from its parent's matrices.

        That is where each channel has a decay of its own, or values are single numbers: products of all pairs of rows
        would need more memory than the matrices.
        """
        held, states, updates, outputs = rows.held, dict[int, torch.Tensor](), [self.updates[: rows.held]], []
        for at, (parent, path) in enumerate(rows.lineage, start=held):
            before = states[parent] if parent in states else self.after(path)
            state, key, update = before * self.gates[at].exp()[..., None], self.keys[at], v[at - held]
            if beta is not None:
                update = beta[at - held][:, None] * (update - (state * key[..., None]).sum(-2))
            state = state + key[..., None] * update[:, None]
            updates.append(update[None])
            outputs.append((state * q[at - held][..., None]).sum(-2))
            if at in rows.last_child:
                states[at] = state
            if rows.last_child[parent] == at:
                states.pop(parent, None)
        self.updates = torch.cat(updates)
        return torch.stack(outputs)


def begin(cache: TreeCache, layout: Layout, device: torch.device) -> None:
    """Give the recurrent layers of a cache the rows of the next pass."""
    rows = Rows(layout, cache.prompt, device)
    for layer in cache.layers:
        if isinstance(layer, StateLayer):
            layer.begin(rows)


def _none(records: torch.Tensor) -> torch.Tensor:
    """Return no records of this shape, which hold none of the others in memory."""
    return records.new_empty(0, *records.shape[1:])


class StateLayer(TreeLayer, OperatorLayer):
    """A layer with states, and with keys and values too if it writes any."""

    rows: Rows  # of the running pass

    def __init__(self, span: Span) -> None:
        OperatorLayer.__init__(self)
        TreeLayer.__init__(self, span)
        self.is_initialized = False
        self._convolutions: list[Convolution] = []
        self._recurrences: list[Recurrence] = []
        self._called = [0, 0]  # the convolutions and recurrences that the running pass has called

    def lazy_initialization(self, *states: Any, **_options: Any) -> None:
        if len(states) == 2:  # keys and values
            TreeLayer.lazy_initialization(self, *states)

    def begin(self, rows: Rows) -> None:
        """Take the rows of the next pass."""
        self.rows, self._called = rows, [0, 0]

    def in_prompt(self) -> torch.Tensor:
        return self.rows.in_prompt

    def convolution(self, taps: int, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self._convolutions) == self._called[0]:
            self._convolutions.append(Convolution(inputs.new_zeros(taps - 1, inputs.shape[1]), inputs))
        found = self._convolutions[self._called[0]]
        self._called[0] += 1
        found.inputs = torch.cat([found.inputs[: self.rows.held], inputs])
        return torch.cat([found.history, found.inputs]), self.rows.windows(taps)

    def read(self, asked: Reading) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys, values, gates, strengths, _ = asked
        queries, keys = (each.repeat_interleave(values.shape[1] // each.shape[1], 1) for each in (queries, keys))
        if len(self._recurrences) == self._called[1]:
            self._recurrences.append(Recurrence(keys, values, gates))
        found = self._recurrences[self._called[1]]
        self._called[1] += 1
        found.record(self.rows, keys, gates)
        return found.read(self.rows, queries, values, strengths), found.state

    def commit(self, kept: I64) -> None:
        """Commit these of the rows held and of the last pass, a path from the last committed token on."""
        for convolution in self._convolutions:
            convolution.commit(kept)
        for recurrence in self._recurrences:
            recurrence.commit(kept)

    def copied(self) -> "StateLayer":
        """Return a layer with the same states, which the commits of neither change in the other."""
        other = StateLayer(self.span)
        other._convolutions = [copy(each) for each in self._convolutions]
        other._recurrences = [copy(each) for each in self._recurrences]
        return other

    @property
    def size(self) -> int:
        """The number of bytes of the committed states."""
        kept = [*(each.history for each in self._convolutions), *(each.state for each in self._recurrences)]
        return sum(each.nbytes for each in kept)


class JointLayer(OperatorLayer):
    """A recurrent layer of a pass over several sequences: each one's rows read its own states."""

    def __init__(self, layers: Sequence[StateLayer]) -> None:
        super().__init__()
        self._layers = layers
        self._rows = [len(each.rows.in_prompt) for each in layers]

    def in_prompt(self) -> torch.Tensor:
        # what a prompt's tokens leave is then not what the same tokens leave as they are written
        raise UnsupportedModelError("This model limits the steps of a prompt's tokens alone.")

    def convolution(self, taps: int, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = zip(self._layers, inputs.split(self._rows), strict=True)
        found = [layer.convolution(taps, rows) for layer, rows in own]
        firsts = accumulate((len(taken) for taken, _ in found), initial=0)
        windows = [window + first for (_, window), first in zip(found, firsts, strict=False)]
        return torch.cat([taken for taken, _ in found]), torch.cat(windows)

    def read(self, asked: Reading) -> tuple[torch.Tensor, torch.Tensor]:
        of_rows = asked[:-1]  # all but factors, which gates are made of
        parts = [[None] * len(self._rows) if each is None else each.split(self._rows) for each in of_rows]
        found = [layer.read(Reading(*own)) for layer, *own in zip(self._layers, *parts, strict=True)]
        return torch.cat([read for read, _ in found]), found[0][1]


class JointStates:
    """The states of several sequences in numbered places, each made by a pass from that in another place."""

    buffers: dict[int, torch.Tensor] = {}  # noqa: RUF012  # not changed
    matrices: Sequence[torch.Tensor] = ()

    def __init__(self, recurrent: Sequence[int], device: torch.device) -> None:
        """Begin with place 0, the states before a text, of the layers of these numbers."""
        self._places = {0: {number: StateLayer(Span(None)) for number in recurrent}}
        self._device = device

    def begin(self, layouts: Sequence[Layout], places: Sequence[tuple[int, int]]) -> dict[int, list[StateLayer]]:
        """Return, by layer, the states that each layout's rows read and leave records in.

        They are those of the first of two places; `commit` makes that of the second.
        """
        found: dict[int, list[StateLayer]] = {number: [] for number in self._places[0]}
        for layout, (before, after) in zip(layouts, places, strict=True):
            rows = Rows(layout, 0, self._device)
            self._places[after] = {number: layer.copied() for number, layer in self._places[before].items()}
            for number, layer in self._places[after].items():
                layer.begin(rows)
                found[number].append(layer)
        return found

    def commit(self, _before: int, after: int, kept: I64) -> None:
        """Commit these of a sequence's rows in the last pass, to the place that it was given."""
        for layer in self._places[after].values():
            layer.commit(kept)
