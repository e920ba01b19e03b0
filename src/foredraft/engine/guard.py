"""A wrapper that survives a failing drafter: it warns, and the sequence continues without drafts.

It does not catch drafts that are not trees, which the step refuses, nor interrupts, even if compiled code re-raises
them as another error. Does not depend on any drafter.
"""

import warnings
from typing import ClassVar

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Drafter, Drafting, SequenceView, Verdict
from foredraft.errors import ForedraftWarning, told


class GuardedDrafter:
    """A drafter whose draftings are guarded."""

    name: ClassVar[str] = "guarded"

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.needs = drafter.needs
        self.source_names = drafter.source_names

    def open(self, context: DraftContext) -> "GuardedDrafting":
        """Begin drafting for one sequence; errors here are raised."""
        return GuardedDrafting(self._drafter.open(context), self._drafter.name)


class GuardedDrafting:
    """One sequence's drafting, until it raises."""

    def __init__(self, drafting: Drafting, name: str) -> None:
        self._drafting = drafting
        self._name = name
        self._failed = False

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Return the drafter's draft; an empty one after a failure."""
        if self._failed:
            return EMPTY_DRAFT
        try:
            return self._drafting.propose(view, budget)
        except Exception as error:  # noqa: BLE001  # whatever it is, decoding can continue without drafts
            self._fail(error)
            return EMPTY_DRAFT

    def observe(self, verdict: Verdict) -> None:
        """Pass the verdict to the drafter, unless it failed."""
        if self._failed:
            return
        try:
            self._drafting.observe(verdict)
        except Exception as error:  # noqa: BLE001  # as above
            self._fail(error)

    def close(self) -> None:
        """Close the drafter's drafting."""
        self._drafting.close()

    def _fail(self, error: Exception) -> None:
        if _is_interrupt(error):
            raise KeyboardInterrupt from error
        self._failed = True
        warnings.warn(
            f"The drafter {self._name} failed ({told(error)}), so the rest of this text is decoded "
            "without drafts; the text is the same.",
            ForedraftWarning,
            stacklevel=2,
        )


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether an interrupt caused an error: numba's compiled code turns Ctrl-C into a SystemError."""
    return error is not None and (
        isinstance(error, KeyboardInterrupt) or _is_interrupt(error.__cause__) or _is_interrupt(error.__context__)
    )
