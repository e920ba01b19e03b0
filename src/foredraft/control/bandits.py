"""Thompson sampling of whether to draft another level: EESD's Beta-TS and Cali-TS.

Liu et al., "Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling Control Mechanism"
(EESD, ACL Findings 2024): Beta-TS is appendix A and algorithm 2, Cali-TS appendix B, equations 6 and 7 and algorithm 3,
both with plain counts. Knows the drafter's estimates and what was accepted; not what anything costs.
"""

import math
from dataclasses import dataclass

import numpy as np

from foredraft.control.levels import Outcome
from foredraft.errors import UsageError

_BETA_STREAM, _CALI_STREAM = 0xBE7A, 0xCA11  # a drafter that draws with the same seed draws other numbers


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
        """Refuse what is no Beta distribution.

        Raises:
            UsageError: naming the value.
        """
        for name, count in (("alpha0", self.alpha0), ("beta0", self.beta0)):
            if not 0 < count <= 1e6:
                raise UsageError(f"{name} is {count}; it must be above 0 and at most 1000000.")


class BetaRule:
    """Goes on with probability theta, drawn after each level from Beta(alpha, beta).

    The accepted tokens are successes and the first rejected one is a failure; tokens after it were never tried. The
    paper's counts, r = |Q_v| - 1 of min(|Q_v| + 1, |Q_d|), would subtract a success where nothing is accepted, so that
    alpha turns negative. As theta is drawn anew for each token, one follows with probability alpha / (alpha + beta).

    Args:
        options: the prior.
        seed: decides all draws, together with what is accepted.

    Attributes:
        alpha: `alpha0` and the accepted tokens.
        beta: `beta0` and the rejected ones.
    """

    def __init__(self, options: BetaOptions, seed: int) -> None:
        self.alpha, self.beta = options.alpha0, options.beta0
        self._generator = np.random.default_rng([seed, _BETA_STREAM])

    def begins(self, levels: int) -> bool:  # noqa: ARG002  # the protocol's signature
        """Always draft a first level, as algorithm 2 does."""
        return True

    def more(self, level: int, path: float | None, token: float | None) -> bool:  # noqa: ARG002  # as above
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
        """Refuse what is no deviation or share.

        Raises:
            UsageError: naming the value.
        """
        for name, sigma in (("sigma_model", self.sigma_model), ("sigma_sample", self.sigma_sample)):
            if not 0 < sigma <= 1e3:
                raise UsageError(f"{name} is {sigma}; it must be above 0 and at most 1000.")
        if not 0 <= self.theta0 <= 1:
            raise UsageError(f"theta0 is {self.theta0}; it must be 0 to 1.")


class CaliRule:
    """Goes on with probability theta, drawn about a mean between the drafter's estimate and the share accepted so far.

    After n verifications the mean is (sigma_S^2 theta_M + n sigma_M^2 theta) / (sigma_S^2 + n sigma_M^2) and the
    variance sigma_M^2 sigma_S^2 / (sigma_S^2 + n sigma_M^2), theta_M being the estimate of the last token: the more is
    counted, the less is predicted. Draws are clipped to 0 and 1. The paper's equation 8 counts accepted tokens over
    accepted ones and tends to 1 whatever is accepted; theta here is accepted tokens over tried ones, the first rejected
    one included. Without an estimate, theta stands for it.

    Args:
        options: the deviations and the start.
        seed: decides all draws, together with what is accepted.

    Attributes:
        verifications: how many drafts were verified (n).
    """

    def __init__(self, options: CaliOptions, seed: int) -> None:
        self._options = options
        self._generator = np.random.default_rng([seed, _CALI_STREAM])
        self._accepted, self._tried = options.theta0, 1.0
        self.verifications = 0

    @property
    def theta(self) -> float:
        """The share accepted so far."""
        return self._accepted / self._tried

    def begins(self, levels: int) -> bool:  # noqa: ARG002  # the protocol's signature
        """Always draft a first level, as algorithm 3 does."""
        return True

    def posterior(self, predicted: float) -> tuple[float, float]:
        """Return the mean and the variance where a level is predicted to be accepted so often (equations 6 and 7)."""
        model, sample = self._options.sigma_model**2, self._options.sigma_sample**2
        whole = sample + self.verifications * model
        return (sample * predicted + self.verifications * model * self.theta) / whole, model * sample / whole

    def more(self, level: int, path: float | None, token: float | None) -> bool:  # noqa: ARG002  # as above
        """Draw theta, then whether to go on."""
        mean, variance = self.posterior(self.theta if token is None else token)
        theta = float(np.clip(self._generator.normal(mean, math.sqrt(variance)), 0.0, 1.0))
        return bool(self._generator.random() < theta)

    def observe(self, outcome: Outcome) -> None:
        """Count accepted tokens, the first rejection as one failure, and the verification."""
        self._accepted += outcome.accepted
        self._tried += outcome.accepted + outcome.rejected
        self.verifications += outcome.nodes > 0
