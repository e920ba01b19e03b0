"""Rules that say after each drafted level whether to draft the next one: two by thresholds, two by Thompson sampling.

EESD (Liu et al., "Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling Control
Mechanism", ACL Findings 2024): Beta-TS is appendix A, Cali-TS appendix B, both with plain counts. Self-SD (Zhang et
al., "Draft & Verify", ACL 2024): the exit threshold. Know the drafter's estimates and what was accepted; no costs.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from foredraft.control.levels import Outcome, Rule
from foredraft.errors import UsageError

_BETA_STREAM, _CALI_STREAM = 0xBE7A, 0xCA11  # any two numbers: no two things that draw with one seed draw the same
_CHANGE, _KEEP_RATE, _KEEP_THRESHOLD = 0.01, 0.5, 0.9  # of Self-SD's code: epsilon, beta 1 and beta 2


def _check_shares(options: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(options, name) <= 1:
            raise UsageError(f"{name} is {getattr(options, name)}; it must be 0 to 1.")


def _check_positive(options: Any, most: int, *names: str) -> None:
    for name in names:
        if not 0 < getattr(options, name) <= most:
            raise UsageError(f"{name} is {getattr(options, name)}; it must be above 0 and at most {most}.")


@dataclass(frozen=True, slots=True)
class ConfidenceOptions:
    """Options of `confidence`.

    Attributes:
        threshold: no level is drafted after one whose best path is accepted with a smaller probability, as the drafter
            estimates it; 0 never stops.
    """

    threshold: float = 0.3

    def __post_init__(self) -> None:
        """Raise UsageError for a threshold outside 0 to 1."""
        _check_shares(self, "threshold")


class ConfidenceRule(Rule):
    """Stops after a level whose best path is less probable than the threshold.

    Of the whole path, as a token counts only where all before it are accepted; transformers'
    `assistant_confidence_threshold` compares the last token's. A drafter without estimates is never stopped.
    """

    def __init__(self, options: ConfidenceOptions) -> None:
        self._threshold = options.threshold

    def more(self, level: int, path: float | None, token: float | None) -> bool:  # noqa: ARG002  # the protocol's
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
        """Raise UsageError for a share outside 0 to 1, or a cap below 1."""
        _check_shares(self, "threshold", "acceptance")
        if self.cap is not None and self.cap < 1:
            raise UsageError(f"cap is {self.cap}; it must be at least 1, or None.")


class ExitThresholdRule(Rule):
    """Stops after a token less probable than the threshold, which moves to keep a share of tokens accepted.

    As in the paper's code, it does not fall after a draft that only the cap ended: that would have changed nothing.
    """

    def __init__(self, options: ExitThresholdOptions) -> None:
        self.threshold = options.threshold
        self._options, self._rate = options, 0.0

    def more(self, level: int, path: float | None, token: float | None) -> bool:  # noqa: ARG002  # the protocol's
        """Compare the last token's estimate with the threshold; without estimates only the cap stops."""
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


@dataclass(frozen=True, slots=True)
class BetaOptions:
    """Options of `beta_ts`.

    Attributes:
        alpha0: accepted tokens before the first one, as it were; the paper does not say how many.
        beta0: likewise, rejected tokens.
    """

    alpha0: float = 1.0
    beta0: float = 1.0

    def __post_init__(self) -> None:
        """Raise UsageError for counts that make no Beta distribution."""
        _check_positive(self, 1_000_000, "alpha0", "beta0")


class BetaRule(Rule):
    """Goes on with probability theta, drawn after each level from Beta(alpha, beta).

    Alpha counts accepted tokens, and beta the first rejected one of a draft. The paper's counts, r = |Q_v| - 1 of
    min(|Q_v| + 1, |Q_d|), would subtract a success where nothing is accepted, so that alpha turns negative.
    """

    def __init__(self, options: BetaOptions, seed: int) -> None:
        self.alpha, self.beta = options.alpha0, options.beta0
        self._generator = np.random.default_rng([seed, _BETA_STREAM])

    def more(self, level: int, path: float | None, token: float | None) -> bool:  # noqa: ARG002  # the protocol's
        """Draw theta, then whether to go on."""
        theta = self._generator.beta(self.alpha, self.beta)
        return bool(self._generator.random() < theta)

    def observe(self, outcome: Outcome) -> None:
        """Count successes, and the first rejection as one failure."""
        self.alpha += outcome.accepted
        self.beta += outcome.rejected


@dataclass(frozen=True, slots=True)
class CaliOptions:
    """Options of `cali_ts`; the paper gives no values, docs/explanation/eesd.md says how the defaults were found.

    Attributes:
        sigma_model: standard deviation of the prediction's error (sigma_M).
        sigma_sample: that of one round's share of accepted tokens (sigma_S).
        theta0: share of drafted tokens taken to be accepted before the first one, worth one token.
    """

    sigma_model: float = 0.05
    sigma_sample: float = 2.0
    theta0: float = 0.5

    def __post_init__(self) -> None:
        """Raise UsageError for what is no deviation or share."""
        _check_positive(self, 1000, "sigma_model", "sigma_sample")
        _check_shares(self, "theta0")


class CaliRule(Rule):
    """Goes on with probability theta, drawn about a mean between the drafter's estimate and the share accepted so far.

    The paper's equation 8 counts accepted tokens over accepted ones and tends to 1 whatever is accepted; here it is
    accepted tokens over tried ones, the first rejected one included. Without an estimate this share stands for it.
    """

    def __init__(self, options: CaliOptions, seed: int) -> None:
        self._model, self._sample = options.sigma_model**2, options.sigma_sample**2
        self._generator = np.random.default_rng([seed, _CALI_STREAM])
        self._accepted, self._tried = options.theta0, 1.0
        self.verifications = 0  # n of the paper

    @property
    def theta(self) -> float:
        """The share accepted so far."""
        return self._accepted / self._tried

    def posterior(self, predicted: float) -> tuple[float, float]:
        """Return the mean and the variance where a level is predicted to be accepted so often (equations 6 and 7)."""
        counted = self.verifications * self._model
        whole = self._sample + counted
        return (self._sample * predicted + counted * self.theta) / whole, self._model * self._sample / whole

    def more(self, level: int, path: float | None, token: float | None) -> bool:  # noqa: ARG002  # the protocol's
        """Draw theta, then whether to go on."""
        mean, variance = self.posterior(self.theta if token is None else token)
        theta = float(np.clip(self._generator.normal(mean, math.sqrt(variance)), 0.0, 1.0))
        return bool(self._generator.random() < theta)

    def observe(self, outcome: Outcome) -> None:
        """Count accepted tokens, the first rejection as one failure, and the verification."""
        self._accepted += outcome.accepted
        self._tried += outcome.accepted + outcome.rejected
        self.verifications += outcome.nodes > 0
