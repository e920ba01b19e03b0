"""What steps cost and drafts gave of late, kept from text to text.

Knows seconds and counts; not what was drafted, nor how much should be.
"""

from dataclasses import dataclass, field

import numpy as np

from foredraft.control.payoff import F64, Evidence, Rests, empty_evidence

_SHARE = 0.1  # of the last step in what is expected of the next one
_STALL = 1.3  # times what was expected: a step that takes longer has stalled, or compiled something
_FIRST = 0.1  # of a pass: more than that beside it, in a first step, is compilation
_WIDTHS = np.log2(np.maximum(np.arange(65), 1)) / 4
"""Of a pass by its rows: 0 for one row, 1 for 16, by the logarithm, 1.5 for 64 and more."""


@dataclass(slots=True)
class StepCosts:
    """Smoothed seconds by kind of step, and what became of drafts.

    Attributes:
        pace: seconds of a pass of one row / those of the cost curve.
        wide_pace: the same of 16 rows; others lie between or beyond, by the logarithm of their rows. They differ by how
            much of the memory's bandwidth other processes leave.
        drafted: seconds of a drafted step's overhead, beside its pass; 0 until there was one.
        plain: the same of a plain step, without what asking for a draft takes; 0 until there was a step.
        rests: whether drafting pays.
        evidence: what became of drafted nodes.
    """

    pace: float = 1.0
    wide_pace: float = 1.0
    drafted: float = 0.0
    plain: float = 0.0
    rests: Rests = field(default_factory=Rests)
    evidence: Evidence = field(default_factory=empty_evidence)

    def begin_text(self) -> None:
        """Expect half of what wide passes cost beyond narrow ones of late: some of it was the last text's length.

        In a rest nothing is learned of wide passes, and a text too long to draft would keep others from it.
        """
        self.wide_pace = (self.pace + self.wide_pace) / 2

    def passes(self, curve: F64) -> F64:
        """Return what passes take now, float64[M], of what they took when `curve`, float64[M] by rows, was measured."""
        widths = _WIDTHS[np.minimum(np.arange(len(curve)), len(_WIDTHS) - 1)]
        return curve * (self.pace + (self.wide_pace - self.pace) * widths)

    def see(
        self, curve: F64, rows: int, forward_seconds: float, other_seconds: float, draft_seconds: float | None
    ) -> None:
        """Learn from a step; nothing from one whose clock jumped, or with more rows than the curve has.

        Args:
            curve: float64[M], seconds of passes by rows.
            rows: of the step's pass.
            forward_seconds: of the pass.
            other_seconds: of the rest of the step.
            draft_seconds: of drafting and learning, part of the rest; None where no draft was asked for.
        """
        if not (0 < forward_seconds < np.inf and 0 <= other_seconds < np.inf and rows < len(curve)):
            return
        width, usual = float(_WIDTHS[min(rows, len(_WIDTHS) - 1)]), float(curve[rows])
        known = self.pace + (self.wide_pace - self.pace) * width
        change = _SHARE * (min(forward_seconds / usual, _STALL * known) - known)
        change /= (1 - width) ** 2 + width**2  # a step of normalised least mean squares
        self.pace, self.wide_pace = self.pace + (1 - width) * change, self.wide_pace + width * change
        if draft_seconds is not None:
            self.drafted = smoothed(self.drafted, other_seconds, _FIRST * usual)
            other_seconds = max(other_seconds - draft_seconds, 0.0)
        self.plain = smoothed(self.plain, other_seconds, _FIRST * usual)


def smoothed(known: float, now: float, first: float) -> float:
    """Return what to expect after `now` where `known` was expected; of the first, at most `first` is believed."""
    return known + _SHARE * (min(now, _STALL * known) - known) if known else min(now, first)
