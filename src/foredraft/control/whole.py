"""The control that takes drafts whole or not at all: while drafted steps write more tokens a second than plain ones.

For drafts whose nodes cannot be weighed one by one, because some of them pay in later steps. Knows seconds and tokens;
not the drafter, and no scores.
"""

from dataclasses import dataclass

import numpy as np

from foredraft.contracts import NO_BUDGET, Budget, CostCurve, Draft, Verdict
from foredraft.control.fixed import cut
from foredraft.control.payoff import best_number
from foredraft.control.step_costs import StepCosts

_SHARE = 0.2  # of the last drafted step in what is expected of the next one


@dataclass(frozen=True, slots=True)
class WholeOptions:
    """This control has no options; `num_speculative_tokens` caps the draft."""


class WholeControl:
    """The whole draft, or none.

    A drafted step's tokens and seconds are those of recent drafted steps, a plain step's seconds those of a pass of one
    row and the overhead. Where drafted steps write less a second, drafting rests as `Rests` says.

    Args:
        curve: the target's cost by rows.
        most_nodes: never more than these are drafted.
    """

    def __init__(self, curve: CostCurve, most_nodes: int) -> None:
        self._curve = curve.table(most_nodes + 1)
        self._most_nodes = most_nodes
        self._costs = StepCosts()
        self._asked = False
        self._tokens = 0.0  # of a drafted step, smoothed; 0 until there was one

    def budget(self, depth: int) -> Budget:
        """Return all that may be drafted, or nothing in a rest."""
        self._asked = depth > 0 and self._costs.rests.left == 0
        return Budget(self._most_nodes, depth) if self._asked else NO_BUDGET

    def trim(self, draft: Draft, budget: Budget) -> Draft:
        """Cut a draft that exceeds the budget."""
        return cut(draft, budget)

    def observe(
        self, verdict: Verdict, forward_seconds: float, other_seconds: float, draft_seconds: float = 0.0
    ) -> None:
        """Compare the tokens a second of drafted steps with a plain step's."""
        costs, rows = self._costs, len(verdict.draft) + 1
        costs.see(self._curve, rows, forward_seconds, other_seconds, draft_seconds if self._asked else None)
        if not self._asked:
            costs.rests.passed()
            return
        written = float(len(verdict.tokens))
        self._tokens += _SHARE * (written - self._tokens) if self._tokens else written
        passes = costs.passes(self._curve)
        seconds = np.array([passes[1] + costs.plain, passes[rows] + costs.drafted])
        costs.rests.tried(paid=best_number(np.array([1.0, self._tokens]), seconds) > 0)
