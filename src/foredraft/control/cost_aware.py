"""The cost-aware rule: draft on while the tokens that it promises are worth the seconds that it takes.

Expected tokens as in Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (ICML 2023), section
3.1, with an acceptance rate learned for each depth instead of one for all. Knows what passes cost.
"""

import numpy as np

from foredraft.contracts import CostCurve
from foredraft.control.levels import Outcome, Rule
from foredraft.control.payoff import F64, StepCosts, best_number, bin_of, credit, kept_promises

_PRIOR_RATE, _PRIOR_TOKENS = 0.7, 8.0  # share accepted of so many tokens, before the first one; our choices
_MOST_SEEN = 200.0  # levels of one depth, beyond which older ones count for half
_SHARE = 0.2  # of the last draft's seconds in what is expected of the next one


class CostAwareRule(Rule):
    """Goes on where some longer draft gains more tokens than its further seconds are worth.

    A second is worth as many tokens as the best length gives on average, plain steps included. So without estimates
    the rule stops exactly at the length with the most expected tokens a second, and with estimates sooner or later, as
    the draft at hand is worse or better than usual. All longer drafts are looked at, as the cost of a pass may jump
    with one row and stay flat for the next ones. Where no length beats plain steps, drafting rests as `Rests` says.

    Args:
        curve: the target's cost by rows.
        most_nodes: never more than these are verified.
    """

    def __init__(self, curve: CostCurve, most_nodes: int) -> None:
        self._curve = curve.table(most_nodes + 1)
        self._costs = StepCosts()
        self._tried = np.zeros(most_nodes)  # by depth: levels whose parent level was accepted
        self._accepted = np.zeros(most_nodes)
        self._whole = 0.0  # seconds of drafting that do not grow with the draft, smoothed
        self._level = 0.0  # seconds of drafting one level
        self._width = 1.0  # nodes of a level
        self._rates = self._seconds = np.zeros(0)  # of this step, by depth and by number of levels
        self._price = 0.0  # expected tokens a second

    def begins(self, levels: int) -> bool:
        """Find the best length for this step, and draft where it is not 0, or where it is time for a trial."""
        rests = self._costs.rests
        if rests.left:
            rests.passed()
            return False
        self._rates = self.acceptance()[:levels]
        self._seconds = self._seconds_by_levels(levels)
        tokens = 1.0 + np.concatenate([[0.0], np.cumsum(np.cumprod(self._rates))])
        best = best_number(tokens, self._seconds)
        self._price = float(tokens[best] / self._seconds[best])
        return rests.tried(paid=best > 0)

    def more(self, level: int, path: float | None, token: float | None) -> bool:  # noqa: ARG002  # the protocol's
        """Compare what every longer draft gains with what its seconds are worth."""
        if path is None:
            reached = float(np.prod(self._rates[:level]))
        else:
            reached = min(path * float(kept_promises(self._costs.evidence)[bin_of(path)]), 1.0)
        gains = reached * np.cumsum(np.cumprod(self._rates[level:]))
        prices = self._price * (self._seconds[level + 1 :] - self._seconds[level])
        return bool((gains > prices).any())

    def observe(self, outcome: Outcome) -> None:
        """Count accepted levels by depth and by estimate, and smooth what passes and drafts took."""
        self._observe_time(outcome)
        known = outcome.accepted if outcome.ended else outcome.levels  # levels of which it is known what became
        self._tried[: min(outcome.accepted + 1, known)] += 1.0
        self._accepted[: outcome.accepted] += 1.0
        if self._tried[0] > _MOST_SEEN:
            self._tried *= 0.5
            self._accepted *= 0.5
        scored = [(level, chance) for level, chance in enumerate(outcome.chances[:known]) if chance is not None]
        path = np.flatnonzero([level < outcome.accepted for level, _ in scored]).astype(np.int32)
        credit(self._costs.evidence, np.array([chance for _, chance in scored], np.float32), path)

    def acceptance(self) -> F64:
        """Return how often a level is accepted whose parent level was, float64[most_nodes], by depth.

        The rate of all depths starts at the prior's, and that of each depth at the rate of all.
        """
        overall = (self._accepted.sum() + _PRIOR_TOKENS * _PRIOR_RATE) / (self._tried.sum() + _PRIOR_TOKENS)
        rates: F64 = (self._accepted + _PRIOR_TOKENS * overall) / (self._tried + _PRIOR_TOKENS)
        return rates

    def _seconds_by_levels(self, levels: int) -> F64:
        """Return the expected seconds of a step, float64[levels + 1], by the number of levels drafted."""
        number, passes = np.arange(levels + 1), self._costs.passes(self._curve)
        rows = np.interp(1 + number * self._width, np.arange(len(passes)), passes)
        seconds: F64 = rows + self._costs.plain + self._level * number + self._whole * (number > 0)
        return seconds

    def _observe_time(self, outcome: Outcome) -> None:
        seconds = (outcome.forward_seconds, outcome.other_seconds, outcome.draft_seconds)
        self._costs.see(self._curve, outcome.nodes + 1, *seconds)
        if outcome.levels and all(0 <= each < np.inf for each in seconds):  # a clock may jump
            drafting = min(outcome.draft_seconds, max(outcome.asked, 1) * self._curve[1])  # more is compilation
            each = drafting / max(outcome.levels, outcome.asked) if outcome.asked else 0.0
            self._level += _SHARE * (each - self._level)
            self._whole += _SHARE * ((0.0 if outcome.asked else drafting) - self._whole)
            self._width += _SHARE * (outcome.nodes / outcome.levels - self._width)
