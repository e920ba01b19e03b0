"""The controls that decide by measured seconds: `measured`, by each node's chance; `whole`, by what drafts gave so far.

For one text, and for all texts of a batch together. Does not know the drafter or the model.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, NO_BUDGET, Budget, CostCurve, Draft, Verdict
from foredraft.control.fixed import cut
from foredraft.control.payoff import F64, StepCosts, best_number, credit, expected_tokens, scores_of
from foredraft.graph.tree import FloatArray

MOST_NODES = 64
"""The largest draft that a measured budget asks for."""

# our choices
_CHEAP = 1.15  # a pass of so many times the seconds of its roots alone is filled: every row teaches the drafter
_MARGIN = 1.05  # more nodes than that must promise so many times the tokens a second: estimates err, the best most
_HEADROOM = 1.5  # times as many nodes are asked for as were worth verifying of late
_LEAST = 2  # nodes asked for, so that something is always learned of drafts
_SHARE = 0.2  # of the last draft in what is expected of the next one


class BatchControl:
    """As many nodes over all sequences of a batch as maximise expected tokens a second under a measured cost curve.

    With n nodes a step is expected to write one token for each sequence and the sum of the nodes' chances: their
    scores, put right by what became of nodes with like ones. Its seconds are the curve's, scaled by how fast passes
    have been of late, and the overhead. Nodes that the pass takes at hardly any cost are verified with the others.
    Where no number beats a plain step, the step is plain, and drafting rests as `Rests` says, from text to text.

    Args:
        curve: gives the target's cost by rows; asked when it is first needed, as it may have to be measured.
        most_rows: that a pass may have.
        most_nodes: that one sequence may draft.
        costs: what earlier steps told; kept up to date. None begins with nothing known.
    """

    def __init__(
        self, curve: Callable[[], CostCurve], most_rows: int, most_nodes: int, costs: StepCosts | None = None
    ) -> None:
        self._ask, self._most_rows, self._most_nodes = curve, most_rows, most_nodes
        self._costs = StepCosts() if costs is None else costs
        self._each = float(most_nodes)  # nodes of a sequence worth verifying, smoothed
        self._asked = False

    @cached_property
    def _curve(self) -> F64:
        """Seconds of a pass by rows."""
        return self._ask().table(self._most_rows)

    def budget(self, depth: int, lanes: int) -> Budget:
        """Return how much one of `lanes` sequences is to draft; nothing while drafting rests."""
        room = min(self._most_nodes, self._most_rows // lanes - 1)
        self._asked = self._costs.rests.left == 0
        if not self._asked or depth <= 0 or room <= 0:
            return NO_BUDGET
        least = max(self._cheap(lanes) // lanes, _LEAST)
        return Budget(min(room, max(least, int(_HEADROOM * self._each))), depth)

    def trim(self, drafts: Sequence[Draft], budgets: Sequence[Budget], other_rows: int) -> list[Draft]:
        """Cut the drafts of all sequences to the nodes with the most expected tokens a second of the whole batch.

        `budgets` are what each was asked for; the pass has `other_rows` besides.
        """
        self._asked = self._asked and any(budget.nodes > 0 for budget in budgets)
        if any(draft.q is not None for draft in drafts):  # drawn tokens must not decide whether they are kept
            return [cut(draft, budget) for draft, budget in zip(drafts, budgets, strict=True)]
        scores = [scores_of(draft) for draft in drafts]
        together = np.concatenate(scores) if scores else np.empty(0, np.float32)
        if not len(together):
            return list(drafts)
        lanes, base = len(drafts), len(drafts) + other_rows
        least = max(self._cheap(base), lanes)
        best = self._best_count(together, lanes, base, least, sum(budget.depth for budget in budgets))
        if not self._costs.rests.tried(paid=best > 0):
            return [EMPTY_DRAFT] * lanes
        best = min(max(best, least), len(together), self._most_rows - base)
        counts = _shares(scores, together, best)
        each = best / lanes
        filled = max(counts) >= max(budget.nodes for budget in budgets)
        self._each = min(2 * each, self._most_nodes) if filled else (1 - _SHARE) * self._each + _SHARE * each
        given = zip(drafts, budgets, counts, scores, strict=True)
        return [
            cut(draft, Budget(min(most, budget.nodes), budget.depth), score) for draft, budget, most, score in given
        ]

    def observe(
        self, verdicts: Sequence[Verdict], rows: int, forward_seconds: float, other_seconds: float,
        draft_seconds: float,
    ) -> None:  # fmt: skip
        """Compare what the step gave with what its scores promised, and its time with what the curve says."""
        lanes = len(verdicts)
        drafting = draft_seconds / lanes if self._asked else None
        self._costs.see(self._curve, rows, forward_seconds, other_seconds / lanes, drafting)
        if not self._asked:
            self._costs.rests.passed()
        for verdict in verdicts:
            if len(verdict.draft):
                credit(self._costs.evidence, scores_of(verdict.draft), np.array(verdict.path, np.int32))

    def _cheap(self, rows: int) -> int:
        """Return how many nodes a pass of `rows` roots takes at hardly any cost."""
        return max(int(np.searchsorted(self._curve, _CHEAP * self._curve[rows], "right")) - 1 - rows, 0)

    def _best_count(self, score: FloatArray, lanes: int, base: int, least: int, depth: int) -> int:
        """Return how many nodes, of float32[N] scores, are worth verifying in a pass of `base` rows without them.

        Each lane writes one token in any case, at least `least` nodes are verified where one is, and no more than
        `depth` can be accepted.
        """
        costs = self._costs
        passes = costs.passes(self._curve)[base:]
        accepted = expected_tokens(score, costs.evidence, len(passes) - 1)
        seconds = passes[: len(accepted)] + costs.drafted * lanes
        seconds[0] = passes[0] + costs.plain * lanes
        return best_number(lanes + np.minimum(accepted, depth), seconds, least, _MARGIN)


def _shares(scores: Sequence[FloatArray], together: FloatArray, best: int) -> list[int]:
    """Return how many of the `best` nodes of all drafts are each draft's."""
    if len(scores) == 1:
        return [best]
    owner = np.repeat(np.arange(len(scores)), [len(score) for score in scores])
    chosen = np.argsort(-together, kind="stable")[:best]
    return np.bincount(owner[chosen], minlength=len(scores)).tolist()  # type: ignore[no-any-return]  # numpy's Any


