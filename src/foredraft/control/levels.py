"""Drafting that a rule stops: it is asked once after each drafted level whether to draft the next one.

A drafter that drafts level by level asks through `Budget.more`. For one that knows the whole draft at once, the same
questions are asked afterwards, and the draft is cut where the answer is no. Knows no rule, no drafter and no costs.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from foredraft.contracts import NO_BUDGET, Budget, Draft, Verdict
from foredraft.control.fixed import cut
from foredraft.graph.tree import depths


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step drafted, what became of it, and its seconds."""

    nodes: int  # verified; 0 for a plain step
    levels: int  # of the verified draft
    accepted: int  # tokens, one for each level from the first
    rejected: bool  # the target chose another token than those drafted after the accepted path; there were some
    ended: bool  # the text ended in the draft, so that nobody knows what would have become of deeper levels
    chances: tuple[float | None, ...]  # by level, the drafter's estimate that its best path is accepted, 0 to 1
    asked: int  # after how many levels the drafter asked; 0 where it knew the whole draft at once
    forward_seconds: float = 0.0  # of the target's pass
    other_seconds: float = 0.0  # of the rest of the step
    draft_seconds: float = 0.0  # of drafting, which is part of the rest


class Rule(Protocol):
    """Says when to stop drafting. It sees levels that are drafted already, never the token that it decides about."""

    def begins(self, levels: int) -> bool:  # noqa: ARG002  # for rules that go by costs
        """Say whether to draft in this step at all, where at most `levels` levels, at least 1, can be of use."""
        return True

    def more(self, level: int, path: float | None, token: float | None) -> bool:
        """Say whether to draft another level after `level`, 1 for the first.

        `path` is the drafter's estimate that the level's best path is accepted, 0 to 1, and `token` that its last
        token is where all before it are; None without one.
        """

    def observe(self, outcome: Outcome) -> None:
        """Learn from a step."""


class LevelControl:
    """As many levels as a rule wants.

    The rule answers once for each level: to the drafter, or to `trim` where the drafter did not ask. A refusal holds
    for the rest of the step.

    Args:
        rule: when to stop; of this sequence alone.
        most_nodes: never draft more.
        most_levels: nor deeper; None for no limit.
    """

    def __init__(self, rule: Rule, most_nodes: int, most_levels: int | None = None) -> None:
        self._rule, self._most_nodes, self._most_levels = rule, most_nodes, most_levels
        self._chances: list[float | None] = []  # of the levels that were asked about in this step
        self._stopped = False
        self._asked = 0  # how many of them the drafter asked about

    def budget(self, depth: int) -> Budget:
        """Return the most that may be drafted, and how to ask for less; nothing where the rule does not begin."""
        self._chances, self._stopped, self._asked = [], False, 0
        depth = depth if self._most_levels is None else min(depth, self._most_levels)
        levels = min(depth, self._most_nodes)
        if levels <= 0 or not self._rule.begins(levels):
            return NO_BUDGET
        return Budget(self._most_nodes, depth, self._answer_drafter)

    def trim(self, draft: Draft, budget: Budget) -> Draft:
        """Cut a draft to the budget, and to the levels that the rule wants of it."""
        draft = cut(draft, budget)
        chances = level_chances(draft)
        if draft.q is not None:
            # a merged graph may hold a token of this level again below, and a drawn token must not decide whether it
            # is kept: the rule is asked, and told nothing
            chances = [None] * len(chances)
        while not self._stopped and len(self._chances) + 1 < len(chances):
            self._answer(chances[len(self._chances)])
        return cut(draft, Budget(budget.nodes, len(self._chances))) if self._stopped else draft

    def observe(
        self, verdict: Verdict, forward_seconds: float, other_seconds: float, draft_seconds: float = 0.0
    ) -> None:
        """Tell the rule what became of the draft."""
        guessed = level_chances(verdict.draft)
        chances = (self._chances + guessed[len(self._chances) :])[: len(guessed)]
        ended = len(verdict.tokens) == len(verdict.path)
        last = verdict.path[-1] if verdict.path else -1
        rejected = not ended and bool((verdict.draft.parents == last).any())
        self._rule.observe(
            Outcome(
                len(verdict.draft), len(guessed), len(verdict.path), rejected, ended, tuple(chances), self._asked,
                forward_seconds, other_seconds, draft_seconds,
            )
        )  # fmt: skip

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
            chance = float(min(max(chance, 0.0), 1.0))  # products round to just above 1
            above = self._chances[-1] if self._chances else 1.0
            token = chance if above is None else min(chance / above, 1.0) if above > 0 else 0.0
        self._chances.append(chance)
        self._stopped = not self._rule.more(len(self._chances), chance, token)
        return not self._stopped


def level_chances(draft: Draft) -> list[float | None]:
    """Return the best score of each level, between 0 and 1, from the first level down; None where there are none."""
    if len(draft) == 0:
        return []
    depth = depths(draft.parents)
    deepest = int(depth.max())
    if draft.score is None:
        return [None] * deepest
    best = np.zeros(deepest + 1)
    np.maximum.at(best, depth, np.clip(draft.score, 0.0, 1.0))
    return best[1:].tolist()  # type: ignore[no-any-return]  # numpy's `tolist` is Any
