"""What the operators of a recurrent layer ask of the layer's cache, and transformers of both.

A mixer of transformers that finds no earlier state in the cache runs its code for many rows, whose operators are
replaced (adoption.py). So no layer here has a previous state, and what the mixer hands over is not kept.
"""

from abc import abstractmethod
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from foredraft.model.kv_cache import TreeLayer


class Reading(NamedTuple):
    """What R rows ask of a recurrence of H heads with keys of size K and values of size V.

    Row `i`, with parent `p`, makes of its parent's matrix `S_i = exp(g_i) S_p + k_i u_i^T`, and reads `q_i S_i`. Its
    update `u` is its value, or with `strengths` that of the delta rule, `beta (v - k exp(g) S_p)`.
    """

    queries: torch.Tensor  # [R, Hk, K], with Hk a divisor of H
    keys: torch.Tensor  # the same
    values: torch.Tensor  # [R, H, V]
    gates: torch.Tensor  # [R, H, 1], the logarithms of decays, or [R, H, K] with a decay for each channel
    strengths: torch.Tensor | None = None  # [R, H]
    # where values are single numbers and all heads have the same queries and keys: [R, H] and [H, K], which multiplied
    # by each other are the gates
    factors: tuple[torch.Tensor, torch.Tensor] | None = None

    def joined(self) -> "Reading":
        """Return the same of one head, with a value of H numbers and gates [R, 1, H], where there are factors."""
        if self.factors is None:
            return self
        one = (self.queries[:, :1], self.keys[:, :1], self.values.mT, self.factors[0][:, None])
        return Reading(*one, factors=self.factors)


class OperatorLayer(LinearAttentionCacheLayerMixin):
    """A layer of a cache that gives operators what its rows' ancestors left."""

    def __init__(self) -> None:
        super().__init__()
        self.has_previous_state = defaultdict(bool, {0: False})

    def lazy_initialization(self, *_states: Any, **_options: Any) -> None:
        """Do nothing: transformers initialises states that it keeps."""

    def update_conv_state(self, conv_states: torch.Tensor, *_args: object, **_options: object) -> torch.Tensor:
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *_: object, **_options: object) -> torch.Tensor:
        return recurrent_states

    @abstractmethod
    def in_prompt(self) -> torch.Tensor:
        """Return which rows of the pass are of the prompt, bool[R]."""

    @abstractmethod
    def convolution(self, taps: int, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the rows' inputs of the pass's next convolution, [R, D].

        Returns inputs, [N, D], and which of them each row's convolution takes, its own last, int64[R, taps].
        """

    @abstractmethod
    def read(self, asked: Reading) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what rows read after their ancestors' updates and their own, [R, H, V], and the committed matrices."""


class BothLayer(TreeLayer, OperatorLayer):
    """A layer with keys and values, which `buffer` takes, and a state, which `operators` reads, as Falcon-H1's are."""

    def __init__(self, buffer: TreeLayer, operators: OperatorLayer) -> None:
        OperatorLayer.__init__(self)
        TreeLayer.__init__(self, buffer.span)
        self.buffer, self.operators = buffer, operators

    def lazy_initialization(self, *_states: Any, **_options: Any) -> None:
        """Do nothing: both parts initialise themselves."""

    def update(self, *states: Any, **_options: object) -> tuple[torch.Tensor, torch.Tensor]:
        return self.buffer.update(*states[:2])

    def in_prompt(self) -> torch.Tensor:
        return self.operators.in_prompt()

    def convolution(self, taps: int, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.operators.convolution(taps, inputs)

    def read(self, asked: Reading) -> tuple[torch.Tensor, torch.Tensor]:
        return self.operators.read(asked)
