"""Drafts asked for directly, and checked."""

import numpy as np

from foredraft.contracts import Budget, DraftContext, SequenceView
from foredraft.graph.tree import depths
from support.stores import VOCABULARY


def opened(made, seed=0, vocabulary=VOCABULARY):
    return made.open(DraftContext(vocabulary, seed))


def view(ids):
    ids = np.array(ids, np.int64)
    ids.flags.writeable = False
    return SequenceView(ids, len(ids))


def propose(drafting, ids, nodes=8, depth=8, vocabulary=VOCABULARY):
    draft = drafting.propose(view(ids), Budget(nodes, depth))
    draft.check(vocabulary)
    assert len(draft) <= nodes
    assert len(draft) == 0 or depths(draft.parents).max() <= depth
    return draft


def scored(draft):
    """{path: score} of a draft."""
    return {path: float(draft.score[node]) for path, node in paths_of(draft.tokens, draft.parents).items()}


def paths_of(tokens, parents):
    """{path: node} of a tree."""
    paths = {}
    for node, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        above = next((path for path, other in paths.items() if other == parent), ())
        paths[*above, token] = node
    return paths


def path_to(parents, node):
    """The nodes from the root's child down to `node`; none for -1."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path[::-1]
