"""Whether a source that takes time is worth asking: the tokens that it adds to drafts, against its seconds.

What steps of one text write differs too much to compare those with the source and those without. So a draft made with
it is compared with the one that would have been made without: what its scores promise more is what asking brings.
Knows seconds, scores and tokens; not what is asked.
"""

from collections import deque
from collections.abc import Callable
from statistics import median_low
from time import perf_counter

import numpy as np

from foredraft.control.payoff import PATIENCE, Rests, best_number
from foredraft.graph.tree import FloatArray

# our choices
_SHARE = 0.3  # of the last step in what is expected of the next one
_COMPARE_EVERY = 2  # steps with it, where it pays: each comparison drafts once more, which takes 1 % of a pass of 7 ms
_LAST = 7  # seconds of which the median counts, so that a stall, or a clock that jumps, tells nothing
_LIKELY = 0.5  # the chance of a path that is gone on with while no step's seconds are known


class Worth:
    """What asking a source brings and takes, in one text; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._rests = Rests()
        self._began: float | None = None  # of the step
        self._level_began = 0.0
        self._took = 0.0  # seconds of the answer in this step
        self._promised: tuple[FloatArray, FloatArray] | None = None  # scores with the answer, and without
        self._asks = False
        self._asked = self._compared = 0  # steps
        self._gain, self._tokens = 0.0, 1.0  # tokens that an answer brings, and those of a step; smoothed
        self._answers, self._levels, self._steps = (deque[float](maxlen=_LAST) for _ in range(3))  # their seconds

    @property
    def compares(self) -> bool:
        """Whether to draft without the answer too, so that what it brings is known."""
        return self._asked <= PATIENCE or self._rests.unpaid > 0 or self._asked % _COMPARE_EVERY == 0

    def begins(self) -> bool:
        """Begin a step, and say whether to ask."""
        self._began = self._level_began = self._clock()
        self._took, self._promised, self._asks = 0.0, None, self._rests.left == 0
        self._asked += self._asks
        return self._asks

    def goes_on(self, best: float | None) -> bool:
        """Say whether an answer may go one level deeper, as `Budget.more` asks: its tokens must be worth its time."""
        now = self._clock()
        self._levels.append(now - self._level_began)
        self._level_began = now
        if best is None:
            return True
        if not self._steps:
            return best >= _LIKELY
        return best * median_low(self._steps) >= median_low(self._levels) * self._tokens

    def answered(self) -> None:
        """Note how long the answer took."""
        if self._began is not None:
            self._took = self._clock() - self._began
            self._answers.append(self._took)

    def compare(self, scores: FloatArray, otherwise: FloatArray) -> None:
        """Take the scores of the draft made with the answer, and of the one that would have been made, best first."""
        self._promised = scores, otherwise

    def ends(self, tokens: int, nodes: int) -> None:
        """End the step, which wrote so many `tokens`, and verified the best `nodes` of its draft."""
        if self._began is None:
            return
        self._steps.append(self._clock() - self._began - self._took)
        self._began = None
        self._tokens += _SHARE * (tokens - self._tokens)
        if not self._asks:
            self._rests.passed()
        elif self._promised is not None:
            promised, otherwise = (float(scores[:nodes].sum()) for scores in self._promised)
            self._compared += 1
            self._gain += max(_SHARE, 1 / self._compared) * (promised - otherwise - self._gain)
            self._rests.tried(paid=self._pays())
        elif self.compares:  # and nothing came to be compared
            self._rests.tried(paid=False)

    def _pays(self) -> bool:
        """Say whether steps with answers write more tokens a second than steps without."""
        seconds = median_low(self._steps)
        asking = seconds + median_low(self._answers)
        tokens = np.array([self._tokens, self._tokens + self._gain])
        return best_number(tokens, np.array([seconds, asking])) > 0
