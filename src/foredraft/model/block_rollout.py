"""Trees over a block of tokens that a head scores in one pass.

Each level has its scores before a token of it is known; after a node of the level before, they are the same, or differ
by what the node's token adds. Does not depend on what the head is, nor on which nodes are expanded.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from foredraft.contracts import SequenceView, TokenIds
from foredraft.graph.tree import IntArray
from foredraft.model.kv_cache import TreeCache
from foredraft.model.state_heads import StateCache, StateHead, StateLayers


class Block(Protocol):
    """One sequence's passes of such a head."""

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

    @property
    def committed(self) -> int:
        return self._text.read_tokens

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
