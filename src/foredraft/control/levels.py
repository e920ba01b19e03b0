"""A control that drafts level by level: after each level, a rule decides whether to draft the next one.

Drafters that draft level by level ask through `Budget.more`. For drafters that return whole drafts, the rule is asked
afterwards and the draft is cut at the first refusal. Does not depend on any rule, drafter or cost.
"""

from dataclasses import dataclass

import numpy as np

from foredraft.contracts import NO_BUDGET, Budget, Draft, Verdict
from foredraft.control.fixed import cut
from foredraft.graph.tree import depths


@dataclass(frozen=True, slots=True)
class Outcome:
    """One step's draft, what was accepted of it, and the seconds of the step."""

    nodes: int  # verified; 0 for a plain step
    levels: int  # of the verified draft
    accepted: int  # tokens, one per level from the first
    rejected: bool  # the accepted path had drafted children and the target chose none of them
    ended: bool  # the text ended within the draft, so the fate of deeper levels is unknown
    chances: tuple[float | None, ...]  # per level, the drafter's probability that its best path is accepted
    asked: int  # levels after which the drafter asked; 0 if it returned a whole draft
    forward_seconds: float = 0.0  # of the target's pass
    other_seconds: float = 0.0  # of the rest of the step
    draft_seconds: float = 0.0  # of drafting, included in `other_seconds`


class Rule:
    """Decides when to stop drafting. It sees only levels already drafted, never the token it decides about."""

    def begins(self, levels: int) -> bool:  # noqa: ARG002  # for rules that use costs
        """Return whether to draft in this step, where at most `levels` levels, at least 1, can be used."""
        return True

    def more(self, level: int, path: float | None, token: float | None) -> bool:  # noqa: ARG002  # for other rules
        """Return whether to draft another level after `level`, 1 for the first.

        `path` is the drafter's probability that the level's best path is accepted, and `token` that of its last token
        given the tokens before it; None without an estimate.
        """
        return True

    def observe(self, outcome: Outcome) -> None:
        """Learn from a step."""


class LevelControl:
    """As many levels as a rule allows. The rule is asked once per level; a refusal holds for the rest of the step."""

    def __init__(self, rule: Rule, most_nodes: int, most_levels: int | None = None) -> None:
        self._rule, self._most_nodes, self._most_levels = rule, most_nodes, most_levels
        self._chances: list[float | None] = []  # of the levels decided in this step
        self._stopped = False
        self._asked = 0  # levels decided for the drafter

    def budget(self, depth: int) -> Budget:
        """Return the limits and the callback for level-wise drafters; no budget if the rule does not begin."""
        self._chances, self._stopped, self._asked = [], False, 0
        depth = depth if self._most_levels is None else min(depth, self._most_levels)
        levels = min(depth, self._most_nodes)
        if levels <= 0 or not self._rule.begins(levels):
            return NO_BUDGET
        return Budget(self._most_nodes, depth, self._answer_drafter)

    def trim(self, draft: Draft, budget: Budget) -> Draft:
        draft = cut(draft, budget)
        chances = level_chances(draft)
        if draft.q is not None:
            # a drawn token must not decide whether it is kept, and a merged graph may repeat a token of this level
            # further down: the rule gets no estimates
            chances = [None] * len(chances)
        while not self._stopped and len(self._chances) + 1 < len(chances):
            self._answer(chances[len(self._chances)])
        return cut(draft, Budget(budget.nodes, len(self._chances))) if self._stopped else draft

    def observe(self, verdict: Verdict, forward: float, other: float, drafting: float = 0.0) -> None:
        guessed, path = level_chances(verdict.draft), verdict.path
        chances = (self._chances + guessed[len(self._chances) :])[: len(guessed)]
        ended = len(verdict.tokens) == len(path)
        rejected = not ended and bool((verdict.draft.parents == verdict.last_row - 1).any())
        counts = (len(verdict.draft), len(guessed), len(path), rejected, ended)
        self._rule.observe(Outcome(*counts, tuple(chances), self._asked, forward, other, drafting))

    def _answer_drafter(self, chance: float | None) -> bool:
        self._asked += not self._stopped
        return self._answer(chance)

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
        self._stopped = not self._rule.more(len(self._chances), chance, token)
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
