"""What steps cost and drafts gave of late, kept from text to text.

Knows seconds and counts; not what was drafted, nor how much should be.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foredraft.control.evidence import Evidence, empty_evidence

F64 = npt.NDArray[np.float64]

_SHARE = 0.1  # of the last step in what is thought of the next one
_STALL = 0.3  # of what was expected: what takes longer than that beyond it has stalled, or compiled something
_FIRST = 0.1  # of a pass, beside it, in a first step, which compiles something


@dataclass(slots=True)
class StepCosts:
    """Seconds by kind of step, smoothed, and what became of drafts.

    Attributes:
        pace: seconds of a pass of one row / those of the curve.
        wide_pace: the same of 16 rows; others lie between or beyond, by the logarithm of their rows. A machine's paces
            differ by how much of its memory's bandwidth others leave it.
        drafted: seconds of a drafted step beside its pass; 0 until there was one.
        plain: the same of a plain step, without what asking for a draft takes; 0 until there was one of either kind.
        unpaid: drafts in a row that were not worth verifying.
        rest: plain steps that are left of a rest.
        evidence: what became of drafted nodes.
    """

    pace: float = 1.0
    wide_pace: float = 1.0
    drafted: float = 0.0
    plain: float = 0.0
    unpaid: int = 0
    rest: int = 0
    evidence: Evidence = field(default_factory=empty_evidence)

    def begin_text(self) -> None:
        """Expect half of what wide passes cost beyond narrow ones of late, some of it due to the last text's length.

        In a rest nothing would be learned of wide passes, and a text too dear to draft would keep others from it.
        """
        self.wide_pace = (self.pace + self.wide_pace) / 2

    def passes(self, curve: F64, widths: F64) -> F64:
        """Return what passes take now, float64[M]: `curve` is what they took, by rows; see `widths_of`."""
        return curve * (self.pace + (self.wide_pace - self.pace) * widths)

    def see(
        self, width: float, expected: float, forward_seconds: float, other_seconds: float, draft_seconds: float | None
    ) -> None:
        """Learn from a step.

        Args:
            width: of its pass, see `widths_of`.
            expected: seconds of the pass by the curve.
            forward_seconds: of the pass.
            other_seconds: of the rest of the step.
            draft_seconds: of drafting and learning, part of the rest; None where no draft was asked for.
        """
        known = self.pace + (self.wide_pace - self.pace) * width
        change = _SHARE * (min(forward_seconds / expected, (1 + _STALL) * known) - known)
        change /= (1 - width) ** 2 + width**2  # a step of normalised least mean squares
        self.pace, self.wide_pace = self.pace + (1 - width) * change, self.wide_pace + width * change
        if draft_seconds is not None:
            self.drafted = _followed(self.drafted, other_seconds, expected)
            other_seconds = max(other_seconds - draft_seconds, 0.0)
        self.plain = _followed(self.plain, other_seconds, expected)


def widths_of(count: int) -> F64:
    """Return the width of passes of 0 to `count - 1` rows: 0 for one row, 1 for 16, by the logarithm, at most 1.5."""
    return np.minimum(np.log2(np.maximum(np.arange(count), 1)) / 4, 1.5)


def _followed(known: float, now: float, expected: float) -> float:
    """Return what the rest of a step takes, after one that took `now`."""
    if not known:
        return min(now, _FIRST * expected)
    return known + _SHARE * (min(now, (1 + _STALL) * known) - known)
