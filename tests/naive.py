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


# --- index/trigram


def bigram_row(first, second, a, b):
    """Looks at every row of `a`, as far as there are rows."""
    if not 0 <= a < len(first) - 1:
        return -1
    for row in range(min(int(first[a]), len(second)), min(int(first[a + 1]), len(second))):
        if second[row] == b:
            return row
    return -1


def successor_counts(documents, width):
    """How often each token followed each `width` tokens, in lists of ids: {context: {token: count}}."""
    counts = {}
    for ids in documents:
        for at in range(width, len(ids)):
            row = counts.setdefault(tuple(ids[at - width : at]), {})
            row[ids[at]] = row.get(ids[at], 0) + 1
    return counts


def stored_row(row, keep):
    """A row of counts as a table stores it: [(token, probability as uint16)], and the row's total."""
    total = sum(row.values())
    best = sorted(row.items(), key=lambda item: (-item[1], item[0]))[:keep]
    return [(token, max(1, round(count / total * 65535))) for token, count in best], total
