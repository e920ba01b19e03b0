"""Decode with a drafter on the toy target, or on the drafter's own, and record its drafts.

Depends on the engine, not on what the record should contain or on any particular drafter.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from foredraft.contracts import (
    EMPTY_DRAFT,
    Budget,
    Control,
    Draft,
    DraftContext,
    Drafter,
    Drafting,
    SequenceView,
    Target,
    TokenIds,
    Verdict,
    Verification,
)
from foredraft.control import FixedControl
from foredraft.engine.single import decode, prefill
from foredraft.engine.state import SequenceState
from foredraft.engine.step import check_draft
from foredraft.sampling import SamplingOptions
from foredraft.testing.toy import ToyTarget

NEW_TOKENS = 48
_NODES = 12  # budget of a step without a control


@dataclasses.dataclass(slots=True)
class Step:
    """One call of a drafter: the ids, int64[n], and budget given, its draft, and the verdict."""

    ids: TokenIds
    budget: Budget
    draft: Draft
    verdict: Verdict | None = None


class Recorder:
    """A drafter that records the calls of another one.

    Args:
        drafter: the other.
        budget: an upper limit on the control's budget; None for none.
        every_step: whether it is called in steps without a budget.

    Attributes:
        steps: the calls for the sequence opened last.
    """

    name: ClassVar[str] = "recorder"

    def __init__(self, drafter: Drafter, budget: Budget | None = None, *, every_step: bool = True) -> None:
        self._drafter, self._budget = drafter, budget
        self._drafting: Drafting
        self.source_names = drafter.source_names
        self.needs = dataclasses.replace(drafter.needs, every_step=every_step)
        self.steps: list[Step] = []

    def open(self, context: DraftContext) -> "Recorder":
        """Open the other for a sequence; only one is open at a time."""
        self._drafting, self._vocabulary, self.steps = self._drafter.open(context), context.vocabulary, []
        return self

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Return the other's draft, or an empty one if the engine would reject it."""
        if self._budget is not None:
            budget = Budget(min(budget.nodes, self._budget.nodes), min(budget.depth, self._budget.depth))
        draft = self._drafting.propose(view, budget)
        self.steps.append(Step(view.ids.copy(), budget, draft))
        try:
            check_draft(draft, self._vocabulary, len(self.source_names))
        except ValueError:  # the check that reads the step reports it
            return EMPTY_DRAFT
        return draft

    def observe(self, verdict: Verdict) -> None:
        """Record the verdict, and pass it on."""
        self.steps[-1].verdict = verdict
        self._drafting.observe(verdict)

    def close(self) -> None:
        """Close the other."""
        self._drafting.close()


def target_of(drafter: Drafter) -> Target:
    """Return the target whose layers a drafter drafts with, or the toy."""
    return drafter.needs.target or ToyTarget()


def begun(
    target: Target, prompt: TokenIds, options: SamplingOptions, verification: Verification = "matched",
    new_tokens: int = NEW_TOKENS,
) -> tuple[SequenceState, DraftContext]:  # fmt: skip
    """Return a prefilled sequence of `target`, and a drafter's context for it."""
    seq = SequenceState(prompt, target.new_cache(), options, max_new_tokens=new_tokens, verification=verification)
    prefill(seq, target)
    settings = {**dataclasses.asdict(options), "verification": verification}
    return seq, DraftContext(target.vocabulary, options.seed, settings=settings, cache=seq.cache)


def steps_of(
    drafter: Drafter, target: Target, prompt: TokenIds, options: SamplingOptions,
    verification: Verification = "matched", new_tokens: int = NEW_TOKENS, control: Control | None = None,
) -> Iterator[SequenceState]:  # fmt: skip
    """Decode after `prompt` with `drafter`; yield the sequence after each step."""
    seq, context = begun(target, prompt, options, verification, new_tokens)
    for _ in decode(seq, drafter, control or FixedControl(_NODES), target, context):
        yield seq
