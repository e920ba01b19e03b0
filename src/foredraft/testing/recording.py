"""Texts written with a drafter on the toy target, or on its own, and a record of what was drafted on the way.

Knows the engine; does not know what the record should look like, nor any particular drafter.
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
_NODES = 12


@dataclasses.dataclass(slots=True)
class Step:
    """What a drafter was asked in a step: after ids, int64[n]; what it proposed; and what became of it."""

    ids: TokenIds
    budget: Budget
    draft: Draft
    verdict: Verdict | None = None


class Recorder:
    """A drafter that notes what another one is asked and proposes.

    Args:
        drafter: the other.
        budget: what it is asked for at most, whatever the control says; None for what the control says.
        every_step: whether it is shown steps without a budget.

    Attributes:
        steps: those in which it was asked, of the sequence that was opened last.
    """

    name: ClassVar[str] = "recorder"

    def __init__(self, drafter: Drafter, budget: Budget | None = None, *, every_step: bool = True) -> None:
        self._drafter, self._budget = drafter, budget
        self._drafting: Drafting
        self.source_names = drafter.source_names
        self.needs = dataclasses.replace(drafter.needs, every_step=every_step)
        self.steps: list[Step] = []

    def open(self, context: DraftContext) -> "Recorder":
        """Open the other for a sequence; there is one at a time."""
        self._drafting, self._vocabulary, self.steps = self._drafter.open(context), context.vocabulary, []
        return self

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Return what the other proposes; nothing where the engine would refuse it."""
        if self._budget is not None:
            budget = Budget(min(budget.nodes, self._budget.nodes), min(budget.depth, self._budget.depth))
        draft = self._drafting.propose(view, budget)
        self.steps.append(Step(view.ids.copy(), budget, draft))
        try:
            check_draft(draft, self._vocabulary, len(self.source_names))
        except ValueError:  # the law that it breaks is named by the check that reads the step
            return EMPTY_DRAFT
        return draft

    def observe(self, verdict: Verdict) -> None:
        """Note and hand on the verdict."""
        self.steps[-1].verdict = verdict
        self._drafting.observe(verdict)

    def close(self) -> None:
        """Close the other."""
        self._drafting.close()


def target_of(drafter: Drafter) -> Target:
    """Return the target that a drafter drafts with the layers of, or the toy."""
    return drafter.needs.target or ToyTarget()


def begun(
    target: Target, prompt: TokenIds, options: SamplingOptions, verification: Verification = "matched",
    new_tokens: int = NEW_TOKENS,
) -> tuple[SequenceState, DraftContext]:  # fmt: skip
    """Return a prefilled sequence of `target`, and what a drafter is told of it."""
    seq = SequenceState(prompt, target.new_cache(), options, max_new_tokens=new_tokens, verification=verification)
    prefill(seq, target)
    settings = {**dataclasses.asdict(options), "verification": verification}
    return seq, DraftContext(target.vocabulary, options.seed, settings=settings, cache=seq.cache)


def steps_of(
    drafter: Drafter, target: Target, prompt: TokenIds, options: SamplingOptions,
    verification: Verification = "matched", new_tokens: int = NEW_TOKENS, control: Control | None = None,
) -> Iterator[SequenceState]:  # fmt: skip
    """Write after `prompt` with `drafter`; yield the sequence after each step."""
    seq, context = begun(target, prompt, options, verification, new_tokens)
    for _ in decode(seq, drafter, control or FixedControl(_NODES), target, context):
        yield seq
