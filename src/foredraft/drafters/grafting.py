"""Any tree drafter's output as a graph: what follows a phrase in a draft is copied to where the phrase occurs again.

The idea of GSD (Gong et al. 2024) without its draft model; `"graph": true` asks for it. Knows drafts, not drafters.
"""

from typing import ClassVar

from foredraft.contracts import Budget, Draft, DraftContext, Drafter, Drafting, SequenceView, Verdict
from foredraft.graph.graft import graft

TAU = 2
"""Tokens of a phrase."""


class GraftingDrafter:
    """A drafter whose drafts are grafted upon; drafts without scores, or with a q, are left as they are."""

    name: ClassVar[str] = "grafted"

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.needs = drafter.needs
        self.source_names = drafter.source_names
        self.target = getattr(drafter, "target", None)

    def open(self, context: DraftContext) -> "GraftingDrafting":
        """Begin drafting for one sequence."""
        return GraftingDrafting(self._drafter.open(context))


class GraftingDrafting:
    """One sequence's drafting."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Return the best paths of the drafter's tree and of what can be copied within it."""
        draft = self._drafting.propose(view, budget)
        if len(draft) == 0 or draft.score is None or draft.q is not None:
            return draft
        tree = graft(draft.tokens, draft.parents, draft.score, view.ids[-TAU:], TAU, budget.nodes, budget.depth)
        source = None if draft.source is None else draft.source[tree.origin]
        return Draft(tree.tokens, tree.parents, tree.score, source=source)

    def observe(self, verdict: Verdict) -> None:
        """Let the drafter learn."""
        self._drafting.observe(verdict)

    def close(self) -> None:
        """Close the drafter's drafting."""
        self._drafting.close()
