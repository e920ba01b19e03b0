"""One budget for a batch: nodes go where they add most expected tokens for the measured cost of the pass, down to none.

Does not know drafters or the model; sees drafts with scores, verdicts, and seconds.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numba import njit

from foredraft.contracts import EMPTY_DRAFT, NO_BUDGET, Budget, CostCurve, Draft, Verdict
from foredraft.control.cutting import cut
from foredraft.control.evidence import F64, Evidence, chances, credit, guessed_scores, halvings
from foredraft.control.step_costs import StepCosts, widths_of
from foredraft.graph.tree import FloatArray

PATIENCE = 4  # steps in a row whose drafts were not worth verifying, before drafting rests
LONGEST_REST = 64  # plain steps before drafting is tried again
_LEAST = 2  # nodes that a sequence is asked for, lest nothing be known of its drafts
_HEADROOM = 1.5  # times as many nodes as were worth verifying of late


class BatchControl:
    """As many nodes over all sequences as maximise their expected tokens a second.

    With `n` nodes the batch is expected to write one token for each sequence and the sum of the nodes' chances, in the
    seconds of a pass of all rows and of what is beside it. The rest is the measured control's: chances are scores put
    right by what became of others, and where drafts are not worth verifying, drafting rests, for ever longer.

    Args:
        curve: gives the target's cost by rows; asked when it is first needed, as it may have to be measured.
        most_rows: that a pass may have.
        most_nodes: that one sequence may draft.
        costs: what earlier steps told; kept up to date.
    """

    def __init__(
        self, curve: Callable[[], CostCurve], most_rows: int, most_nodes: int, costs: StepCosts | None = None
    ) -> None:
        self._ask, self._most_rows, self._most_nodes = curve, most_rows, most_nodes
        self._costs = StepCosts() if costs is None else costs
        self._widths = widths_of(most_rows + 1)
        self._each = float(most_nodes)  # nodes worth verifying of one sequence, smoothed
        self._drafted = 0  # sequences that were asked for drafts in this step

    @cached_property
    def _curve(self) -> F64:
        """Seconds of a pass by rows."""
        return self._ask().table(self._most_rows)

    def budget(self, depth: int, lanes: int) -> Budget:
        """Return how much one of `lanes` sequences is to draft; nothing while drafting rests."""
        room = self._most_rows // lanes - 1
        nodes = min(self._most_nodes, room, max(_LEAST, int(_HEADROOM * self._each)))
        return Budget(nodes, depth) if depth > 0 and nodes > 0 and self._costs.rest == 0 else NO_BUDGET

    def trim(self, drafts: Sequence[Draft], budgets: Sequence[Budget], other_rows: int) -> list[Draft]:
        """Cut drafts, N in all, to the nodes with the best expected tokens a second of the whole batch.

        Args:
            drafts: one for each sequence that shares this control.
            budgets: what each was asked for.
            other_rows: of the pass.
        """
        if self._costs.rest > 0:
            self._costs.rest -= 1
        self._drafted = sum(budget.nodes > 0 for budget in budgets)
        scores = [guessed_scores(draft.parents) if draft.score is None else draft.score for draft in drafts]
        together = np.concatenate([np.empty(0, np.float32), *scores])
        if not len(together):
            return list(drafts)
        base = other_rows + len(drafts)
        passes = self._costs.passes(self._curve, self._widths)[base:]
        beside = self._costs.plain * len(drafts), self._costs.drafted * len(drafts)
        count = _best_count(together, self._costs.evidence, passes, beside, len(drafts))
        trial, self._costs.unpaid = self._costs.unpaid >= PATIENCE, 0 if count else self._costs.unpaid + 1
        self._costs.rest = rest_after(self._costs.unpaid)
        if count == 0 and not trial:
            return [EMPTY_DRAFT] * len(drafts)
        count = min(max(count, len(drafts)), len(together), len(passes) - 1)  # a trial is verified all the same
        bar = float(np.partition(together, len(together) - count)[len(together) - count])
        worth = [int((score >= bar).sum()) for score in scores]
        each = count / len(drafts)
        self._each = (
            2.0 * each if max(worth) >= max(budget.nodes for budget in budgets) else 0.8 * self._each + 0.2 * each
        )
        given = zip(drafts, budgets, worth, scores, strict=True)
        return [
            cut(draft, Budget(min(most, budget.nodes), budget.depth), score) for draft, budget, most, score in given
        ]

    def observe(
        self,
        verdicts: Sequence[Verdict],
        rows: int,
        forward_seconds: float,
        other_seconds: float,
        draft_seconds: float,
    ) -> None:
        """Compare what the step gave with what its scores promised, and its time with what the curve says."""
        if 0 < forward_seconds < np.inf and 0 <= other_seconds < np.inf and rows <= self._most_rows:  # a clock may jump
            each, drafting = other_seconds / len(verdicts), draft_seconds / len(verdicts)
            width, expected = float(self._widths[rows]), float(self._curve[rows])
            self._costs.see(width, expected, forward_seconds, each, drafting if self._drafted else None)
        for verdict in verdicts:
            if len(verdict.draft):
                score = verdict.draft.score
                score = guessed_scores(verdict.draft.parents) if score is None else score
                credit(self._costs.evidence, score, np.array(verdict.path, np.int32))


def rest_after(unpaid: int) -> int:
    """Return how many plain steps follow a draft, by how many in a row were not worth verifying."""
    return 0 if unpaid < PATIENCE else min(1 << (unpaid - PATIENCE), LONGEST_REST)


@njit(cache=True)
def _best_count(score: FloatArray, evidence: Evidence, passes: F64, beside: tuple[float, float], lanes: int) -> int:
    """Return how many of the best nodes of a batch are worth verifying; 0 where plain decoding writes as much.

    Args:
        score: float32[N], of all sequences' nodes.
        evidence: what became of nodes.
        passes: float64[M], seconds of a pass with 0 .. M - 1 nodes.
        beside: seconds of a step beside its pass, plain and drafted.
        lanes: sequences, each of which writes one token in any case.
    """
    chance = chances(evidence)
    order = np.sort(score)
    plain, drafted = beside
    best, highest, expected = 0, 0.0, float(lanes)
    for nodes in range(1, min(len(score), len(passes) - 1) + 1):
        expected += chance[halvings(order[len(score) - nodes])]
        rate = expected / (passes[nodes] + drafted)
        if rate > highest:
            best, highest = nodes, rate
    return best if highest * (passes[0] + plain) > lanes else 0
