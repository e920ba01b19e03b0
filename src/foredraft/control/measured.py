"""The control `measured`, for one text and for all texts of a batch together: as many nodes as measured costs repay.

Does not depend on drafters or models.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from time import perf_counter

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, NO_BUDGET, Budget, CostCurve, Draft, Verdict
from foredraft.control.payoff import (
    TYPICAL_RATE,
    StepCosts,
    best_of_nodes,
    bin_of,
    corrections,
    credit,
    cut,
    scores_of,
)
from foredraft.graph.tree import F64

MOST_NODES = 64  # per step without `num_speculative_tokens`; the cost curve is measured up to 64 rows

# chosen
_CHEAP = 1.15  # seconds of a pass / those of its roots alone, up to which nodes are verified just to learn from them
_MARGIN = 1.05  # more nodes must promise this many times the tokens per second: the best of many estimates errs upwards
_HEADROOM = 1.5  # requested nodes / nodes recently worth verifying
_LEAST = 2  # requested nodes at least, so that drafts are always observed
_FIRST = 4  # nodes that a new text is expected to repay; docs/results/log.md compares it with 8, 16 and 64
_SHARE = 0.2  # weight of the last draft in smoothed values
_LIKELY = 0.5  # least chance of a path to go deeper before the seconds of a level are known


class MeasuredControl:
    """The number of nodes, over all sequences that share it, with the most expected tokens per second.

    `curve` is called when first needed, as it may have to be measured. A step has at most `most_nodes` nodes, and a
    pass `most_rows` rows, by default those of one sequence. `costs` are what earlier steps taught, updated in place;
    `clock` returns seconds. With `whole`, no node is weighed by itself: the whole draft is verified, or none while such
    steps write fewer tokens per second than plain ones. docs/explanation/control.md has the rule.
    """

    def __init__(
        self, curve: Callable[[], CostCurve], most_nodes: int = MOST_NODES, costs: StepCosts | None = None,
        clock: Callable[[], float] = perf_counter, *, most_rows: int | None = None, whole: bool = False,
    ) -> None:  # fmt: skip
        self._measure, self._most_nodes, self._clock, self._whole = curve, most_nodes, clock, whole
        self._most_rows = most_nodes + 1 if most_rows is None else most_rows
        self._costs = StepCosts() if costs is None else costs
        self._price = 0.0  # smoothed tokens per second that drafts promise, at least those of plain decoding
        self._written = 0.0  # smoothed tokens of such a step
        self._each = float(min(_FIRST, most_nodes))  # smoothed number of nodes per sequence worth verifying
        self._asked = self._begun = False  # whether a draft was requested in this step, and in any

    @cached_property
    def _curve(self) -> F64:
        return self._measure().table(self._most_rows)

    def rows_within(self, seconds: float) -> int:
        """Return the most rows of a pass that takes at most so many seconds at the current pace."""
        return int(np.searchsorted(self._costs.passes(self._curve), seconds, "right")) - 1

    def budget(self, depth: int, lanes: int = 1) -> Budget:
        """Return the budget of one of `lanes` sequences; no budget during a pause."""
        room = min(self._most_nodes, self._most_rows // lanes - 1)
        if not self._begun:
            # the last text's length caused some of the pace of wide passes, which are not measured during a pause: a
            # text too long to draft could stop drafting for the next ones
            self._costs.wide_pace = (self._costs.pace + self._costs.wide_pace) / 2
            self._begun = True
        self._asked = self._costs.rests.left == 0
        if not self._asked or depth <= 0 or room <= 0:
            return NO_BUDGET
        if self._whole:
            return Budget(room, depth)
        least = max(self._cheap(lanes) // lanes, _LEAST)
        return Budget(min(room, max(least, int(_HEADROOM * self._each))), depth, self._more())

    def _more(self) -> Callable[[float | None], bool]:
        """Return `Budget.more` of one draft. A further level is taken to cost what recent ones did."""
        began: float | None = None
        level = 0

        def more(best: float | None) -> bool:
            nonlocal began, level
            now, costs = self._clock(), self._costs
            is_first, level = began is None, level + 1
            if began is not None:
                costs.observe_level(self._curve, now - began)
            began = now
            best = TYPICAL_RATE**level if best is None else best
            if not (costs.level and self._price):
                return best >= _LIKELY
            likely = best * corrections(costs.evidence)[bin_of(best)] * costs.right
            goes_on = bool(likely >= costs.level * self._price)
            if is_first and not goes_on:
                costs.refused_level()
            return goes_on

        return more

    def trim(self, drafts: Sequence[Draft], budgets: Sequence[Budget], other_rows: int = 0) -> list[Draft]:
        """Cut the drafts to the nodes with the most expected tokens per second; the pass has `other_rows` more rows."""
        self._asked = self._asked and any(budget.nodes > 0 for budget in budgets)
        if not any(len(draft) for draft in drafts):
            return list(drafts)
        if self._whole:
            return [cut(draft, budget) for draft, budget in zip(drafts, budgets, strict=True)]
        lanes, base = len(drafts), len(drafts) + other_rows
        costs, passes = self._costs, self._costs.passes(self._curve)[base:]
        plain = float(lanes / (passes[0] + costs.plain * lanes))
        scores = [scores_of(draft) for draft in drafts]
        together = scores[0] if lanes == 1 else np.concatenate(scores)
        least = max(self._cheap(base), lanes)
        best_first = np.sort(together)[::-1]  # here, as compiled code that sorts takes two seconds to compile
        depth, drafted = sum(budget.depth for budget in budgets), costs.drafted * lanes
        best, tokens, seconds = best_of_nodes(best_first, costs.evidence, passes, lanes, depth, drafted, least, _MARGIN)
        self._price = max((1 - _SHARE) * self._price + _SHARE * tokens / seconds, plain)
        saved = (passes[0] + costs.plain * lanes) * tokens / lanes - seconds
        gain = saved / (costs.asking * lanes) if costs.asking else np.inf
        if not costs.rests.tried(paid=best > 0 and saved > 0, gain=gain) and best == 0:
            return [EMPTY_DRAFT] * lanes
        best = min(max(best, least), len(together), self._most_rows - base)
        counts = [best]  # of each draft
        if lanes > 1:
            owner = np.repeat(np.arange(lanes), [len(score) for score in scores])
            counts = np.bincount(owner[np.argsort(-together, kind="stable")[:best]], minlength=lanes).tolist()
        each = best / lanes
        filled = max(counts) >= max(budget.nodes for budget in budgets)
        self._each = min(2 * each, self._most_nodes) if filled else (1 - _SHARE) * self._each + _SHARE * each
        limits = [Budget(min(most, budget.nodes), budget.depth) for most, budget in zip(counts, budgets, strict=True)]
        return [cut(*each) for each in zip(drafts, limits, scores, strict=True)]

    def observe(
        self, verdicts: Sequence[Verdict], rows: int, forward: float, other: float, drafting: float = 0.0
    ) -> None:
        """Compare accepted nodes with their scores, and the seconds of the step, as in `Control`, with the curve."""
        lanes = len(verdicts)
        self._costs.observe(self._curve, rows, forward, other / lanes, drafting / lanes if self._asked else None)
        if not self._asked:
            self._costs.rests.passed()
        else:
            if self._whole:
                written = sum(len(verdict.tokens) for verdict in verdicts) / lanes
                self._written += _SHARE * (written - self._written) if self._written else written
                self._costs.tried_whole(self._curve, lanes, rows, self._written)
            if self._costs.rests.left:
                self._costs.rests.took(drafting / (self._costs.passes(self._curve)[lanes] + self._costs.plain * lanes))
        for verdict in verdicts:
            if len(verdict.draft):
                credit(self._costs.evidence, scores_of(verdict.draft), np.array(verdict.path, np.int32))
                self._costs.observe_first_level(right=len(verdict.path) > 0)

    def _cheap(self, rows: int) -> int:
        """Return how many nodes add almost no cost to a pass of `rows` rows."""
        return max(int(self._curve.searchsorted(_CHEAP * self._curve[rows], "right")) - 1 - rows, 0)