class MeasuredControl:
    """What `BatchControl` is for a batch, for one text.

    Args:
        curve: the target's cost by rows.
        most_nodes: never ask for more.
        costs: as `BatchControl` takes it.
    """

    def __init__(self, curve: CostCurve, most_nodes: int = MOST_NODES, costs: StepCosts | None = None) -> None:
        costs = StepCosts() if costs is None else costs
        costs.begin_text()
        self._batch = BatchControl(lambda: curve, most_nodes + 1, most_nodes, costs)

    def budget(self, depth: int) -> Budget:
        """Return the largest draft worth proposing; none while drafting rests."""
        return self._batch.budget(depth, 1)

    def trim(self, draft: Draft, budget: Budget) -> Draft:
        """Cut a draft to the number of nodes with the best expected tokens a second."""
        return self._batch.trim([draft], [budget], 0)[0]

    def observe(
        self, verdict: Verdict, forward_seconds: float, other_seconds: float, draft_seconds: float = 0.0
    ) -> None:
        """Learn what the step gave, and what it took."""
        self._batch.observe([verdict], len(verdict.draft) + 1, forward_seconds, other_seconds, draft_seconds)


class WholeControl:
    """The whole draft, or none: for drafts whose nodes cannot be weighed, as some of them pay in later steps.

    A drafted step's tokens are those of recent drafted steps, and its seconds those of its pass and the overhead. Where
    drafted steps write less a second than plain ones, drafting rests as `Rests` says.

    Args:
        curve: the target's cost by rows.
        most_nodes: never more than these are drafted.
    """

    def __init__(self, curve: CostCurve, most_nodes: int) -> None:
        self._curve, self._most_nodes = curve.table(most_nodes + 1), most_nodes
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
