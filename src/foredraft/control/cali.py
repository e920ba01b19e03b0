"""Cali-TS: Thompson sampling of whether to draft another token, from a prediction that plain counts calibrate.

Liu et al., "Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling Control Mechanism"
(EESD, ACL Findings 2024), appendix B, equations 6 and 7 and algorithm 3. Knows the drafter's estimate of each level
and what was accepted; not how the estimate is made, nor what anything costs.
"""

import math
from dataclasses import dataclass

import numpy as np

from foredraft.control.stopping import Outcome, check_cap
from foredraft.errors import UsageError

_STREAM = 0xCA11  # so that a drafter that draws with the same seed draws other numbers


@dataclass(frozen=True, slots=True)
class CaliOptions:
    """Options of `cali_ts`; the paper gives no values, docs/explanation/eesd.md says how the defaults were found.

    Attributes:
        sigma_model: standard deviation of the prediction's error (sigma_M).
        sigma_sample: that of one round's share of accepted tokens (sigma_S).
        theta0: share of drafted tokens taken to be accepted before the first one, worth one token.
        cap: levels drafted a step at most; None for as many as `num_speculative_tokens` allows.
    """

    sigma_model: float = 0.05
    sigma_sample: float = 2.0
    theta0: float = 0.5
    cap: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no deviation or share, and a cap that allows nothing.

        Raises:
            UsageError: naming the value.
        """
        for name, sigma in (("sigma_model", self.sigma_model), ("sigma_sample", self.sigma_sample)):
            if not 0 < sigma <= 1e3:
                raise UsageError(f"{name} is {sigma}; it must be above 0 and at most 1000.")
        if not 0 <= self.theta0 <= 1:
            raise UsageError(f"theta0 is {self.theta0}; it must be 0 to 1.")
        check_cap(self.cap)


class CaliRule:
    """Goes on with a chance drawn about a mean between the drafter's prediction and the share accepted so far.

    The prediction theta_M of a level is its chance over that of the level before. After n verifications the mean is
    (sigma_S^2 theta_M + n sigma_M^2 theta) / (sigma_S^2 + n sigma_M^2) and the variance
    sigma_M^2 sigma_S^2 / (sigma_S^2 + n sigma_M^2): the more is counted, the less is predicted. Draws are clipped to 0
    and 1. The paper's equation 8 counts accepted tokens over accepted ones and tends to 1 whatever is accepted; theta
    here is accepted tokens over tried ones, the first rejected one included. Without a prediction, theta stands for it.

    Args:
        options: the deviations and the start.
        seed: decides all draws, together with what is accepted.

    Attributes:
        theta: the share accepted so far.
        verifications: how many drafts were verified (n).
    """

    def __init__(self, options: CaliOptions, seed: int) -> None:
        self._options = options
        self._generator = np.random.default_rng([seed, _STREAM])
        self._accepted, self._tried = options.theta0, 1.0
        self._above = 1.0  # the chance of the level before
        self.verifications = 0

    @property
    def theta(self) -> float:
        """The share accepted so far."""
        return self._accepted / self._tried

    def begins(self, levels: int) -> bool:  # noqa: ARG002  # the family's signature
        """Always draft a first level, as algorithm 3 does."""
        self._above = 1.0
        return True

    def posterior(self, predicted: float) -> tuple[float, float]:
        """Return the mean and the variance where a level is predicted to be accepted so often (equations 6 and 7)."""
        model, sample = self._options.sigma_model**2, self._options.sigma_sample**2
        whole = sample + self.verifications * model
        return (sample * predicted + self.verifications * model * self.theta) / whole, model * sample / whole

    def more(self, level: int, chance: float | None) -> bool:
        """Draw theta, then whether to go on; nothing is drawn at the cap."""
        predicted = self.theta if chance is None else min(chance / self._above, 1.0) if self._above > 0 else 0.0
        self._above = self._above if chance is None else chance
        if self._options.cap is not None and level >= self._options.cap:
            return False
        mean, variance = self.posterior(predicted)
        theta = float(np.clip(self._generator.normal(mean, math.sqrt(variance)), 0.0, 1.0))
        return bool(self._generator.random() < theta)

    def observe(self, outcome: Outcome) -> None:
        """Count accepted tokens, the first rejection as one failure, and the verification."""
        self._accepted += outcome.accepted
        self._tried += outcome.accepted + outcome.rejected
        self.verifications += outcome.nodes > 0
