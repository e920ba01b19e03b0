"""Trees grown by heads on the target's states: pass by pass, or over a block of tokens that is scored in one pass.

Does not depend on which nodes are expanded, nor on what the head is.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from foredraft.contracts import SequenceView, TokenIds
from foredraft.graph.layout import Layout, lay_out_text
from foredraft.graph.tree import IntArray
from foredraft.model.growth import laid_out
from foredraft.model.kv_cache import TreeCache
from foredraft.model.state_heads import StateCache, StateHead, StateLayers
from foredraft.model.target import TorchTarget


class StateRollout:
    """One sequence's tree in the KV cache of a head that predicts its own next state, as `Growing`.

    `model` runs the `HeadModel` of `head`. A row takes a token and the state of the token before it: the target's for
    the text, and the head's own for drafted tokens. Rows of these are computed again for the tokens that are accepted,
    from the target's states.
    """

    def __init__(self, head: StateHead[Any], model: TorchTarget, most_rows: int) -> None:
        self._head, self._model, self.most_rows = head, model, max(most_rows, 1)
        self.limits = len(head.ends.embeddings), None
        self._text = StateCache(model.new_cache)
        self._root: torch.Tensor | None = None  # logits after the last token of the text
        self._outputs = torch.empty(0)  # float[1 + H, D], the next states after the root and every row of the tree
        self._parents: IntArray = np.empty(0, np.int32)

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


class Block(Protocol):
    """One sequence's passes of a head that scores a block of tokens in one.

    Each level has its scores before a token of it is known; after a node of the level before, they are the same, or
    differ by what the node's token adds.
    """

    levels: int  # of tokens that a pass drafts

    def new_cache(self) -> TreeCache:
        """Return an empty cache of the head for one sequence."""

    def read(self, text: StateCache, ids: TokenIds, states: torch.Tensor) -> None:
        """Run the pass after a text, whose rows `text` keeps; `states` are the target's, as in `SequenceView`."""

    def scores(self, level: int, tokens: IntArray) -> torch.Tensor:
        """Return the logits of a level, from 0, after each of the tokens of the one before, float[R, V]."""


class BlockRollout:
    """One sequence's tree, as `Growing`, whose rows need no pass; of at most `Block.levels` levels."""

    def __init__(self, head: StateHead[StateLayers], block: Block, most_rows: int) -> None:
        self._block, self.most_rows = block, max(most_rows, 1)
        self.limits = len(head.ends.embeddings), None
        self._text = StateCache(block.new_cache)
        self._level = 0

    @torch.inference_mode()
    def start(self, view: SequenceView) -> torch.Tensor | None:
        if view.states is None:
            return None
        self._block.read(self._text, view.ids, view.states)
        self._level = 0
        return self._block.scores(0, view.ids[-1:].astype(np.int32))

    @torch.inference_mode()
    def expand(self, tokens: IntArray, parents: IntArray) -> torch.Tensor:  # noqa: ARG002  # levels come one by one
        self._level += 1
        return self._block.scores(self._level, tokens)

    def keep(self, _path: Sequence[int]) -> None:
        """Do nothing: rows are not kept."""

    def close(self) -> None:
        self._text.clear()
