"""Slow, obvious twins of the compiled kernels: same name, same answer, no cleverness. What a test compares with."""

import numpy as np

# --- graph/tree


def is_tree(tokens, parents, vocabulary):
    edges = list(zip(parents.tolist(), tokens.tolist(), strict=False))
    return (
        len(tokens) == len(parents)
        and all(parent in range(-1, node) for node, parent in enumerate(parents))
        and all(token in range(vocabulary) for token in tokens)
        and len(set(edges)) == len(edges)
    )


def depths(parents):
    result = []
    for node in range(len(parents)):
        steps, above = 1, parents[node]
        while above != -1:
            steps, above = steps + 1, parents[above]
        result.append(steps)
    return np.array(result, np.int32)


def ancestor_mask(parents):
    mask = [[False] * (len(parents) + 1) for _ in range(len(parents) + 1)]
    for row in range(len(parents) + 1):
        seen = row
        while seen != 0:
            mask[row][seen] = True
            seen = parents[seen - 1] + 1
        mask[row][0] = True
    return np.array(mask)


def top_nodes(parents, score, limit, max_depth):
    """Every step looks at every node again, and takes the best whose parent is taken."""
    taken = {-1}
    depth = depths(parents)
    for _ in range(limit):
        free = [n for n in range(len(parents)) if n not in taken and parents[n] in taken and depth[n] <= max_depth]
        if free:
            taken.add(max(free, key=lambda node: (score[node], -node)))
    return np.array(sorted(taken - {-1}), np.int32)
