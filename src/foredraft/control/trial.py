"""Whether something that takes time is worth it: tried now and then, and kept while steps with it write more a second.

Knows seconds and tokens. Does not know what takes the time.
"""

from collections.abc import Callable
from time import perf_counter

_FADE = 0.95  # what a step's evidence is worth one like it later
_FIRST = 4  # steps with it, and as many without, before they are compared
_HOPE = 1.5  # a warm-up goes on while so many times the tokens would make it the better way
_TRY_EVERY = 64  # steps of the better way, before the other one is tried again
_TRIED = 2  # steps in a row of a trial
_LONGEST = 10.0  # a step that takes so many times as long as the average one was interrupted


class Trial:
    """Two ways to take a step: with the costly thing, or without.

    Args:
        clock: seconds; a clock that jumps back or far ahead is not believed.
        warm_up: steps with it that are given where it may yet become the better way, as it learns.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter, warm_up: int = 0) -> None:
        self._clock = clock
        self._warm_up = warm_up
        self._tokens, self._seconds = [0.0, 0.0], [0.0, 0.0]
        self._steps = [0, 0]
        self._since = 0
        self._began: float | None = None
        self._mode = 0

    def begins(self) -> bool:
        """Begin a step, and say whether to take it with the costly thing."""
        self._began = self._clock()
        self._mode = int(self._wanted())
        return bool(self._mode)

    def ends(self, tokens: int) -> None:
        """End the step, which wrote `tokens`."""
        if self._began is None:
            return
        seconds, mode = self._clock() - self._began, self._mode
        self._began = None
        usual = self._seconds[mode] / self._tokens[mode] if self._tokens[mode] else seconds / tokens
        if not 0 < seconds <= _LONGEST * usual * max(tokens, 1):
            return
        self._steps[mode] += 1
        self._tokens[mode] = _FADE * self._tokens[mode] + tokens
        self._seconds[mode] = _FADE * self._seconds[mode] + seconds

    def _wanted(self) -> bool:
        if self._steps[1] < _FIRST:
            return True
        if self._steps[0] < _FIRST:
            return False
        speed, plain_speed = self._tokens[1] * self._seconds[0], self._tokens[0] * self._seconds[1]
        if self._steps[1] < self._warm_up and _HOPE * speed > plain_speed:
            return True
        better = speed > plain_speed
        self._since += 1
        trying = self._since > _TRY_EVERY
        if self._since >= _TRY_EVERY + _TRIED:
            self._since = 0
        return better != trying  # the other way is tried, whichever it is
