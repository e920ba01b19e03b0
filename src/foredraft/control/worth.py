"""Whether a source that takes time is worth asking: the tokens that it adds to drafts, against its seconds.

Steps of one text differ so much in what they write that to compare those with the source and those without tells little
in a hundred tokens. So a draft made with it is compared with the one that would have been made without, node by node:
what its scores promise more, as far as promises have been kept, is what asking brings. Knows seconds, scores and what
was accepted. Does not know what is asked.
"""

from collections import deque
from collections.abc import Callable
from statistics import median_low
from time import perf_counter

from foredraft.graph.tree import FloatArray

_FIRST = 2  # steps with it, before it is judged
_LIKELY = 0.5  # the chance of a path that is gone on with before anything is known of seconds
_TRY_EVERY, _TRIED = 48, 2  # steps without it, where it was not worth its time, and then with it
_COMPARE_EVERY = 4  # steps with it, where it is worth its time
_SHARE = 0.3  # of the last comparison in what is thought of the next one
_FADE = 0.95  # what a step's evidence is worth a step later
_KEPT, _PROMISED = 2.4, 3.0  # nodes accepted, and the sum of their scores, to begin with
_LONGEST = 10.0  # a step that takes so many times as long as the average one was interrupted


class Worth:
    """What asking a source brings and takes, in one text.

    Args:
        clock: seconds; a clock that jumps back or far ahead is not believed.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None
        self._took = 0.0  # seconds, of the answer in this step
        self._drafts: tuple[FloatArray, FloatArray] | None = None  # scores with the answer, and without
        self._asked = self._compared = 0  # steps
        self._without = 0  # steps since it was not worth asking
        self._gain = 0.0  # tokens that an answer brings
        self._answers: deque[float] = deque(maxlen=3)  # their seconds
        self._levels: deque[float] = deque(maxlen=7)  # those of single levels
        self._level_began = 0.0
        self._steps = self._tokens = self._seconds = 0.0  # of late; seconds without those of answers
        self._kept, self._promised = _KEPT, _PROMISED

    @property
    def pays(self) -> bool:
        """Whether an answer brings more tokens than could be written in its seconds."""
        return bool(self._answers) and self._gain * self._seconds > median_low(self._answers) * self._tokens

    @property
    def compares(self) -> bool:
        """Whether to draft without the answer too, so that what it brings is known."""
        return self._asked <= _FIRST or not self.pays or self._asked % _COMPARE_EVERY == 0

    def begins(self) -> bool:
        """Begin a step, and say whether to ask."""
        self._began, self._took, self._drafts = self._clock(), 0.0, None
        if self._asked < _FIRST or self.pays:
            self._without = 0
            asks = True
        else:
            self._without += 1
            asks = self._without > _TRY_EVERY
            if self._without == _TRY_EVERY + _TRIED:
                self._without = 0
        self._asked += asks
        self._level_began = self._began
        return asks

    def goes_on(self, best: float | None) -> bool:
        """Say whether an answer may go one level deeper, as `Budget.more` asks: its tokens must be worth its time."""
        now = self._clock()
        self._levels.append(now - self._level_began)
        self._level_began = now
        if best is None:
            return True
        if not self._tokens:
            return best >= _LIKELY
        return best * self._seconds >= median_low(self._levels) * self._tokens

    def answered(self) -> None:
        """Note how long the answer took."""
        if self._began is not None:
            self._took = self._clock() - self._began
            if self._took > 0:
                self._answers.append(self._took)

    def compare(self, scores: FloatArray, otherwise: FloatArray) -> None:
        """Take the scores of the draft made with the answer, and of the one that would have been made, best first."""
        self._drafts = scores, otherwise

    def ends(self, tokens: int, nodes: int, accepted: int) -> None:
        """End the step.

        Args:
            tokens: written.
            nodes: of the draft that were verified, the best ones.
            accepted: of them.
        """
        if self._began is None:
            return
        seconds, self._began = self._clock() - self._began - self._took, None
        average = self._seconds / self._steps if self._steps else seconds
        if 0 < seconds * _LONGEST < average:  # what is known is of steps that loaded or compiled something
            self._steps = self._tokens = self._seconds = 0.0
            average = seconds
        if 0 < seconds <= _LONGEST * average:
            self._steps, self._tokens = _FADE * self._steps + 1, _FADE * self._tokens + tokens
            self._seconds = _FADE * self._seconds + seconds
        if self._drafts is None:
            return
        promised, otherwise = (float(scores[:nodes].sum()) for scores in self._drafts)
        self._kept, self._promised = _FADE * self._kept + accepted, _FADE * self._promised + promised
        self._compared += 1
        gain = min(self._kept / self._promised, 1.0) * (promised - otherwise)
        self._gain += max(_SHARE, 1 / self._compared) * (gain - self._gain)
