"""The draft tree as REST's released code makes it, for comparison: most of what its cut throws away was wanted.

FasterDecoding/REST, DraftRetriever/src/lib.rs: the first 5,000 occurrences in lexicographic order are counted; the
prefixes with the highest counts are chosen, equals in any order; and the deepest of them go until their tokens add up
to the budget, where a token counts once for every chosen prefix that holds it. Knows rows; not where they come from.
"""

import numpy as np

from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.retrieval import prefixes

MOST_OCCURRENCES = 5000

_Prefix = tuple[int, ...]


def published_tree(rows: IntArray, nodes: int, seed: int) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the tree of the prefixes that the released code keeps.

    Args:
        rows: int32[R, D], what followed each occurrence; -1 after a document's end.
        nodes: the budget; the tree has at most so many.
        seed: of the order of equals.

    Returns:
        tokens int32[N], parents int32[N], scores float32[N]: the share of occurrences, which is what it ranks by.
    """
    tokens, parents, counts = prefixes(rows)
    paths: list[_Prefix] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    order = np.lexsort((np.random.default_rng(seed).permutation(len(counts)), -counts))[:nodes]
    chosen = sorted((paths[i] for i in order), key=len)
    total = sum(len(set(prefix)) for prefix in chosen)
    while total > nodes:
        total -= len(set(chosen.pop()))
    count_of = dict(zip(paths, counts.tolist(), strict=True))
    return _tree(chosen, {prefix: count / len(rows) for prefix, count in count_of.items()}, nodes)


def _tree(paths: list[_Prefix], share: dict[_Prefix, float], nodes: int) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the tree of the prefixes; equals may have been chosen without what lies above them, so it is cut."""
    node_of: dict[_Prefix, int] = {(): -1}
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    for chosen in paths:
        for depth in range(1, len(chosen) + 1):
            path = chosen[:depth]
            if path not in node_of and len(tokens) < nodes:
                node_of[path] = len(tokens)
                tokens.append(path[-1])
                parents.append(node_of[path[:-1]])
                scores.append(share[path])
    return np.array(tokens, np.int32), np.array(parents, np.int32), np.array(scores, np.float32)
