"""Rules that draft on while the drafter's estimate reaches a threshold: a fixed one, and Self-SD's, which moves.

Know the drafter's own estimates and what was accepted; not what anything costs.
"""

from dataclasses import dataclass

from foredraft.control.levels import Outcome
from foredraft.errors import UsageError

_CHANGE, _KEEP_RATE, _KEEP_THRESHOLD = 0.01, 0.5, 0.9  # epsilon, beta 1 and beta 2 of Self-SD's code


@dataclass(frozen=True, slots=True)
class ConfidenceOptions:
    """Options of `confidence`.

    Attributes:
        threshold: no level is drafted after one whose best path is accepted with a smaller probability, as the drafter
            estimates it; 0 never stops.
    """

    threshold: float = 0.3

    def __post_init__(self) -> None:
        """Refuse what is no probability.

        Raises:
            UsageError: a threshold outside 0 to 1.
        """
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"threshold is {self.threshold}; it must be 0 to 1.")


class ConfidenceRule:
    """Stops after a level whose best path is less probable than the threshold.

    It is the whole path's probability that is compared, as every token of it must be accepted for the next to count;
    transformers' `assistant_confidence_threshold` compares the last token's alone. A drafter without estimates is never
    stopped.

    Args:
        options: the threshold.
    """

    def __init__(self, options: ConfidenceOptions) -> None:
        self._threshold = options.threshold

    def begins(self, levels: int) -> bool:  # noqa: ARG002  # the protocol's signature
        """Always draft: there is no confidence in what is not drafted."""
        return True

    def more(self, level: int, path: float | None, token: float | None) -> bool:  # noqa: ARG002  # as above
        """Compare the path's estimate with the threshold."""
        return path is None or path >= self._threshold

    def observe(self, outcome: Outcome) -> None:
        """Learn nothing."""


@dataclass(frozen=True, slots=True)
class ExitThresholdOptions:
    """Options of `exit_threshold`; the defaults are those of the paper's code.

    Attributes:
        threshold: at first, no level is drafted after a token less probable than this (gamma).
        acceptance: share of drafted tokens to be accepted: with less the threshold rises, else it falls (alpha).
        cap: levels drafted a step at most; None for as many as `num_speculative_tokens` allows.
    """

    threshold: float = 0.8
    acceptance: float = 0.9
    cap: int | None = 8

    def __post_init__(self) -> None:
        """Refuse what is no share, and a cap that allows nothing.

        Raises:
            UsageError: naming the value.
        """
        for name in ("threshold", "acceptance"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be 0 to 1.")
        if self.cap is not None and self.cap < 1:
            raise UsageError(f"cap is {self.cap}; it must be at least 1, or None.")


class ExitThresholdRule:
    """Stops after a token less probable than the threshold, which moves to keep a share of tokens accepted.

    Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding" (ACL 2024),
    its adaptive draft-exiting mechanism. As in the paper's code, the threshold does not fall after a draft that only
    the cap ended: a lower one would have changed nothing.

    Args:
        options: where the threshold begins and how it moves.

    Attributes:
        threshold: as it stands.
    """

    def __init__(self, options: ExitThresholdOptions) -> None:
        self.threshold = options.threshold
        self._options = options
        self._rate = 0.0

    def begins(self, levels: int) -> bool:  # noqa: ARG002  # the protocol's signature
        """Always draft a first level."""
        return True

    def more(self, level: int, path: float | None, token: float | None) -> bool:  # noqa: ARG002  # as above
        """Compare the last token's estimate with the threshold; a drafter without estimates is stopped by the cap."""
        return token is None or token >= self.threshold

    def observe(self, outcome: Outcome) -> None:
        """Move the threshold after a step that drafted."""
        if not outcome.levels:
            return
        self._rate = _KEEP_RATE * self._rate + (1 - _KEEP_RATE) * outcome.accepted / outcome.levels
        if self._rate < self._options.acceptance:
            change = _CHANGE
        else:
            change = 0.0 if outcome.levels == self._options.cap else -_CHANGE
        self.threshold = min(max(self.threshold + (1 - _KEEP_THRESHOLD) * change, 0.0), 1.0)
