"""The cost-aware rule: draft on while the tokens that it promises are worth the seconds that it takes.

Expected tokens as in Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (ICML 2023), section
3.1, with an acceptance rate learned for each depth instead of one for all. Knows the measured cost of the target's
passes, and seconds; not the drafter or the model.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foredraft.contracts import CostCurve
from foredraft.control.stopping import Outcome
from foredraft.errors import UsageError

Floats = npt.NDArray[np.float64]

_BINS = 10  # of the drafter's estimates: [0, 0.1), [0.1, 0.2), ..., [0.9, 1]
_BIN_WEIGHT = 4.0  # levels of each bin seen before the first step, as it were, accepted as the estimate says
_MOST_SEEN = 200.0  # of one depth or bin; then older evidence counts for half
_TRY_EVERY = 32  # steps between trials while drafting does not pay
_FADE = 0.9  # what a trial leaves of the evidence, which would be believed for ever


@dataclass(frozen=True, slots=True)
class CostAwareOptions:
    """Options of `cost_aware`.

    Attributes:
        prior_rate: share of drafted tokens taken to be accepted before the first one.
        prior_tokens: drafted tokens that this is worth; more of them learn more slowly.
    """

    prior_rate: float = 0.7
    prior_tokens: float = 8.0

    def __post_init__(self) -> None:
        """Refuse what is no rate, and a prior that nothing could outweigh.

        Raises:
            UsageError: naming the value.
        """
        if not 0 < self.prior_rate < 1:
            raise UsageError(f"prior_rate is {self.prior_rate}; it must be above 0 and below 1.")
        if not 0 < self.prior_tokens <= 1e6:
            raise UsageError(f"prior_tokens is {self.prior_tokens}; it must be above 0 and at most 1000000.")


class CostAwareRule:
    """Goes on where some longer draft gains more tokens than its further seconds are worth.

    A second is worth as many tokens as the best length gives on average, plain steps included; so without estimates
    the rule stops exactly at the length with the most expected tokens per second, and with estimates sooner or later
    than that, as the draft at hand is worse or better than the average one. Longer drafts than the next level are
    looked at too, because the cost of a pass may jump with one row and stay flat for the next ones.

    The chance of the level at hand is the share of levels with a like estimate that were accepted, or without an
    estimate the share of its depth. Seconds are the curve's, scaled by how fast passes have been running of late, and
    what drafting a level takes; a draft that came whole has cost all its seconds already. Where no length beats plain
    steps, drafting is tried again every 32 steps.

    Args:
        curve: the target's cost by rows.
        options: what is believed before the first draft.
        most_nodes: never more than these are verified.
    """

    def __init__(self, curve: CostCurve, options: CostAwareOptions, most_nodes: int) -> None:
        self._cost = curve.table(most_nodes + 1)
        self._options = options
        self._tried = np.zeros(most_nodes)  # by depth: levels whose parent level was accepted
        self._accepted = np.zeros(most_nodes)
        self._bin_seen = np.full(_BINS, _BIN_WEIGHT)
        self._bin_accepted = _BIN_WEIGHT * (np.arange(_BINS) + 0.5) / _BINS
        self._pace = 1.0  # seconds of a pass / those of the curve, smoothed like all that follows
        self._beside = 0.0  # seconds of a step beside its pass and its drafting
        self._whole = 0.0  # seconds of drafting that do not grow with the draft
        self._level = 0.0  # seconds of drafting one level
        self._width = 1.0  # nodes of a level
        self._plain_steps = 0  # in a row, because nothing was worth drafting
        self._rates = self._seconds = np.zeros(0)  # of this step, by depth and by number of levels
        self._price = 0.0  # expected tokens per second

    def begins(self, levels: int) -> bool:
        """Find the best length for this step, and draft where it is not 0, or where it is time for a trial."""
        self._rates = self.acceptance()[:levels]
        self._seconds = self._seconds_by_levels(levels)
        tokens = 1.0 + np.concatenate([[0.0], np.cumsum(np.cumprod(self._rates))])
        speeds = tokens / self._seconds
        best = int(np.argmax(speeds))
        self._price = float(speeds[best])
        self._plain_steps = 0 if best > 0 else self._plain_steps + 1
        if self._plain_steps >= _TRY_EVERY:
            self._plain_steps = 0
            self._scale_evidence(_FADE)
            return True
        return best > 0

    def more(self, level: int, chance: float | None) -> bool:
        """Compare what every longer draft gains with what its seconds are worth."""
        reached = float(np.prod(self._rates[:level])) if chance is None else self._share_of_estimate(chance)
        gains = reached * np.cumsum(np.cumprod(self._rates[level:]))
        prices = self._price * (self._seconds[level + 1 :] - self._seconds[level])
        return bool((gains > prices).any())

    def observe(self, outcome: Outcome) -> None:
        """Count accepted levels by depth and by estimate, and smooth what passes and drafts took."""
        seconds = (outcome.forward_seconds, outcome.other_seconds, outcome.draft_seconds)
        if outcome.forward_seconds > 0 and all(0 <= each < np.inf for each in seconds):  # a clock may jump
            self._observe_time(outcome)
        known = outcome.accepted if outcome.ended else outcome.levels  # levels of which it is known what became
        tried = min(outcome.accepted + 1, known)
        self._tried[:tried] += 1.0
        self._accepted[: outcome.accepted] += 1.0
        for level, chance in enumerate(outcome.chances[:known]):
            if chance is not None:
                self._bin_seen[_bin(chance)] += 1.0
                self._bin_accepted[_bin(chance)] += level < outcome.accepted
        if max(self._tried[0], self._bin_seen.max()) > _MOST_SEEN:
            self._scale_evidence(0.5)

    def acceptance(self) -> Floats:
        """Return how often a level is accepted whose parent level was, float64[most_nodes], by depth.

        The rate of all depths starts at the prior's, and that of each depth at the rate of all.
        """
        weight = self._options.prior_tokens
        overall = (self._accepted.sum() + weight * self._options.prior_rate) / (self._tried.sum() + weight)
        rates: Floats = (self._accepted + weight * overall) / (self._tried + weight)
        return rates

    def _seconds_by_levels(self, levels: int) -> Floats:
        """Return the expected seconds of a step, float64[levels + 1], by the number of levels drafted."""
        number = np.arange(levels + 1)
        rows = np.interp(1 + number * self._width, np.arange(len(self._cost)), self._cost)
        seconds: Floats = self._pace * rows + self._beside + self._level * number + self._whole * (number > 0)
        return seconds

    def _share_of_estimate(self, chance: float) -> float:
        return float(self._bin_accepted[_bin(chance)] / self._bin_seen[_bin(chance)])

    def _observe_time(self, outcome: Outcome) -> None:
        plain = self._cost[1]  # a pass that stalled, or a step that compiled something, says little about the next
        ratio = outcome.forward_seconds / self._cost[min(outcome.nodes + 1, len(self._cost) - 1)]
        self._pace += 0.05 * (min(ratio, 4 * self._pace) - self._pace)
        beside = max(outcome.other_seconds - outcome.draft_seconds, 0.0)
        self._beside += 0.1 * (min(beside, plain) - self._beside)
        if outcome.levels:
            each = outcome.draft_seconds / max(outcome.levels, outcome.asked) if outcome.asked else 0.0
            whole = 0.0 if outcome.asked else outcome.draft_seconds
            self._level += 0.2 * (min(each, plain) - self._level)
            self._whole += 0.2 * (min(whole, plain) - self._whole)
            self._width += 0.1 * (outcome.nodes / outcome.levels - self._width)

    def _scale_evidence(self, share: float) -> None:
        self._tried *= share
        self._accepted *= share
        prior = _BIN_WEIGHT * (np.arange(_BINS) + 0.5) / _BINS
        self._bin_seen = _BIN_WEIGHT + share * (self._bin_seen - _BIN_WEIGHT)
        self._bin_accepted = prior + share * (self._bin_accepted - prior)


def _bin(chance: float) -> int:
    """Return the bin of an estimate from 0 to 1."""
    return min(int(chance * _BINS), _BINS - 1)
