"""Rules that decide after each drafted level whether to draft the next one, by thresholds or by Thompson sampling.

EESD (Liu et al., "Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling Control
Mechanism", ACL Findings 2024): Beta-TS is appendix A, Cali-TS appendix B, both with plain counts. Self-SD (Zhang et
al., "Draft & Verify", ACL 2024): the exit threshold. Does not depend on costs.
"""

import math
from dataclasses import dataclass

import numpy as np

from foredraft.control.levels import Outcome, Rule
from foredraft.errors import UsageError
from foredraft.options import check_range

_BETA_STREAM, _CALI_STREAM = 0xBE7A, 0xCA11  # arbitrary: keep draws with the same seed independent
_CHANGE, _KEEP_RATE, _KEEP_THRESHOLD = 0.01, 0.5, 0.9  # epsilon, beta 1 and beta 2 of Self-SD's code


@dataclass(frozen=True, slots=True)
class ConfidenceOptions:
    """Options of `confidence`."""

    # drafting stops after a level whose best path the drafter believes to be accepted with a smaller probability; 0
    # never stops
    threshold: float = 0.3

    def __post_init__(self) -> None:
        check_range(self, "threshold", least=0, most=1)


class ConfidenceRule(Rule):
    """Stops after a level whose best path is less probable than the threshold; never without estimates."""

    def __init__(self, options: ConfidenceOptions) -> None:
        self._threshold = options.threshold

    def more(self, level: int, path: float | None, token: float | None) -> bool:  # noqa: ARG002  # as `Rule` has it
        return path is None or path >= self._threshold


@dataclass(frozen=True, slots=True)
class ExitThresholdOptions:
    """Options of `exit_threshold`; the defaults are those of the paper's code."""

    threshold: float = 0.8  # drafting stops after a token less probable than this (gamma); the initial value
    acceptance: float = 0.9  # target acceptance rate: below it the threshold rises, else it falls (alpha)
    cap: int | None = 8  # levels drafted per step at most; None for as many as `num_speculative_tokens` allows

    def __post_init__(self) -> None:
        check_range(self, "threshold", "acceptance", least=0, most=1)
        if self.cap is not None and self.cap < 1:
            raise UsageError(f"cap is {self.cap}; it must be at least 1, or None.")


class ExitThresholdRule(Rule):
    """Stops after a token less probable than the threshold, which moves to reach an acceptance rate.

    As in the paper's code, it does not fall after a draft that the cap ended. Without estimates only the cap stops.
    """

    def __init__(self, options: ExitThresholdOptions) -> None:
        self.threshold = options.threshold
        self._options, self._rate = options, 0.0

    def more(self, level: int, path: float | None, token: float | None) -> bool:  # noqa: ARG002  # as `Rule` has it
        return token is None or token >= self.threshold

    def observe(self, outcome: Outcome) -> None:
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
    """Options of `beta_ts`; the paper gives no values."""

    alpha0: float = 1.0  # prior count of accepted tokens
    beta0: float = 1.0  # prior count of rejected tokens

    def __post_init__(self) -> None:
        check_range(self, "alpha0", "beta0", above=0, most=1_000_000)


class BetaRule(Rule):
    """Goes on with probability theta, drawn after each level from Beta(alpha, beta).

    Alpha counts accepted tokens, and beta the first rejected token of each draft, unlike in the paper.
    """

    def __init__(self, options: BetaOptions, seed: int) -> None:
        self.alpha, self.beta = options.alpha0, options.beta0
        self._generator = np.random.default_rng([seed, _BETA_STREAM])

    def more(self, level: int, path: float | None, token: float | None) -> bool:  # noqa: ARG002  # as `Rule` has it
        theta = self._generator.beta(self.alpha, self.beta)
        return bool(self._generator.random() < theta)

    def observe(self, outcome: Outcome) -> None:
        self.alpha += outcome.accepted
        self.beta += outcome.rejected


@dataclass(frozen=True, slots=True)
class CaliOptions:
    """Options of `cali_ts`; the paper gives no values, docs/explanation/control.md says how the defaults were found."""

    sigma_model: float = 0.05  # standard deviation of the error of the drafter's estimate (sigma_M)
    sigma_sample: float = 2.0  # standard deviation of one round's acceptance rate (sigma_S)
    theta0: float = 0.5  # prior acceptance rate, with the weight of one token

    def __post_init__(self) -> None:
        check_range(self, "sigma_model", "sigma_sample", above=0, most=1000)
        check_range(self, "theta0", least=0, most=1)


class CaliRule(Rule):
    """Goes on with probability theta, drawn around a mean of the drafter's estimate and the acceptance rate so far.

    The rate is accepted / tried, the first rejected token included, and replaces a missing estimate.
    """

    def __init__(self, options: CaliOptions, seed: int) -> None:
        self._model, self._sample = options.sigma_model**2, options.sigma_sample**2
        self._generator = np.random.default_rng([seed, _CALI_STREAM])
        self._accepted, self._tried = options.theta0, 1.0
        self.verifications = 0  # n of the paper

    @property
    def theta(self) -> float:
        """The acceptance rate so far."""
        return self._accepted / self._tried

    def posterior(self, predicted: float) -> tuple[float, float]:
        """Return the mean and variance of theta, given the drafter's estimate (equations 6 and 7)."""
        counted = self.verifications * self._model
        whole = self._sample + counted
        return (self._sample * predicted + counted * self.theta) / whole, self._model * self._sample / whole

    def more(self, level: int, path: float | None, token: float | None) -> bool:  # noqa: ARG002  # as `Rule` has it
        mean, variance = self.posterior(self.theta if token is None else token)
        theta = float(np.clip(self._generator.normal(mean, math.sqrt(variance)), 0.0, 1.0))
        return bool(self._generator.random() < theta)

    def observe(self, outcome: Outcome) -> None:
        self._accepted += outcome.accepted
        self._tried += outcome.accepted + outcome.rejected
        self.verifications += outcome.nodes > 0
