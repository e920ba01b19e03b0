"""The level rules that use measured seconds: `cost_aware` per level, `whole` for the whole draft.

Does not depend on drafters or models.
"""

import numpy as np

from foredraft.contracts import CostCurve
from foredraft.control.levels import Outcome, Rule
from foredraft.control.payoff import StepCosts, best_number, bin_of, corrections, credit
from foredraft.graph.tree import F64

_PRIOR_RATE, _PRIOR_TOKENS = 0.7, 8.0  # prior acceptance rate, and its weight in tokens; chosen
_MOST_SEEN = 200.0  # observed first levels, after which all counts are halved; chosen
_SHARE = 0.2  # weight of the last draft in smoothed values; chosen


class CostAwareRule(Rule):
    """Drafts on while some longer draft gains more tokens than its extra seconds are worth.

    Expected tokens are those of Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (ICML
    2023), section 3.1, with one learned acceptance rate per depth. All longer drafts are compared, as the cost of a
    pass may jump at one row and stay flat for the next ones. docs/explanation/control.md has the whole rule.
    """

    def __init__(self, curve: CostCurve, most_nodes: int) -> None:
        self._curve = curve.table(most_nodes + 1)
        self._costs = StepCosts()
        self._tried = np.zeros(most_nodes)  # per depth: levels whose parent was accepted
        self._accepted = np.zeros(most_nodes)
        self._whole = 0.0  # smoothed seconds of drafting that do not depend on the number of levels
        self._level = 0.0  # smoothed seconds of drafting one level
        self._width = 1.0  # smoothed nodes of a level
        self._rates = self._seconds = np.zeros(0)  # of this step, by depth, and expected by number of levels
        self._price = 0.0  # tokens that a second is worth in this step

    def begins(self, levels: int) -> bool:
        """Compute the best length of this step; draft if it is not 0 or a trial is due."""
        if self._costs.rests.left:
            self._costs.rests.passed()
            return False
        self._rates = self.acceptance()[:levels]
        number, passes = np.arange(levels + 1), self._costs.passes(self._curve)
        passes = np.interp(1 + number * self._width, np.arange(len(passes)), passes)
        self._seconds = passes + self._costs.plain + self._level * number + self._whole * (number > 0)
        tokens = 1.0 + np.concatenate([[0.0], np.cumsum(np.cumprod(self._rates))])
        best = best_number(tokens, self._seconds)
        self._price = float(tokens[best] / self._seconds[best])
        return self._costs.rests.tried(paid=best > 0)

    def more(self, level: int, path: float | None, token: float | None) -> bool:  # noqa: ARG002  # as `Rule` has it
        """Compare the gain of every longer draft with the value of its extra seconds."""
        reached = float(np.prod(self._rates[:level]))
        if path is not None:
            reached = min(path * float(corrections(self._costs.evidence)[bin_of(path)]), 1.0)
        gains = reached * np.cumsum(np.cumprod(self._rates[level:]))
        prices = self._price * (self._seconds[level + 1 :] - self._seconds[level])
        return bool((gains > prices).any())

    def observe(self, outcome: Outcome) -> None:
        """Count accepted levels by depth and by estimate, and smooth the measured seconds."""
        seconds = (outcome.forward_seconds, outcome.other_seconds, outcome.draft_seconds)
        self._costs.observe(self._curve, outcome.nodes + 1, *seconds)
        if outcome.levels and all(0 <= each < np.inf for each in seconds):  # the clock may jump
            drafting = min(outcome.draft_seconds, max(outcome.asked, 1) * self._curve[1])  # more is compilation
            each = drafting / max(outcome.levels, outcome.asked) if outcome.asked else 0.0
            self._level += _SHARE * (each - self._level)
            self._whole += _SHARE * ((0.0 if outcome.asked else drafting) - self._whole)
            self._width += _SHARE * (outcome.nodes / outcome.levels - self._width)
        known = outcome.accepted if outcome.ended else outcome.levels  # levels whose fate is known
        self._tried[: min(outcome.accepted + 1, known)] += 1.0
        self._accepted[: outcome.accepted] += 1.0
        if self._tried[0] > _MOST_SEEN:
            self._tried *= 0.5
            self._accepted *= 0.5
        chances = [chance for chance in outcome.chances[:known] if chance is not None]
        accepted = sum(chance is not None for chance in outcome.chances[: outcome.accepted])
        credit(self._costs.evidence, np.array(chances, np.float32), np.arange(accepted, dtype=np.int32))

    def acceptance(self) -> F64:
        """Return the acceptance rate of a level given its parent, float64[most_nodes], by depth; smoothed."""
        overall = (self._accepted.sum() + _PRIOR_TOKENS * _PRIOR_RATE) / (self._tried.sum() + _PRIOR_TOKENS)
        return np.asarray((self._accepted + _PRIOR_TOKENS * overall) / (self._tried + _PRIOR_TOKENS))


class WholeRule(Rule):
    """The whole draft or none, for drafts some of whose nodes pay off in later steps, so that none can be weighed."""

    def __init__(self, curve: CostCurve, most_nodes: int) -> None:
        self._curve, self._costs = curve.table(most_nodes + 1), StepCosts()
        self._drafts = False  # in this step
        self._tokens = 0.0  # of a drafted step, smoothed; 0 before the first one

    def begins(self, levels: int) -> bool:  # noqa: ARG002  # as `Rule` has it
        self._drafts = self._costs.rests.left == 0
        return self._drafts

    def observe(self, outcome: Outcome) -> None:
        """Compare the tokens per second of drafted steps with those of a plain step."""
        costs, rows = self._costs, outcome.nodes + 1
        drafting = outcome.draft_seconds if self._drafts else None
        costs.observe(self._curve, rows, outcome.forward_seconds, outcome.other_seconds, drafting)
        if not self._drafts:
            costs.rests.passed()
            return
        written = float(outcome.accepted + (not outcome.ended))
        self._tokens += _SHARE * (written - self._tokens) if self._tokens else written
        passes = costs.passes(self._curve)
        seconds = np.array([passes[1] + costs.plain, passes[rows] + costs.drafted])
        costs.rests.tried(paid=best_number(np.array([1.0, self._tokens]), seconds) > 0)
