"""What a sequence tells those after it: how long steps have been taking, and how drafting went of late.

Knows seconds, and those that the cost curve says of the same passes; not drafts, nor what is made of it.
"""

from dataclasses import dataclass

_FIRST_STEPS = 4  # plain ones of a process, of which some load or compile something: the quickest tells most
_LONGEST = 4  # times what a step has been taking; what takes longer has stalled


@dataclass(slots=True)
class Beside:
    """What a sequence tells those after it: facts of the machine and the drafter, and how drafting went of late.

    Attributes:
        pace: seconds of a drafted pass / those of the curve, smoothed; 0 until one behind another told it.
        plain_pace: the same of a plain pass; 0 until there was one.
        drafted: seconds of a drafted step beside its pass, smoothed.
        plain: the same of a plain one.
        plain_steps: how many of the first plain steps were seen.
        cold: seconds more, pass included, of a drafted step behind a plain one: what it needs has left the caches.
        quick: seconds more that a quickly drafted step takes than a plain one with a pass of so many rows.
        behind: seconds more that a plain step behind a quickly drafted one takes, smoothed.
        saves: plain steps that quick drafts save while drafting rests, for a token of it, smoothed.
        goes_on: the share of drafted steps that another one follows.
        unpaid: texts in a row in which drafting was found not to pay.
        rest: plain steps left of a rest with which the last text began, or that trying in vain had made long: short
            texts end within it.
    """

    pace: float = 0.0
    plain_pace: float = 0.0
    drafted: float = 0.0
    plain: float = 0.0
    plain_steps: int = 0
    cold: float = 0.0
    quick: float = 0.0
    behind: float = 0.0
    saves: float = 0.0
    goes_on: float = 0.5
    unpaid: int = 0
    rest: int = 0

    @property
    def drafted_pace(self) -> float:
        """Seconds of a drafted pass / those of the curve, as far as is known."""
        return self.pace or self.plain_pace or 1.0

    @property
    def knows_plain(self) -> bool:
        """Whether enough plain steps were seen to tell how long one takes."""
        return self.plain_steps >= _FIRST_STEPS

    def plain_seconds(self, expected: float) -> float:
        """Return what a plain step takes of late, `expected` being the seconds of its pass by the curve."""
        return (self.plain_pace or self.drafted_pace) * expected + self.plain

    def see_drafted(self, expected: float, forward_seconds: float, other_seconds: float, *, runs: bool) -> float:
        """Learn from the time of a drafted step; return its pass's, without what it stalled.

        Args:
            expected: seconds of its pass by the curve.
            forward_seconds: of its pass.
            other_seconds: of the rest of the step.
            runs: whether a drafted step was before it.
        """
        usual = self.drafted_pace * expected  # with what is known so far
        forward_seconds = min(forward_seconds, _LONGEST * usual)
        self._see_beside(expected, other_seconds, 0.1 if runs else 0.0)
        if runs:
            self.pace = self.drafted_pace + 0.05 * (forward_seconds / expected - self.drafted_pace)
        else:
            beside_pass = self._bounded(expected, other_seconds)
            more = min(forward_seconds + beside_pass - usual - self.drafted, usual)
            self.cold = max(0.0, self.cold + 0.1 * (more - self.cold))
        return forward_seconds

    def see_plain(self, expected: float, forward_seconds: float, other_seconds: float, *, runs: bool) -> float:
        """Learn from the time of a plain step; return its pass's, without what it stalled.

        Args:
            expected: seconds of its pass by the curve.
            forward_seconds: of its pass.
            other_seconds: of the rest of the step, without what asking for a draft took.
            runs: whether a drafted step was before it.
        """
        known = self.plain_pace or self.drafted_pace
        ratio = min(forward_seconds / expected, _LONGEST * known)
        if not self.knows_plain:
            self.plain_pace = min(ratio, known) if self.plain_steps else ratio
            self.plain = min(other_seconds, self.plain if self.plain_steps else expected)
            self.plain_steps += 1
            return ratio * expected
        self.plain_pace += 0.2 * (ratio - self.plain_pace)
        self.plain += 0.1 * (min(other_seconds, _LONGEST * self.plain or expected) - self.plain)
        if not runs and self.pace:  # what it was in the last run, passes of both kinds come to be again by and by
            self.pace += 0.1 * (self.plain_pace - self.pace)
        return ratio * expected

    def see_in_vain(self, expected: float, other_seconds: float) -> None:
        """Learn from a step of which no drafted node was worth verifying.

        What asking alone takes tells of drafted steps too: too high an estimate would never be met by one again.

        Args:
            expected: seconds of its pass by the curve.
            other_seconds: of the rest of the step.
        """
        self._see_beside(expected, other_seconds, 0.05)
        self.cold *= 0.98

    def see_quick(self, plain: float, expected: float, seconds: float, tokens: int) -> float:
        """Learn from the time of a quickly drafted step; return how many plain steps it saved.

        Args:
            plain: seconds of a plain pass by the curve.
            expected: seconds of its pass by the curve.
            seconds: of the step.
            tokens: that it wrote.
        """
        plain_seconds = self.plain_seconds(plain)
        usual = self.plain_seconds(expected)
        if not 0 < seconds < float("inf"):
            return 0.0
        seconds = min(seconds, usual + plain_seconds)
        more = seconds - usual - self.quick
        self.quick = max(self.quick + (0.3 if more < 0 else 0.1) * more, 0.0)
        return tokens - seconds / plain_seconds

    def see_behind_quick(self, plain: float, seconds: float) -> None:
        """Learn from the time of a plain step behind a quickly drafted one.

        Args:
            plain: seconds of a plain pass by the curve.
            seconds: of the step.
        """
        if 0 < seconds < float("inf"):
            usual = self.plain_seconds(plain)
            self.behind = max(self.behind + 0.1 * (min(seconds - usual, usual) - self.behind), 0.0)

    def _bounded(self, expected: float, other_seconds: float) -> float:
        """Return what a step in which a draft was asked for took beside its pass, without what it stalled or loaded."""
        return min(other_seconds, _LONGEST * self.drafted or expected)

    def _see_beside(self, expected: float, other_seconds: float, share: float) -> None:
        """Follow what a step takes in which a draft was asked for: quickly down, as the first ones load something."""
        more = self._bounded(expected, other_seconds) - self.drafted
        self.drafted += more * (1.0 if not self.drafted else 0.3 if more < 0 else share)
