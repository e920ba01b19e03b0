"""What a draft model foresees behind one sequence, and the drafter whose drafts that is.

A graph is grown at each step, in a cache that follows the sequence. Whatever drafts with a causal language model is a
`RolloutDrafter`. Knows a rollout and the rules of growth. Does not know the target, nor where the model comes from.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, Target, TokenIds, Verdict
from foredraft.graph.tree import IntArray
from foredraft.model.candidates import Imitation
from foredraft.model.growth import Calibrate, Grown, GrowthRules, grow
from foredraft.model.rollout import Rollout


class Foresight:
    """One sequence's graphs.

    Args:
        model: the draft model.
        rules: what limits a graph.
        imitation: how the target will choose.
        most_rows: rows put through the model at a step, at most.
        calibrate: corrects what the draft model says of its candidates.
    """

    def __init__(
        self,
        model: Target,
        rules: GrowthRules,
        imitation: Imitation,
        most_rows: int,
        calibrate: Calibrate | None = None,
    ) -> None:
        self._model = model
        self._rules = rules
        self._imitation = imitation
        self._most_rows = max(most_rows, 1)
        self._calibrate = calibrate
        self._rollout = Rollout(model, self._most_rows)
        self._grown: Grown | None = None

    def grow(self, ids: TokenIds, budget: Budget) -> Grown | None:
        """Grow a graph behind `ids`, int64[n]; None where the model cannot: beyond its window, or ids it does not have.

        Raises:
            NumericsError: scores from which no token can be chosen.
        """
        self._grown = None
        window = self._model.window
        depth = budget.depth if window is None else min(budget.depth, window - len(ids))
        unknown = ids[self._rollout.committed :].max(initial=0) >= self._model.vocabulary
        if budget.nodes <= 0 or depth <= 0 or unknown:
            return None
        budget = dataclasses.replace(budget, depth=depth)
        self._imitation = dataclasses.replace(self._imitation, draft=self._imitation.draft + 1)
        rows = min(self._most_rows, budget.nodes)
        self._grown = grow(self._rollout, ids, self._rules, budget, self._imitation, rows, self._calibrate)
        return self._grown

    def keep(self, tokens: Sequence[int]) -> None:
        """Keep what was computed of the path of `tokens`, the accepted ones, behind the last graph's root."""
        if self._grown is not None:
            self._rollout.keep(self._grown.rows_along(tuple(tokens)))
        self._grown = None

    def close(self) -> None:
        """Give the cache's memory back."""
        self._rollout = Rollout(self._model, 1)
        self._grown = None


class RolloutDrafter:
    """A draft model and the shape that it drafts.

    Args:
        sources: names for `Draft.source`, the method's own first.
        rules: what limits the shape.
        model: the draft model.
        ids: int32[N], the token of each of its scores; None where the i-th is the i-th token's.
    """

    def __init__(self, sources: tuple[str, ...], rules: GrowthRules, model: Any, ids: IntArray | None = None) -> None:
        self.name = sources[0]
        self.source_names = sources
        self._rules, self._model, self._ids = rules, model, ids
        # the model reads what it missed when it is asked again; each level costs a pass, so when to stop matters most
        self.needs = Needs(every_step=False, control="cost_aware", models=(model,))

    def open(self, context: DraftContext) -> "RolloutDrafting":
        """Begin drafting for one sequence."""
        return RolloutDrafting(self._model, self._rules, context, self._ids)


class RolloutDrafting:
    """One sequence's drafting by a draft model, whose cache follows the sequence."""

    def __init__(self, model: Any, rules: GrowthRules, context: DraftContext, ids: IntArray | None = None) -> None:
        imitation = Imitation.of(context.settings, context.seed, context.vocabulary, ids)
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
