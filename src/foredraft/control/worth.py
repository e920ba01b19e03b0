"""Whether a slow draft source is worth its time: the tokens it adds to drafts against its seconds.

Steps vary too much in their tokens to compare those with and without the source. So a draft made with it is compared
with the draft that would have been made without it: the gain is the difference of their summed scores. Does not depend
on the source.
"""

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import median_low
from time import perf_counter

import numpy as np

from foredraft.control.payoff import LONGEST_PAUSE, Rests, best_number
from foredraft.graph.tree import FloatArray

# chosen
_SHARE = 0.3  # weight of the last step in smoothed values
_LAST = 7  # steps whose median seconds count, so that stalls and clock jumps have no effect


class Worth:
    """The gain and cost of a source in one text, and those before it; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._rests = clock, Rests(longest=LONGEST_PAUSE)
        self._began: float | None = None  # start of the step
        self._took = 0.0  # seconds of the source in this step
        self._promised: tuple[FloatArray, FloatArray] | None = None  # scores with the source, and without it
        self._asks = False
        self._compared = 0  # steps
        self._gain, self._tokens = 0.0, 1.0  # smoothed tokens that the source adds, and tokens of a step
        self._answers, self._steps = (deque[float](maxlen=_LAST) for _ in range(2))  # seconds

    def following(self) -> "Worth":
        """Return the state of a next text, which begins with what this one taught."""
        again = copy.copy(self)
        lasts = {name: vars(self)[name].copy() for name in ("_answers", "_steps")}
        vars(again).update(lasts, _rests=replace(self._rests))
        return again

    def begins(self) -> bool:
        """Begin a step; return whether to use the source."""
        self._began = self._clock()
        self._took, self._promised, self._asks = 0.0, None, self._rests.left == 0
        return self._asks

    def answered(self) -> None:
        """Measure the seconds of the source's draft."""
        if self._began is not None:
            self._took = self._clock() - self._began
            self._answers.append(self._took)

    def compare(self, scores: FloatArray, otherwise: FloatArray) -> None:
        """Take the scores, best first, of the draft made with the source and of the draft without it."""
        self._promised = scores, otherwise

    def ends(self, tokens: int, nodes: int) -> None:
        """End a step that wrote `tokens` and verified the best `nodes` of its draft."""
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
            seconds = median_low(self._steps)
            both = np.array([self._tokens, self._tokens + self._gain])
            paid = best_number(both, np.array([seconds, seconds + median_low(self._answers)])) > 0
            self._rests.tried(paid=paid)  # whether steps with the source write more tokens per second
        else:  # the source returned nothing to compare
            self._rests.tried(paid=False)
