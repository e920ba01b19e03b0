"""A wrapper that survives a failing drafter: it warns, and the sequence continues without drafts.

It does not catch drafts that are not trees, which the step refuses, nor interrupts, even if compiled code re-raises
them as another error. Does not depend on any drafter.
"""

import warnings
from typing import ClassVar

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Drafter, Drafting, SequenceView, Verdict
from foredraft.errors import ForedraftWarning, is_interrupt, told


class GuardedDrafter:
    """A drafter for one sequence, and its drafting until that raises; afterwards every draft is empty.

    An error while it is opened is raised.
    """

    name: ClassVar[str] = "guarded"

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.needs, self.source_names = drafter, drafter.needs, drafter.source_names
        self._failed = False

    def open(self, context: DraftContext) -> Drafting:
        self._drafting = self._drafter.open(context)
        return self

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
        except Exception as error:  # noqa: BLE001  # whatever it is, the text is written already
            self._fail(error, "its memory may stay in use")

    def _fail(self, error: Exception, then: str = "the rest of this text is decoded without drafts") -> None:
        if is_interrupt(error):
            raise KeyboardInterrupt from error
        if self._failed:
            return
        self._failed = True
        warnings.warn(
            f"The drafter {self._drafter.name} failed ({told(error)}), so {then}; the text is the same.",
            ForedraftWarning,
            stacklevel=3,
        )
