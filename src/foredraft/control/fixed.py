"""Cutting a draft to a budget, and the control with a constant budget. Does not depend on gains or costs."""

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, NO_BUDGET, Budget, Draft, Verdict
from foredraft.errors import UsageError
from foredraft.graph.tree import FloatArray, depths, top_nodes


def cut(draft: Draft, budget: Budget, score: FloatArray | None = None) -> Draft:
    """Return the best prefix-closed part of `draft` within `budget`, by `score`, the draft's scores, or the order.

    A draft with q is always cut in order: keeping drawn tokens by their scores would change their distribution.
    """
    if budget.nodes <= 0 or budget.depth <= 0 or len(draft) == 0:
        return EMPTY_DRAFT
    fits = len(draft) <= budget.depth or int(depths(draft.parents).max()) <= budget.depth
    if len(draft) <= budget.nodes and fits:
        return draft
    score = score if score is not None else draft.score
    if score is None or draft.q is not None:
        score = -np.arange(len(draft), dtype=np.float32)
    return draft.take(top_nodes(draft.parents, score, budget.nodes, budget.depth))


class FixedControl:
    """The same number of nodes in every step; 0 never drafts. Raises UsageError for a negative number."""

    def __init__(self, nodes: int) -> None:
        if nodes < 0:
            raise UsageError(f"num_speculative_tokens is {nodes}; use 0 to draft nothing, or a positive number.")
        self._nodes = nodes

    def budget(self, depth: int) -> Budget:
        return Budget(self._nodes, depth) if depth > 0 and self._nodes > 0 else NO_BUDGET

    def trim(self, draft: Draft, budget: Budget) -> Draft:
        return cut(draft, budget)

    def observe(self, verdict: Verdict, forward: float, other: float, drafting: float = 0.0) -> None:
        """Learn nothing."""
