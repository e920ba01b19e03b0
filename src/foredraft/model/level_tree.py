"""Trees whose levels are drafted at once: a level's candidates are the same after each node of the level before.

As the heads of Medusa and the rows of a DFlash block draft. Does not depend on what scores the levels.
"""

import numpy as np

from foredraft.contracts import Draft
from foredraft.graph.tree import FloatArray, IntArray, depths
from foredraft.model.candidates import Candidates

Ranks = tuple[IntArray, IntArray, FloatArray]
"""A tree by ranks: parents int32[N] (-1 below the root), ranks int32[N] (index among the candidates of the node's
level), and score float32[N], the product of the chances along the path. A parent comes before its children."""


def static_tree(chances: FloatArray, nodes: int, depth: int) -> Ranks:
    """Return the tree with the highest products of chances along its paths, best node first.

    Takes the chance that the i-th candidate of each level is accepted, float32[K, I], descending.
    """
    parents, ranks, score, level = [-1], [0], [1.0], [0]
    # candidate nodes: (score, parent, rank)
    candidates: list[tuple[float, int, int]] = [(float(chances[0, 0]), 0, 0)] if depth > 0 else []
    while candidates and len(parents) <= nodes:
        best = max(range(len(candidates)), key=lambda i: candidates[i][0])
        chance, parent, rank = candidates.pop(best)
        if chance <= 0:
            break
        parents.append(parent)
        ranks.append(rank)
        score.append(chance)
        head = level[parent]
        level.append(head + 1)
        if rank + 1 < chances.shape[1]:  # its next sibling
            candidates.append((score[parent] * float(chances[head, rank + 1]), parent, rank + 1))
        if head + 1 < min(depth, len(chances)):  # its first child
            candidates.append((chance * float(chances[head + 1, 0]), len(parents) - 1, 0))
    return np.array(parents[1:], np.int32) - 1, np.array(ranks[1:], np.int32), np.array(score[1:], np.float32)


def draft_of_levels(found: Candidates, tree: Ranks) -> Draft:
    """Return the draft of a tree by ranks, given each level's candidates, int32[K, I]."""
    parents, ranks, score = tree
    return Draft(found.tokens[depths(parents) - 1, ranks], parents, score)
