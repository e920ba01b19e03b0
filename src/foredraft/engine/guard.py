"""A drafter that cannot end a text: once it raises, that is said, and the sequence goes on without drafts.

Knows the drafter's protocol. What it does not catch: drafts that are no trees, which the step refuses, and interrupts,
also where compiled code hands them on as another error.
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
        """Begin drafting for one sequence; what goes wrong here is the caller's to see."""
        return GuardedDrafting(self._drafter.open(context), self._drafter.name)


class GuardedDrafting:
    """One sequence's drafting, until it raises."""

    def __init__(self, drafting: Drafting, name: str) -> None:
        self._drafting = drafting
        self._name = name
        self._failed = False

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Return what the drafter proposes; nothing once it has failed."""
        if self._failed:
            return EMPTY_DRAFT
        try:
            return self._drafting.propose(view, budget)
        except Exception as error:  # noqa: BLE001  # whatever it is, the text can be written without drafts
            self._fail(error)
            return EMPTY_DRAFT

    def observe(self, verdict: Verdict) -> None:
        """Let the drafter learn, unless it has failed."""
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
            "without drafts; it is the same text.",
            ForedraftWarning,
            stacklevel=2,
        )


def _is_interrupt(error: BaseException | None) -> bool:
    """Say whether an error was raised from an interrupt: numba's compiled code hands Ctrl-C on as a SystemError."""
    return error is not None and (
        isinstance(error, KeyboardInterrupt) or _is_interrupt(error.__cause__) or _is_interrupt(error.__context__)
    )
