"""The states of several sequences for the recurrent layers of one uncompiled pass, in numbered places.

A state is not changed once it is committed: a pass reads it in one place and makes another one in a second place. So a
state that is kept for a later text costs no copy. Does not know which places are free, nor what is worth keeping.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from foredraft.errors import UnsupportedModelError
from foredraft.graph.layout import Layout
from foredraft.graph.tree import I64
from foredraft.model.kv_cache import Span
from foredraft.model.recurrent.layer import OperatorLayer, Reading
from foredraft.model.recurrent.state import Rows, StateLayer


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
