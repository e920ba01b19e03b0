"""The control that takes drafts whole or not at all: while drafted steps write more tokens a second than plain ones.

For drafts whose nodes cannot be weighed one by one, because some of them pay in later steps. Knows seconds and tokens;
not the drafter, and no scores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from foredraft.contracts import Budget, Draft, Verdict
from foredraft.control.cutting import cut
from foredraft.control.trial import Trial
from foredraft.errors import UsageError


@dataclass(frozen=True, slots=True)
class WholeOptions:
    """Options of `whole`.

    Attributes:
        warm_up: drafted steps that a drafter is given to learn in, unless they are slower than plain ones by more than
            half as many tokens again would make up for.
    """

    warm_up: int = 24

    def __post_init__(self) -> None:
        """Refuse a comparison with nothing.

        Raises:
            UsageError: a warm-up outside 1 to 10000.
        """
        if not 1 <= self.warm_up <= 10_000:
            raise UsageError(f"warm_up is {self.warm_up}; it must be 1 to 10000.")


class WholeControl:
    """The whole draft, or none.

    Args:
        options: the warm-up.
        most_nodes: never more than these are drafted.
        clock: seconds.
    """

    def __init__(self, options: WholeOptions, most_nodes: int, clock: Callable[[], float] = perf_counter) -> None:
        self._trial = Trial(clock, options.warm_up)
        self._most_nodes = most_nodes

    def budget(self, depth: int) -> Budget:
        """Return all that may be drafted, or nothing while plain steps are quicker."""
        drafts = self._trial.begins() and depth > 0
        return Budget(self._most_nodes if drafts else 0, max(depth, 0))

    def trim(self, draft: Draft, budget: Budget) -> Draft:
        """Cut a draft that goes beyond the budget."""
        return cut(draft, budget)

    def observe(
        self,
        verdict: Verdict,
        forward_seconds: float,  # noqa: ARG002  # the protocol's; the trial has a clock of its own
        other_seconds: float,  # noqa: ARG002  # likewise, the protocol's
        draft_seconds: float = 0.0,  # noqa: ARG002  # likewise, the protocol's
    ) -> None:
        """Count the step's tokens against its time."""
        self._trial.ends(len(verdict.tokens))
