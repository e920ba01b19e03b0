"""The drafter that drafts nothing: plain decoding, the baseline of every comparison."""

from typing import ClassVar

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, Needs, SequenceView
from foredraft.drafters import Resources, Stateless
from foredraft.options import NoOptions


class NoDrafter(Stateless):
    """Never drafts."""

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "Plain decoding: one token per forward pass; the baseline."
    Options = NoOptions
    needs = Needs(every_step=False)
    source_names = ("none",)

    @classmethod
    def create(cls, options: NoOptions, resources: Resources) -> "NoDrafter":  # noqa: ARG003  # the family's signature
        return cls()

    def propose(self, view: SequenceView, budget: Budget) -> Draft:  # noqa: ARG002  # the family's signature
        return EMPTY_DRAFT
