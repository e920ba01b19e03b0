"""A scored tree as its paths, for whoever weighs whole paths rather than nodes.

Knows arrays; not who drafted the tree.
"""

import numpy as np
import numpy.typing as npt

from foredraft.graph.tree import FloatArray, IntArray, depths


def paths_of(
    tokens: IntArray, parents: IntArray, score: FloatArray, depth: int
) -> tuple[IntArray, npt.NDArray[np.float64]]:
    """Return the path down to each node, and how probable it is that the text goes just so far along it.

    Args:
        tokens: int32[N].
        parents: int32[N], a tree's.
        score: float32[N], the probability of each node's whole path.
        depth: tokens of a row.

    Returns:
        int32[N, depth], the path down to each node, -1 behind its end or cut at `depth`, and float64[N], the
        probability that the text goes down to the node and then on in a way that the tree does not hold.
    """
    rows, mass = np.full((len(tokens), depth), -1, np.int32), score.astype(np.float64)
    level = depths(parents)
    for deep in range(1, int(level.max(initial=0)) + 1):
        nodes = np.flatnonzero(level == deep)
        if deep > 1:
            rows[nodes] = rows[parents[nodes]]
            np.subtract.at(mass, parents[nodes], score[nodes])
        if deep <= depth:
            rows[nodes, deep - 1] = tokens[nodes]
    return rows, np.maximum(mass, 0.0)
