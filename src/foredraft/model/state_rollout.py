"""Trees grown by a head that predicts its own next state from a token and the state of the token before it.

The state is the target's for the text, and the head's own for drafted tokens. Does not depend on which nodes are
expanded, nor on what the head is.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from foredraft.contracts import SequenceView
from foredraft.graph.layout import Layout, lay_out_text
from foredraft.graph.tree import IntArray
from foredraft.model.growth import laid_out
from foredraft.model.kv_cache import TreeCache
from foredraft.model.state_heads import StateCache, StateHead


class NextStates(Protocol):
    """The layers of such a head."""

    def new_cache(self) -> TreeCache:
        """Return an empty KV cache of the layers."""

    def arguments(self, layout: Layout, cache: TreeCache, like: torch.Tensor) -> dict[str, Any]:
        """Return what the layers are given besides their rows, float[1, R, D] `like` these."""

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        """Return one state, float[..., D], for the target's states, float[..., W]."""

    def __call__(
        self, embedded: torch.Tensor, states: torch.Tensor, arguments: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows, float[B, R, D] embeddings and states; return the LM head's inputs and the next states."""


class StateRollout:
    """One sequence's tree in the head's own KV cache, as `Growing`; it reads the target's states of the text.

    Rows of drafted tokens are computed again for the tokens that are accepted, from the target's states.
    """

    def __init__(self, head: StateHead[NextStates], most_rows: int) -> None:
        self._head, self.most_rows = head, max(most_rows, 1)
        self.limits = len(head.ends.embeddings), None
        self._text = StateCache(head.layers.new_cache)
        self._root: torch.Tensor | None = None  # logits after the last token of the text
        self._outputs = torch.empty(0)  # float[1 + H, D], the next states after the root and every row of the tree
        self._parents: IntArray = np.empty(0, np.int32)

    @property
    def committed(self) -> int:
        return self._text.read_tokens

    @torch.inference_mode()
    def start(self, view: SequenceView) -> torch.Tensor | None:
        """Read a text as `Growing` says; its first token with a row is the one after the first known state."""
        self.keep([])
        ids, states = view.ids, view.states
        if states is None:
            return None
        for new in self._text.missing(len(ids), states):
            layout = lay_out_text(ids[self._text.begun :][new].copy(), new.start)
            scored, outputs = self._passed(layout, self._head.layers.fused(states[new]))
            self._text.cache.commit(range(layout.rows))
            self._outputs, self._root = outputs[-1:], self._head.ends.lm_head(scored[-1:])
        self._outputs = self._outputs[:1]
        self._text.cache.reserve(self.most_rows)
        return self._root

    @torch.inference_mode()
    def expand(self, tokens: IntArray, parents: IntArray) -> torch.Tensor:
        above = np.concatenate([self._parents, parents])
        states = self._outputs[torch.from_numpy(parents + 1)]
        scored, outputs = self._passed(laid_out(tokens, above, self._text.length), states)
        self._text.cache.hold()
        self._parents, self._outputs = above, torch.cat([self._outputs, outputs])
        return self._head.ends.lm_head(scored)  # type: ignore[no-any-return]  # a module's output is Any

    def keep(self, _path: Sequence[int]) -> None:
        self._text.cache.commit([])
        self._parents = self._parents[:0]

    def close(self) -> None:
        self._text.clear()
        self._root = None

    def _passed(self, layout: Layout, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a layout's rows with their states, float[R, D]; return the LM head's inputs and the next states."""
        layers, cache = self._head.layers, self._text.cache
        cache.reserve(layout.rows)
        embedded = self._head.ends.embedded(layout)
        scored, outputs = layers(embedded, states[None], layers.arguments(layout, cache, embedded))
        return scored[0], outputs[0]
