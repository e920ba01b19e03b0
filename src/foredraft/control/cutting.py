"""Cutting a draft to a budget: its best nodes, never one without its parent.

Does not know why the budget is what it is.
"""

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft
from foredraft.graph.tree import FloatArray, depths, top_nodes


def cut(draft: Draft, budget: Budget, score: FloatArray | None = None) -> Draft:
    """Return the best prefix-closed part of `draft` within `budget`; by `score`, else the draft's, else in order.

    A draft with q is always cut in order: were drawn tokens kept for their scores, they would not have the law q.
    """
    if budget.nodes <= 0 or budget.depth <= 0 or len(draft) == 0:
        return EMPTY_DRAFT
    fits = len(draft) <= budget.depth or int(depths(draft.parents).max()) <= budget.depth
    if len(draft) <= budget.nodes and fits:
        return draft
    score = score if score is not None else draft.score
    if score is None or draft.q is not None:
        score = -np.arange(len(draft), dtype=np.float32)
    kept = top_nodes(draft.parents, score, budget.nodes, budget.depth)
    return draft.take(kept) if len(kept) else EMPTY_DRAFT
