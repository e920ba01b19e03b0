"""A model that drafts what its rollouts foresee: whatever drafts with a causal language model is one of these.

Knows a model and the shape that it grows. Does not know where the model comes from, nor the target.
"""

import dataclasses
from typing import Any

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, Verdict
from foredraft.model.candidates import Imitation
from foredraft.model.foresight import Foresight
from foredraft.model.growth import GrowthRules


class RolloutDrafter:
    """A draft model and the shape that it drafts.

    Args:
        sources: names for `Draft.source`, the method's own first.
        rules: what limits the shape.
        model: the draft model.
    """

    # the model reads what it missed when it is asked again; each level costs a pass, so when to stop matters most
    needs = Needs(every_step=False, control="cost_aware")

    def __init__(self, sources: tuple[str, ...], rules: GrowthRules, model: Any) -> None:
        self.name = sources[0]
        self.source_names = sources
        self._rules, self._model = rules, model

    def open(self, context: DraftContext) -> "RolloutDrafting":
        """Begin drafting for one sequence."""
        return RolloutDrafting(self._model, self._rules, context)


class RolloutDrafting:
    """One sequence's drafting by a draft model, whose cache follows the sequence."""

    def __init__(self, model: Any, rules: GrowthRules, context: DraftContext) -> None:
        imitation = Imitation.of(context.settings, context.seed, context.vocabulary)
        # a draw that is used again deeper in the tree would be kept or not for what it is: the law would not hold
        rules = dataclasses.replace(rules, tau=0) if imitation.draws else rules
        self._foresight = Foresight(model, rules, imitation, context.max_nodes)

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Grow a graph behind the sequence, and return its most probable paths as a tree."""
        grown = self._foresight.grow(view.ids, budget)
        return EMPTY_DRAFT if grown is None else grown.draft(budget.nodes)

    def observe(self, verdict: Verdict) -> None:
        """Keep what the draft model has computed of the accepted path."""
        self._foresight.keep(verdict.tokens[:-1])

    def close(self) -> None:
        """Give the cache's memory back."""
        self._foresight.close()
