"""The fixed control: the same number of nodes at every step.

Knows nothing of what drafts gave or cost.
"""

from dataclasses import dataclass

from foredraft.contracts import NO_BUDGET, Budget, Draft, Verdict
from foredraft.control.cutting import cut
from foredraft.errors import UsageError


@dataclass(frozen=True, slots=True)
class FixedOptions:
    """The fixed control has no options; `num_speculative_tokens` is its number."""


class FixedControl:
    """The same number of nodes at every step; `num_speculative_tokens` asks for it.

    Args:
        nodes: 0 never drafts.

    Raises:
        UsageError: a negative number.
    """

    def __init__(self, nodes: int) -> None:
        if nodes < 0:
            raise UsageError(f"num_speculative_tokens is {nodes}; use 0 to draft nothing, or a positive number.")
        self._nodes = nodes

    def budget(self, depth: int) -> Budget:
        """Return the fixed budget, as deep as drafted tokens can be of use."""
        return Budget(self._nodes, depth) if depth > 0 and self._nodes > 0 else NO_BUDGET

    def trim(self, draft: Draft, budget: Budget) -> Draft:
        """Cut a draft that exceeds the budget to its best prefix-closed part."""
        return cut(draft, budget)

    def observe(
        self, verdict: Verdict, forward_seconds: float, other_seconds: float, draft_seconds: float = 0.0
    ) -> None:
        """Learn nothing."""
