"""The control `whole`: the whole draft or none, for drafts some of whose nodes pay off in later steps.

Does not depend on drafters or models.
"""

from foredraft.contracts import NO_BUDGET, Budget, CostCurve, Draft, Verdict
from foredraft.control.payoff import StepCosts, cut

_SHARE = 0.2  # weight of the last draft in smoothed values; chosen


class WholeControl:
    """Drafts while drafted steps write more tokens per second than plain ones; no node is weighed by itself."""

    def __init__(self, curve: CostCurve, most_nodes: int) -> None:
        self._curve, self._most_nodes, self._costs = curve.table(most_nodes + 1), most_nodes, StepCosts()
        self._asked = False  # whether a draft was requested in this step
        self._tokens = 0.0  # of a drafted step, smoothed; 0 before the first one

    def budget(self, depth: int) -> Budget:
        self._asked = self._costs.rests.left == 0 and depth > 0
        return Budget(self._most_nodes, depth) if self._asked else NO_BUDGET

    def trim(self, draft: Draft, budget: Budget) -> Draft:
        return cut(draft, budget)

    def observe(self, verdict: Verdict, forward: float, other: float, drafting: float = 0.0) -> None:
        """Compare the tokens per second of drafted steps with those of a plain step."""
        costs, rows = self._costs, len(verdict.draft) + 1
        costs.observe(self._curve, rows, forward, other, drafting if self._asked else None)
        if not self._asked:
            costs.rests.passed()
            return
        written = float(len(verdict.tokens))
        self._tokens += _SHARE * (written - self._tokens) if self._tokens else written
        costs.tried_whole(self._curve, 1, rows, self._tokens)
