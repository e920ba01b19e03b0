"""A draft model's tree, grown level by level in its own KV cache: one forward pass and one device transfer a level.

While the tree grows, its rows are held in the cache uncommitted. After verification the rows of the accepted path are
committed and the others discarded, so that no accepted token is computed twice. Does not depend on which nodes are
worth expanding, nor on how the target chooses tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch

from foredraft.contracts import Target, TokenIds
from foredraft.graph.layout import Layout, lay_out_text
from foredraft.graph.tree import IntArray, ancestor_mask, depths


class Rollout:
    """One sequence's tree in a draft model: begins with `start`, grows with `expand` and ends with `keep`.

    Rows are numbered from 0 in the order of expansion; -1 is the root. A tree has at most `most_rows` rows.
    """

    def __init__(self, model: Target, most_rows: int) -> None:
        self._model, self._most_rows = model, most_rows
        self._cache = model.new_cache()
        self._parents: IntArray = np.empty(0, np.int32)

    @property
    def committed(self) -> int:
        """The number of the sequence's tokens in the cache."""
        return int(self._cache.length)

    @torch.inference_mode()
    def start(self, ids: TokenIds) -> torch.Tensor:
        """Extend the cache to the end of a sequence, int64[n], which begins with what is cached, and begin a tree.

        Returns float[1, V], the model's logits after the last of `ids`, the root.
        """
        if len(self._parents):
            self.keep([])
        assert self._cache.length < len(ids), "the root is not in the cache yet, because its logits are needed"
        new = ids[self._cache.length :].copy()  # torch rejects read-only arrays
        self._model.prefill(new[:-1], self._cache)
        self._cache.reserve(self._most_rows + 1)
        scores = self._model.forward(lay_out_text(new[-1:], self._cache.length), self._cache)
        self._cache.commit([0])
        return scores.logits

    @torch.inference_mode()
    def expand(self, tokens: IntArray, parents: IntArray) -> torch.Tensor:
        """Run the next rows of the tree through the model.

        Args:
            tokens: int32[R], of each row.
            parents: int32[R], each row's parent row, -1 for the root; rows of earlier calls.

        Returns:
            float[R, V], the model's logits after each row, on its device.
        """
        held, at, above = len(self._parents), self._cache.length, np.concatenate([self._parents, parents])
        assert len(above) <= self._most_rows, "room for so many rows is reserved"
        positions = at - 1 + depths(above).astype(np.int64)
        sees = ancestor_mask(above)[held + 1 :, 1:]
        layout = Layout(tokens.astype(np.int64), positions[held:], sees, at, positions[:held])
        scores = self._model.forward(layout, self._cache)
        self._cache.hold()
        self._parents = above
        return scores.logits

    def keep(self, path: Sequence[int]) -> None:
        """End the tree: commit the rows `path`, from the root's child downwards, and discard the others."""
        self._cache.commit(path)
        self._parents = self._parents[:0]
