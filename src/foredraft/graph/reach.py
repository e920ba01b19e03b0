"""Who reaches whom in a growing graph, as rows of bits: bit `f` of row `x` says that node `f` reaches node `x`.

Every node reaches itself. Knows node numbers; not which edges there are, nor why they are added.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

Bits = npt.NDArray[np.int64]


@njit(cache=True)
def no_reach(nodes: int) -> Bits:
    """Return int64[nodes, nodes / 64] without a bit; rows that are never written cost no memory."""
    return np.zeros((nodes, (nodes + 63) >> 6), np.int64)


@njit(cache=True)
def reaches(above: Bits, source: int, node: int) -> bool:
    """Say whether `source` reaches `node`."""
    return bool(above[node, source >> 6] >> (source & 63) & 1)


@njit(cache=True)
def inherit(above: Bits, node: int, source: int) -> None:
    """Let everything that reaches `source`, and so `source` itself, reach `node`; -1, the root, adds nothing."""
    if source >= 0:
        for word in range(above.shape[1]):  # quicker than views of the rows
            above[node, word] |= above[source, word]


@njit(cache=True)
def reach_itself(above: Bits, node: int) -> None:
    """Set a node's own bit."""
    above[node, node >> 6] |= np.int64(1) << np.int64(node & 63)
