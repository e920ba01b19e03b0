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
from foredraft.graph.tree import BoolArray, IntArray


class Rollout:
    """One sequence's tree in a draft model.

    A tree begins with `start`, grows with `expand` and ends with `keep`. Rows are numbered from 0 in the order of
    expansion; -1 is the root.

    Args:
        model: the draft model.
        most_rows: maximum rows of a tree; room for them is reserved when it starts.
    """

    def __init__(self, model: Target, most_rows: int) -> None:
        self._model = model
        self._most_rows = most_rows
        self._cache = model.new_cache()
        self._parents: list[int] = []
        self._positions = np.empty(most_rows, np.int64)
        self._sees: BoolArray = np.zeros((most_rows, most_rows), np.bool_)

    @property
    def committed(self) -> int:
        """The number of the sequence's tokens in the cache."""
        return int(self._cache.length)

    @torch.inference_mode()
    def start(self, ids: TokenIds) -> torch.Tensor:
        """Extend the cache to the end of a sequence and begin a tree there.

        Args:
            ids: int64[n], n at least 1; must begin with the tokens in the cache.

        Returns:
            float[1, V], the model's logits after the last of `ids`, the root.
        """
        self._end_tree()
        if self._cache.length >= len(ids):  # the root must not be in the cache yet, because its logits are needed
            raise ValueError(f"The cache holds {self._cache.length} tokens, and the sequence has {len(ids)}.")
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

        Raises:
            ValueError: more than `most_rows` rows.
        """
        held, rows, at = len(self._parents), len(tokens), self._cache.length
        if held + rows > self._most_rows:
            raise ValueError(f"A tree of {held + rows} rows does not fit into {self._most_rows}.")
        for i, parent in enumerate(parents.tolist()):
            row = held + i
            if parent >= 0:
                self._sees[row, :held] = self._sees[parent, :held]
            self._sees[row, row] = True
            self._positions[row] = at if parent < 0 else self._positions[parent] + 1
        ancestors = self._sees[held : held + rows, : held + rows]
        positions = self._positions[held : held + rows]
        layout = Layout(tokens.astype(np.int64), positions, ancestors, at, self._positions[:held])
        scores = self._model.forward(layout, self._cache)
        self._cache.hold()
        self._parents += parents.tolist()
        return scores.logits

    def keep(self, path: Sequence[int]) -> None:
        """End the tree: commit the rows `path`, from the root's child downwards, and discard the others.

        Raises:
            ValueError: the rows are not a path from the root.
        """
        before = -1
        for row in path:
            if self._parents[row] != before:
                raise ValueError(f"Rows {list(path)} are not a path: row {row} follows {self._parents[row]}.")
            before = row
        self._cache.commit(path)
        self._forget()

    def _end_tree(self) -> None:
        if self._parents:
            self._cache.commit([])
        self._forget()

    def _forget(self) -> None:
        self._sees[: len(self._parents)] = False
        self._parents = []
