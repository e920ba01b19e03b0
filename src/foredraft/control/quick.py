"""Quick drafts while drafting rests: how many tokens to copy from where the text's last two tokens occurred before.

Knows how far the text repeats itself, what passes cost and what steps have taken; not where drafts come from.
"""

from foredraft.contracts import NO_BUDGET, Budget, Verdict
from foredraft.control.beside import Beside
from foredraft.control.evidence import F64
from foredraft.control.repetition import Repetition, usual_rate

_MOST_NODES = 7  # with the root, eight rows
_BUDGETS = tuple(Budget(nodes, nodes, quick=True) for nodes in range(_MOST_NODES + 1))
_PROMISED, _KEPT = 3.0, 0.8  # tokens, and the share of them that was kept, that a text begins with
_DOUBT = 0.98  # what is left of the seconds that a quick draft is thought to take, where they leave nothing worth it
_MARGIN = 1.06  # times as many tokens a second as of a plain step, at least: estimates are chosen for being high
_OFTEN = 0.08  # the share of tokens that are copies where it is worth looking for one at each step
_MOST_EXPECTED = 16.0  # tokens, beyond which half of what became of drafts is forgotten
_FORGET = 0.01  # of what quick drafts save, for each further token


class QuickControl:
    """As many copied tokens as maximise expected tokens per second.

    A token behind an occurrence of n tokens is the same as before at a rate of about n / (n + 4), times what the text
    has kept of such promises so far; each token that is read tells of that, drafted or not. How many of the drafted
    ones were right, of those that were to be, tells the rest.

    Args:
        cost: float64[M + 2], seconds of a pass by its rows.
        most_nodes: never ask for more.
        beside: what steps have been taking; kept up to date.
        repetition: reads the text.

    Attributes:
        looks: whether the text copies so often that it is worth looking at each step, or a draft was just asked for.
    """

    def __init__(self, cost: F64, most_nodes: int, beside: Beside, repetition: Repetition) -> None:
        self._cost = cost[: min(most_nodes, _MOST_NODES) + 2].tolist()
        self._beside = beside
        self._repetition = repetition
        self._hoped = self._expected = self._accepted = 0.0  # tokens of the last draft, and of all
        self.looks = False
        self._after = False  # whether the last step was drafted

    def budget(self, depth: int) -> Budget:
        """Return how many tokens to copy, where the last two occurred before; in a text that seldom copies, three."""
        repetition, beside = self._repetition, self._beside
        if repetition.run == 0 and not self.looks:
            return NO_BUDGET
        pace, other = beside.plain_pace or 1.0, beside.plain + beside.quick + beside.behind
        ratio = (repetition.kept + _PROMISED * _KEPT) / (repetition.promised + _PROMISED)
        right = (self._accepted + _PROMISED) / (self._expected + _PROMISED)
        best, best_rate, self._hoped = 0, _MARGIN / (pace * self._cost[1] + beside.plain), 0.0
        chance, hoped = 1.0, 0.0
        for nodes in range(1, min(depth + 1, len(self._cost) - 1)):
            chance *= min(ratio * usual_rate(repetition.run + nodes - 1), 1.0)
            hoped += chance
            rate = (1.0 + right * hoped) / (pace * self._cost[nodes + 1] + other)
            if rate > best_rate:
                best, best_rate, self._hoped = nodes, rate, hoped
        if best == 0:
            beside.quick *= _DOUBT
        else:
            self.looks = True  # what becomes of it is seen at the next step
        return _BUDGETS[best]

    def observe(self, verdict: Verdict, seconds: float, steps: int) -> None:
        """Learn from a step of a rest, drafted or not, at which the text was read.

        Args:
            verdict: of it.
            seconds: that it took.
            steps: of rests, for which what drafts save is to be forgotten a little; 0 for none.
        """
        drafted = len(verdict.draft)
        self.looks = drafted > 0 or self._repetition.kept >= _OFTEN * self._repetition.watched
        if self._after and not drafted:
            self._beside.see_behind_quick(self._cost[1], seconds)
        self._after = drafted > 0
        if drafted:
            share = 0.5 if self._expected > _MOST_EXPECTED else 1.0
            self._expected = share * (self._expected + self._hoped)
            self._accepted = share * (self._accepted + len(verdict.path))
            saved = self._beside.see_quick(self._cost[1], self._cost[drafted + 1], seconds, len(verdict.tokens))
            self._beside.saves += _FORGET * saved
        if steps:
            self._beside.saves -= steps * _FORGET * self._beside.saves
