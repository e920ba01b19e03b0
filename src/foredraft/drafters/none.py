"""The drafter that drafts nothing: plain decoding, the baseline of every comparison."""

from collections.abc import Sequence
from typing import ClassVar

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, Verdict
from foredraft.drafters import Resources
from foredraft.options import NoOptions


class NoDrafter:
    """Never drafts. It has no state, so it is every sequence's drafting itself."""

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "Plain decoding: one token per forward pass; the baseline."
    Options = NoOptions
    needs = Needs(every_step=False)
    source_names: Sequence[str] = ("none",)

    @classmethod
    def create(cls, options: NoOptions, resources: Resources) -> "NoDrafter":  # noqa: ARG003  # the family's signature
        return cls()

    def open(self, context: DraftContext) -> "NoDrafter":  # noqa: ARG002  # the family's signature
        return self

    def propose(self, view: SequenceView, budget: Budget) -> Draft:  # noqa: ARG002  # the family's signature
        return EMPTY_DRAFT

    def observe(self, verdict: Verdict) -> None:
        """Learn nothing."""

    def close(self) -> None:
        """Nothing to drop."""
