"""Where the rows of one verification go: positions, ancestor mask, cache slots.

Rows are the root (the last emitted token, not yet in the cache) and then the nodes of the draft. Row `i` is written
to cache slot `at + i`, past everything committed. Does not know the model or its attention types.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foredraft.graph.tree import BoolArray, IntArray, ancestor_mask, depths

_NONE_HELD = np.empty(0, np.int64)
_NONE_HELD.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of one forward pass.

    Attributes:
        token_ids: int64[R], root first.
        positions: int64[R], each row's absolute position in its own path.
        ancestors: bool[R, H + R], row `i` may attend to row `j` of the H held and then these; None where none are held
            and that is the plain causal triangle.
        at: the root's absolute position, which is the number of tokens already in the cache.
        held: int64[H], the positions of the rows that earlier passes left in the cache uncommitted.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    ancestors: BoolArray | None
    at: int
    held: npt.NDArray[np.int64] = field(default_factory=lambda: _NONE_HELD)

    @property
    def rows(self) -> int:
        """How many rows the pass has: one for the root and one for each node."""
        return len(self.token_ids)


def lay_out(root: int, tokens: IntArray, parents: IntArray, at: int) -> Layout:
    """Lay a draft, `tokens` and `parents` int32[N], out after its `root`, the last emitted token, at position `at`."""
    if not len(tokens):  # a plain step
        return lay_out_text(np.array([root], np.int64), at)
    token_ids, positions = np.full(len(tokens) + 1, root, np.int64), np.full(len(tokens) + 1, at, np.int64)
    token_ids[1:] = tokens
    positions[1:] += depths(parents)
    return Layout(token_ids, positions, ancestor_mask(parents), at)


def lay_out_text(token_ids: npt.NDArray[np.int64], at: int) -> Layout:
    """Lay a stretch of known text out as a chain, for prefill: int64[R] ids starting at absolute position `at`."""
    return Layout(token_ids, np.arange(at, at + len(token_ids), dtype=np.int64), None, at)
