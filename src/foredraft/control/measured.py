"""The measured control: as many nodes as the measured cost of verifying them repays, and a rest where none do.

Does not know the drafter or the model; sees drafts with scores, verdicts, and seconds.
"""

from dataclasses import dataclass

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, NO_BUDGET, Budget, CostCurve, Draft, Verdict
from foredraft.control.cutting import cut
from foredraft.control.evidence import best_count, credit, guessed_scores
from foredraft.control.step_costs import StepCosts, widths_of
from foredraft.graph.tree import IntArray

MOST_NODES = 64
"""The largest draft that a measured budget asks for."""

_CHEAP = 1.15  # a pass of so many times the seconds of one row is taken whole: every row teaches the drafter
_MARGIN = 1.05  # more nodes than that must promise so many times the tokens a second: estimates err, the best most
_PATIENCE = 4  # drafts in a row that were not worth verifying, before drafting rests
_LONGEST_REST = 64  # plain steps before drafting is tried again: a try for nothing takes less than half a step


@dataclass(frozen=True, slots=True)
class MeasuredOptions:
    """The measured control has no options; `num_speculative_tokens` caps its number."""


class MeasuredControl:
    """As many nodes as maximise expected tokens per second under a measured cost curve.

    The expected tokens of the best n nodes are 1 plus the sum of their chances, where a node's chance is its score, put
    right by what became of nodes with a like score. The seconds of n nodes are the curve's, scaled by how fast passes
    of their size have been of late, plus what a step takes beside its pass. Nodes that a pass takes at hardly any cost
    are verified with the others. When some drafts in a row were not worth verifying, drafting rests, each time for
    twice as many steps, until one is; from text to text.

    Args:
        curve: the target's cost by rows.
        most_nodes: never ask for more.
        costs: what earlier sequences told; kept up to date. None begins with nothing known.
    """

    def __init__(self, curve: CostCurve, most_nodes: int = MOST_NODES, costs: StepCosts | None = None) -> None:
        self._curve = curve.table(most_nodes + 1)
        self._widths = widths_of(len(self._curve))
        self._most_nodes = most_nodes
        self._costs = StepCosts() if costs is None else costs
        self._cheap = int(np.searchsorted(self._curve, _CHEAP * self._curve[1], "right")) - 2  # nodes beside the root
        self._cheap = min(max(self._cheap, 1), most_nodes)
        self._worth = float(most_nodes)  # nodes worth verifying, smoothed
        self._asked = False
        self._costs.begin_text()

    def budget(self, depth: int) -> Budget:
        """Return the largest draft worth proposing; none while drafting rests."""
        self._asked = depth > 0 and self._costs.rest == 0
        if not self._asked:
            return NO_BUDGET
        return Budget(min(self._most_nodes, max(self._cheap, int(1.5 * self._worth))), depth)

    def trim(self, draft: Draft, budget: Budget) -> Draft:
        """Cut a draft to the number of nodes with the best expected tokens per second."""
        if draft.q is not None:  # drawn: scores, and even how many were drawn, may tell what; only the budget may cut
            return cut(draft, budget)
        if len(draft) == 0:
            return draft
        score = draft.score if draft.score is not None else guessed_scores(draft.parents)
        passes, costs = self._costs.passes(self._curve, self._widths), self._costs
        plain = float(passes[1]) + costs.plain
        best = best_count(score, costs.evidence, passes, (plain, costs.drafted), budget.depth, (self._cheap, _MARGIN))
        trial, costs.unpaid = costs.unpaid >= _PATIENCE, 0 if best else costs.unpaid + 1
        costs.rest = self._next_rest()
        if best == 0 and not trial:
            return EMPTY_DRAFT
        best = max(best, self._cheap)  # a trial is verified whatever it promises, lest old evidence stand for ever
        self._worth = min(2.0 * best, self._most_nodes) if best >= budget.nodes else 0.8 * self._worth + 0.2 * best
        return cut(draft, Budget(min(best, budget.nodes), budget.depth), score)

    def observe(
        self, verdict: Verdict, forward_seconds: float, other_seconds: float, draft_seconds: float = 0.0
    ) -> None:
        """Compare what the step gave with what its scores promised, and its time with what the curve says."""
        drafted = len(verdict.draft)
        if 0 < forward_seconds < np.inf and 0 <= other_seconds < np.inf:  # a clock may jump
            width, expected = float(self._widths[drafted + 1]), float(self._curve[drafted + 1])
            drafting = draft_seconds if self._asked else None
            self._costs.see(width, expected, forward_seconds, other_seconds, drafting)
        if not self._asked:
            self._costs.rest = max(self._costs.rest - 1, 0)
        elif drafted:
            score = verdict.draft.score if verdict.draft.score is not None else guessed_scores(verdict.draft.parents)
            path: IntArray = np.array(verdict.path, np.int32)
            credit(self._costs.evidence, score, path)

    def _next_rest(self) -> int:
        """Return how many plain steps follow a draft, by how many in a row were not worth verifying."""
        beyond = self._costs.unpaid - _PATIENCE
        return 0 if beyond < 0 else min(1 << beyond, _LONGEST_REST)
