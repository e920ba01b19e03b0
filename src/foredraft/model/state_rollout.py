"""Trees grown by a head that predicts its own next state from a token and the state of the token before it.

The state is the target's for the text, and the head's own for drafted tokens. Does not depend on which nodes are
expanded, nor on what the head is.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from foredraft.contracts import SequenceView
from foredraft.graph.layout import Layout, lay_out_text
from foredraft.graph.tree import IntArray
from foredraft.model.growth import laid_out
from foredraft.model.state_heads import StateCache, StateHead
from foredraft.model.target import TorchTarget


class StateRollout:
    """One sequence's tree in the head's own KV cache, as `Growing`; it reads the target's states of the text.

    `model` runs the `HeadModel` of `head`. Rows of drafted tokens are computed again for the tokens that are accepted,
    from the target's states.
    """

    def __init__(self, head: StateHead[Any], model: TorchTarget, most_rows: int) -> None:
        self._head, self._model, self.most_rows = head, model, max(most_rows, 1)
        self.limits = len(head.ends.embeddings), None
        self._text = StateCache(model.new_cache)
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
            self._root, self._outputs = self._passed(layout, self._head.layers.fused(states[new]), scored=1)
            self._text.cache.commit(range(layout.rows))
        self._outputs = self._outputs[:1]
        self._text.cache.reserve(self.most_rows)
        return self._root

    @torch.inference_mode()
    def expand(self, tokens: IntArray, parents: IntArray) -> torch.Tensor:
        above = np.concatenate([self._parents, parents])
        states = self._outputs[torch.from_numpy(parents + 1)]
        logits, outputs = self._passed(laid_out(tokens, above, self._text.length), states)
        self._text.cache.hold()
        self._parents, self._outputs = above, torch.cat([self._outputs, outputs])
        return logits

    def keep(self, _path: Sequence[int]) -> None:
        self._text.cache.commit([])
        self._parents = self._parents[:0]

    def close(self) -> None:
        self._text.clear()
        self._root = None

    def _passed(
        self, layout: Layout, states: torch.Tensor, scored: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a layout's rows with their states, float[R, D]; return the logits and the next states of those scored."""
        rows = torch.cat([self._head.ends.embedded(layout)[0], states], dim=-1)
        return self._model.forward_rows(layout, self._text.cache, rows, scored)
