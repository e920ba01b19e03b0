"""Controls that draft a fixed number of nodes, or level by level: after each level, a rule decides about the next one.

Drafters that draft level by level ask through `Budget.more`. For drafters that return whole drafts, the rule is asked
afterwards and the draft is cut at the first refusal.

Rules of EESD (Liu et al., "Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling
Control Mechanism", ACL Findings 2024): Beta-TS is appendix A, Cali-TS appendix B, both with plain counts. Of Self-SD
(Zhang et al., "Draft & Verify", ACL 2024): the exit threshold. Does not depend on costs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from foredraft.contracts import NO_BUDGET, Budget, Draft, Verdict
from foredraft.control.payoff import cut
from foredraft.errors import UsageError
from foredraft.graph.tree import ROOT, depths
from foredraft.options import check_range

_BETA_STREAM, _CALI_STREAM = 0xBE7A, 0xCA11  # arbitrary: keep draws with the same seed independent
_CHANGE, _KEEP_RATE, _KEEP_THRESHOLD = 0.01, 0.5, 0.9  # epsilon, beta 1 and beta 2 of Self-SD's code


class FixedControl:
    """The same number of nodes in every step; 0 never drafts."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def budget(self, depth: int, _lanes: int = 1) -> Budget:
        return Budget(self._nodes, depth) if depth > 0 and self._nodes > 0 else NO_BUDGET

    def trim(self, drafts: Sequence[Draft], budgets: Sequence[Budget], _other_rows: int = 0) -> list[Draft]:
        return [cut(*each) for each in zip(drafts, budgets, strict=True)]

    def observe(self, _verdicts: Sequence[Verdict], *_costs: float) -> None:
        """Learn nothing."""


class Outcome(NamedTuple):
    """One step's draft, and what was accepted of it."""

    levels: int  # of the verified draft; 0 for a plain step
    accepted: int  # tokens, one per level from the first
    rejected: bool  # the accepted path had drafted children and the target chose none of them


class Rule(Protocol):
    """Decides when to stop drafting. It sees only levels already drafted, never the token it decides about."""

    def more(self, token: float | None) -> bool:
        """Return whether to draft another level after one.

        `token` is the drafter's probability that the last token of the level's best path is accepted given those before
        it; None without an estimate.
        """

    def observe(self, outcome: Outcome) -> None:
        """Learn from a step."""


class LevelControl:
    """As many levels of one text's draft as a rule allows.

    The rule is asked once per level; a refusal holds for the rest of the step.
    """

    def __init__(self, rule: Rule, most_nodes: int, most_levels: int | None = None) -> None:
        self._rule, self._most_nodes, self._most_levels = rule, most_nodes, most_levels
        self._chances: list[float | None] = []  # of the levels decided in this step
        self._stopped = False

    def budget(self, depth: int, _lanes: int = 1) -> Budget:
        """Return the limits and the callback for level-wise drafters."""
        self._chances, self._stopped = [], False
        depth = depth if self._most_levels is None else min(depth, self._most_levels)
        if min(depth, self._most_nodes) <= 0:
            return NO_BUDGET
        return Budget(self._most_nodes, depth, self._answer)

    def trim(self, drafts: Sequence[Draft], budgets: Sequence[Budget], _other_rows: int = 0) -> list[Draft]:
        (draft,), (budget,) = drafts, budgets
        draft = cut(draft, budget)
        chances = level_chances(draft)
        while not self._stopped and len(self._chances) + 1 < len(chances):
            self._answer(chances[len(self._chances)])
        return [cut(draft, Budget(budget.nodes, len(self._chances))) if self._stopped else draft]

    def observe(self, verdicts: Sequence[Verdict], *_costs: float) -> None:
        """Count accepted levels, and whether one was rejected, unless the text ended before it."""
        (verdict,) = verdicts
        draft, accepted = verdict.draft, len(verdict.path)
        last = verdict.path[-1] if accepted else ROOT
        rejected = len(verdict.tokens) > accepted and bool((draft.parents == last).any())
        self._rule.observe(Outcome(int(depths(draft.parents).max(initial=0)), accepted, rejected))

    def _answer(self, chance: float | None) -> bool:
        if self._stopped:
            return False
        token = None
        if chance is not None:
            if not -np.inf < chance < np.inf:
                raise ValueError(f"The drafter's estimate is {chance}; it must be a number from 0 to 1, or None.")
            chance = float(min(max(chance, 0.0), 1.0))  # rounding lets products exceed 1
            above = self._chances[-1] if self._chances else 1.0
            token = chance if above is None else min(chance / above, 1.0) if above > 0 else 0.0
        self._chances.append(chance)
        self._stopped = not self._rule.more(token)
        return not self._stopped


def level_chances(draft: Draft) -> list[float | None]:
    """Return the best score of each level, clipped to 0 to 1, from the first level down; None without scores."""
    if len(draft) == 0:
        return []
    depth = depths(draft.parents)
    deepest = int(depth.max())
    if draft.score is None:
        return [None] * deepest
    best = np.zeros(deepest + 1)
    np.maximum.at(best, depth, np.clip(draft.score, 0.0, 1.0))
    return best[1:].tolist()  # type: ignore[no-any-return]  # numpy's `tolist` is Any


# --- rules


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


class ExitThresholdRule:
    """Stops after a token less probable than the threshold, which moves to reach an acceptance rate.

    As in the paper's code, it does not fall after a draft that the cap ended. Without estimates only the cap stops.
    """

    def __init__(self, options: ExitThresholdOptions, _seed: int = 0) -> None:
        self.threshold = options.threshold
        self._options, self._rate = options, 0.0

    def more(self, token: float | None) -> bool:  # as `Rule` has it
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


class BetaRule:
    """Goes on with probability theta, drawn after each level from Beta(alpha, beta).

    Alpha counts accepted tokens, and beta the first rejected token of each draft, unlike in the paper.
    """

    def __init__(self, options: BetaOptions, seed: int) -> None:
        self.alpha, self.beta = options.alpha0, options.beta0
        self._generator = np.random.default_rng([seed, _BETA_STREAM])

    def more(self, token: float | None) -> bool:  # noqa: ARG002  # as `Rule` has it
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
        check_range(self, "sigma_model", "sigma_sample", least=1e-9, most=1000)  # whose squares are not 0
        check_range(self, "theta0", least=0, most=1)


class CaliRule:
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

    def more(self, token: float | None) -> bool:  # as `Rule` has it
        mean, variance = self.posterior(self.theta if token is None else token)
        theta = float(np.clip(self._generator.normal(mean, math.sqrt(variance)), 0.0, 1.0))
        return bool(self._generator.random() < theta)

    def observe(self, outcome: Outcome) -> None:
        self._accepted += outcome.accepted
        self._tried += outcome.accepted + outcome.rejected
        self.verifications += outcome.levels > 0
