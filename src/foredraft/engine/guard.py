"""A wrapper that survives a failing drafter: it warns, and the sequence continues without drafts.

It does not catch drafts that are not trees, which the step refuses, nor interrupts, even if compiled code re-raises
them as another error. Does not depend on any drafter.
"""

import warnings
from typing import ClassVar

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Drafter, Drafting, SequenceView, Verdict
from foredraft.errors import ForedraftWarning, is_interrupt, told


class GuardedDrafter:
    """A drafter whose draftings are guarded; an error while one is opened is raised."""

    name: ClassVar[str] = "guarded"

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.needs, self.source_names = drafter, drafter.needs, drafter.source_names

    def open(self, context: DraftContext) -> "GuardedDrafting":
        return GuardedDrafting(self._drafter.open(context), self._drafter.name)


class GuardedDrafting:
    """One sequence's drafting, until it raises; afterwards every draft is empty."""

    def __init__(self, drafting: Drafting, name: str) -> None:
        self._drafting, self._name, self._failed = drafting, name, False

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        try:
            return EMPTY_DRAFT if self._failed else self._drafting.propose(view, budget)
        except Exception as error:  # noqa: BLE001  # whatever it is, decoding can continue without drafts
            self._fail(error)
            return EMPTY_DRAFT

    def observe(self, verdict: Verdict) -> None:
        try:
            if not self._failed:
                self._drafting.observe(verdict)
        except Exception as error:  # noqa: BLE001  # as above
            self._fail(error)

    def close(self) -> None:
        try:
            self._drafting.close()
        except Exception as error:  # noqa: BLE001  # as above: the text is written
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if is_interrupt(error):
            raise KeyboardInterrupt from error
        if self._failed:
            return
        self._failed = True
        warnings.warn(
            f"The drafter {self._name} failed ({told(error)}), so the rest of this text is decoded without drafts; the "
            "text is the same.",
            ForedraftWarning,
            stacklevel=3,
        )
