"""How much to draft next: a fixed number of nodes, or as many as the measured cost of verifying them repays.

Does not know the drafter or the model; sees drafts with scores, verdicts, and seconds.
"""

from dataclasses import dataclass

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, Verdict
from foredraft.errors import UsageError
from foredraft.graph.tree import FloatArray, IntArray, depths, top_nodes

MOST_NODES = 64
"""The largest draft that a measured budget asks for."""


class FixedControl:
    """The same number of nodes at every step; `num_speculative_tokens` asks for it.

    Args:
        nodes: 0 never drafts.

    Raises:
        UsageError: a negative number.
    """

    def __init__(self, nodes: int) -> None:
        if nodes < 0:
            raise UsageError(f"num_speculative_tokens is {nodes}; use 0 to draft nothing, or a positive number.")
        self._nodes = nodes

    def budget(self, depth: int) -> Budget:
        """Return the fixed budget, as deep as drafted tokens can be of use."""
        return Budget(self._nodes if depth > 0 else 0, max(depth, 0))

    def trim(self, draft: Draft, budget: Budget) -> Draft:
        """Cut a draft that exceeds the budget to its best prefix-closed part."""
        return cut(draft, budget)

    def observe(self, verdict: Verdict, seconds: float) -> None:
        """Learn nothing."""


@dataclass(frozen=True, slots=True)
class CostCurve:
    """What one forward pass costs by its number of rows, measured.

    Attributes:
        rows: ascending row counts that were measured, the first one 1.
        seconds: the time of each.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def table(self, most_rows: int) -> np.ndarray:
        """Return float64[most_rows + 1]: seconds by rows, interpolated, never falling; entry 0 repeats entry 1."""
        seconds = np.interp(np.arange(most_rows + 1), self.rows, self.seconds)
        if most_rows > self.rows[-1] and len(self.rows) > 1:  # beyond what was measured: the last slope goes on
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
            beyond = np.arange(self.rows[-1], most_rows + 1)
            seconds[self.rows[-1] :] = self.seconds[-1] + np.maximum(slope, 0) * (beyond - self.rows[-1])
        return np.maximum.accumulate(seconds)


class MeasuredControl:
    """As many nodes as maximise expected tokens per second under a measured cost curve.

    The expected tokens of the best n nodes are 1 + r * (sum of their scores), where r compares what the target accepted
    so far with what the scores promised. When drafting has been losing against plain steps, steps are plain and
    drafting is tried again at growing intervals, so that trying costs little.

    Args:
        curve: the target's cost by rows.
        most_nodes: never ask for more.
    """

    _DECAY = 0.95
    _PRIOR_TOKENS = 4.0  # as if this many accepted tokens had been promised and kept before the first step
    _LONGEST_REST = 64

    def __init__(self, curve: CostCurve, most_nodes: int = MOST_NODES) -> None:
        self._cost = curve.table(most_nodes + 1)
        self._most_nodes = most_nodes
        self._promised = self._accepted = self._PRIOR_TOKENS
        self._overhead = 0.0  # seconds that a drafted step costs beyond its forward pass, smoothed
        self._drafted_tokens = self._drafted_seconds = 0.0
        self._plain_tokens = self._plain_seconds = 0.0
        self._rest = 0
        self._next_rest = 4

    def budget(self, depth: int) -> Budget:
        """Return the largest draft worth proposing; none while drafting rests."""
        if depth <= 0 or self._rest > 0:
            return Budget(0, max(depth, 0))
        return Budget(self._most_nodes, depth)

    def trim(self, draft: Draft, budget: Budget) -> Draft:
        """Cut a draft to the number of nodes with the best expected tokens per second."""
        if len(draft) == 0:
            return draft
        score = draft.score if draft.score is not None else self._guessed_scores(draft.parents)
        order = np.sort(score)[::-1].astype(np.float64)
        ratio = self._accepted / self._promised
        tokens = 1.0 + np.minimum(ratio * np.concatenate([[0.0], np.cumsum(order)]), budget.depth)
        seconds = self._cost[1 : len(order) + 2].copy()
        seconds[1:] += self._overhead
        best = int(np.argmax(tokens / seconds))
        return cut(draft, Budget(min(best, budget.nodes), budget.depth), score)

    def observe(self, verdict: Verdict, seconds: float) -> None:
        """Compare what the step gave with what its scores promised, and drafted steps with plain ones."""
        emitted = len(verdict.tokens)
        drafted = len(verdict.draft)
        if not drafted:
            self._plain_tokens = self._plain_tokens * self._DECAY + emitted
            self._plain_seconds = self._plain_seconds * self._DECAY + seconds
            self._rest = max(0, self._rest - 1)
            return
        score = verdict.draft.score
        promised = float(score.sum()) if score is not None else float(len(verdict.path))
        self._promised = self._promised * self._DECAY + promised
        self._accepted = self._accepted * self._DECAY + len(verdict.path)
        self._promised = max(self._promised, 1e-3)
        self._accepted = min(max(self._accepted, 1e-3), 4 * self._promised)
        self._overhead = 0.9 * self._overhead + 0.1 * max(0.0, seconds - self._cost[drafted + 1])
        self._drafted_tokens = self._drafted_tokens * self._DECAY + emitted
        self._drafted_seconds = self._drafted_seconds * self._DECAY + seconds
        self._consider_resting()

    def _consider_resting(self) -> None:
        plain = self._plain_seconds / self._plain_tokens if self._plain_tokens > 1 else float(self._cost[1])
        if self._drafted_tokens > 8 and self._drafted_seconds / self._drafted_tokens > plain:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, self._LONGEST_REST)
            self._drafted_tokens = self._drafted_seconds = 0.0
        elif self._drafted_tokens > 16:
            self._next_rest = 4

    def _guessed_scores(self, parents: IntArray) -> FloatArray:
        """Return rate ** depth for a draft whose drafter gave no scores, with the rate of a typical guess."""
        return np.power(np.float32(0.6), depths(parents)).astype(np.float32)


def cut(draft: Draft, budget: Budget, score: FloatArray | None = None) -> Draft:
    """Return the best prefix-closed part of `draft` within `budget`; by `score`, else the draft's, else in order."""
    if budget.nodes <= 0 or budget.depth <= 0 or len(draft) == 0:
        return EMPTY_DRAFT
    if len(draft) <= budget.nodes and int(depths(draft.parents).max()) <= budget.depth:
        return draft
    score = score if score is not None else draft.score
    if score is None:
        score = -np.arange(len(draft), dtype=np.float32)
    kept = top_nodes(draft.parents, score, budget.nodes, budget.depth)
    return draft.take(kept) if len(kept) else EMPTY_DRAFT

