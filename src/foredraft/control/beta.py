"""Beta-TS: Thompson sampling of whether to draft another token, from how often drafted tokens were accepted.

Liu et al., "Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling Control Mechanism"
(EESD, ACL Findings 2024), appendix A and algorithm 2, with plain counts. Knows what was accepted; neither what the
drafter believes nor what anything costs.
"""

from dataclasses import dataclass

import numpy as np

from foredraft.control.stopping import Outcome, check_cap
from foredraft.errors import UsageError

_STREAM = 0xBE7A  # so that a drafter that draws with the same seed draws other numbers
_MOST_EVIDENCE = 1e6


@dataclass(frozen=True, slots=True)
class BetaOptions:
    """Options of `beta_ts`.

    Attributes:
        alpha0: accepted tokens before the first one, as it were; the paper does not say how many.
        beta0: likewise, rejected tokens.
        cap: levels drafted a step at most; None for as many as `num_speculative_tokens` allows.
    """

    alpha0: float = 1.0
    beta0: float = 1.0
    cap: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no Beta distribution, and a cap that allows nothing.

        Raises:
            UsageError: naming the value.
        """
        for name, evidence in (("alpha0", self.alpha0), ("beta0", self.beta0)):
            if not 0 < evidence <= _MOST_EVIDENCE:
                raise UsageError(f"{name} is {evidence}; it must be above 0 and at most {_MOST_EVIDENCE:.0f}.")
        check_cap(self.cap)


class BetaRule:
    """Goes on with a chance drawn from what is known of the acceptance rate.

    After each level theta ~ Beta(alpha, beta) and, with probability theta, another level. After verification the
    accepted tokens are successes and the first rejected one is a failure; tokens behind it were never tried. The
    paper's r = |Q_v| - 1 and n = min(|Q_v| + 1, |Q_d|), read with Q_v the accepted tokens as it says, would subtract a
    success where nothing is accepted and add a failure where everything is: alpha turns negative and drafting dies.
    Plain counts never fall, so both parameters stay positive.

    As theta is drawn anew for each token, a token follows with the posterior's mean, alpha / (alpha + beta).

    Args:
        options: the prior and the cap.
        seed: decides all draws, together with what is accepted.

    Attributes:
        alpha: `alpha0` and the accepted tokens.
        beta: `beta0` and the rejected ones.
    """

    def __init__(self, options: BetaOptions, seed: int) -> None:
        self.alpha = options.alpha0
        self.beta = options.beta0
        self._cap = options.cap
        self._generator = np.random.default_rng([seed, _STREAM])

    def begins(self, levels: int) -> bool:  # noqa: ARG002  # the family's signature
        """Always draft a first level, as algorithm 2 does."""
        return True

    def more(self, level: int, chance: float | None) -> bool:  # noqa: ARG002  # the family's signature
        """Draw theta, then whether to go on; nothing is drawn at the cap."""
        if self._cap is not None and level >= self._cap:
            return False
        theta = self._generator.beta(self.alpha, self.beta)
        return bool(self._generator.random() < theta)

    def observe(self, outcome: Outcome) -> None:
        """Count successes, and the first rejection as one failure."""
        self.alpha += outcome.accepted
        self.beta += outcome.rejected
