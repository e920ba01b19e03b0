"""The rows of one verification: positions, ancestor mask, cache slots.

Rows are the root (the last emitted token, not yet in the cache) and then the nodes of the draft. Row `i` is written
to cache slot `at + i`, after everything committed. Does not depend on the model or its attention types.
"""

from dataclasses import dataclass, field

import numpy as np
from numba import njit

from foredraft.graph.tree import I64, BoolArray, IntArray, ancestor_mask


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of one forward pass.

    `ancestors` says whether row `i` may attend to row `j` of the H held rows followed by these R rows; None for no held
    rows and a plain causal mask.
    """

    token_ids: I64  # int64[R], root first
    positions: I64  # int64[R], each row's absolute position in its own path
    ancestors: BoolArray | None  # bool[R, H + R]
    at: int  # the root's absolute position, which is the number of tokens already in the cache
    # int64[H], positions of uncommitted rows that earlier passes left in the cache
    held: I64 = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def rows(self) -> int:
        """The number of rows: the root and the nodes."""
        return len(self.token_ids)


def lay_out(root: int, tokens: IntArray, parents: IntArray, at: int) -> Layout:
    """Lay out a draft, `tokens` and `parents` int32[N], after its `root`, the last emitted token, at position `at`."""
    if not len(tokens):  # a plain step
        return lay_out_text(np.array([root], np.int64), at)
    return Layout(*_rows(root, tokens, parents, at), at)


@njit(cache=True)
def _rows(root: int, tokens: IntArray, parents: IntArray, at: int) -> tuple[I64, I64, BoolArray]:
    """Return token ids, positions and ancestors as in `Layout`, in one call: each takes some 10 microseconds."""
    token_ids, positions = np.empty(len(tokens) + 1, np.int64), np.empty(len(tokens) + 1, np.int64)
    token_ids[0], positions[0] = root, at
    for node in range(len(tokens)):
        token_ids[node + 1], positions[node + 1] = tokens[node], positions[parents[node] + 1] + 1
    return token_ids, positions, ancestor_mask(parents)


def lay_out_text(token_ids: I64, at: int) -> Layout:
    """Lay out known text as a chain, for prefill: int64[R] ids from absolute position `at` on."""
    return Layout(token_ids, np.arange(at, at + len(token_ids), dtype=np.int64), None, at)
