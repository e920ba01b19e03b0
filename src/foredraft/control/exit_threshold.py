"""Self-SD's adaptive exit: draft on while the last token is probable enough, by a threshold that learns.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding" (ACL 2024), its
adaptive draft-exiting mechanism. Knows the drafter's own estimates and what was accepted; not what anything costs.
"""

from dataclasses import dataclass

from foredraft.control.stopping import Outcome, check_cap
from foredraft.errors import UsageError


@dataclass(frozen=True, slots=True)
class ExitThresholdOptions:
    """Options of `exit_threshold`; the defaults are those of the paper's code.

    Attributes:
        threshold: at first, no level is drafted behind a token less probable than this (gamma).
        acceptance: share of drafted tokens to be accepted: with less the threshold rises, else it falls (alpha).
        change: how far it rises or falls, before smoothing (epsilon).
        keep_rate: what is kept of the smoothed share at each step (beta 1).
        keep_threshold: likewise, of the threshold (beta 2).
        cap: levels drafted a step at most; None for as many as `num_speculative_tokens` allows.
    """

    threshold: float = 0.8
    acceptance: float = 0.9
    change: float = 0.01
    keep_rate: float = 0.5
    keep_threshold: float = 0.9
    cap: int | None = 8

    def __post_init__(self) -> None:
        """Refuse what is no share.

        Raises:
            UsageError: naming the value.
        """
        for name in ("threshold", "acceptance", "change", "keep_rate", "keep_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be 0 to 1.")
        check_cap(self.cap)


class ExitThresholdRule:
    """Stops behind a token less probable than the threshold, which moves to keep a share of tokens accepted.

    The last token's estimate is this level's chance over that of the level before. As in the paper's code, the
    threshold does not fall after a draft that only the cap ended: a lower one would have changed nothing.

    Args:
        options: where the threshold begins and how it moves.

    Attributes:
        threshold: as it stands.
    """

    def __init__(self, options: ExitThresholdOptions) -> None:
        self.threshold = options.threshold
        self._options = options
        self._rate = 0.0
        self._chance = 1.0  # of the path down to the level before

    def begins(self, levels: int) -> bool:  # noqa: ARG002  # the family's signature
        """Always draft a first level."""
        self._chance = 1.0
        return True

    def more(self, level: int, chance: float | None) -> bool:
        """Compare the last token's estimate with the threshold; a drafter without estimates is stopped by the cap."""
        token = 1.0 if chance is None else chance / self._chance if self._chance > 0 else 0.0
        self._chance = 1.0 if chance is None else chance
        return token >= self.threshold and (self._options.cap is None or level < self._options.cap)

    def observe(self, outcome: Outcome) -> None:
        """Move the threshold after a step that drafted."""
        if not outcome.levels:
            return
        options = self._options
        share = outcome.accepted / outcome.levels
        self._rate = options.keep_rate * self._rate + (1 - options.keep_rate) * share
        if self._rate < options.acceptance:
            aim = self.threshold + options.change
        else:
            aim = self.threshold - (0.0 if outcome.levels == options.cap else options.change)
        moved = options.keep_threshold * self.threshold + (1 - options.keep_threshold) * aim
        self.threshold = min(max(moved, 0.0), 1.0)
