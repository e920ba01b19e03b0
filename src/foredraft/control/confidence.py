"""The confidence rule: draft on while the drafter believes in what it has.

Knows the drafter's own estimate; learns nothing.
"""

from dataclasses import dataclass

from foredraft.control.stopping import Outcome
from foredraft.errors import UsageError


@dataclass(frozen=True, slots=True)
class ConfidenceOptions:
    """Options of `confidence`.

    Attributes:
        threshold: no level is drafted behind one whose best path is accepted with a smaller chance, as the drafter
            estimates it; 0 never stops.
    """

    threshold: float = 0.3

    def __post_init__(self) -> None:
        """Refuse what is no probability.

        Raises:
            UsageError: a threshold outside 0 to 1.
        """
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"threshold is {self.threshold}; it must be 0 to 1.")


class ConfidenceRule:
    """Stops behind a level whose best path is less probable than the threshold.

    It is the whole path's chance that is compared, as every token of it must be accepted for the next to count;
    transformers' `assistant_confidence_threshold` compares the last token's alone. A drafter without estimates is never
    stopped.

    Args:
        options: the threshold.
    """

    def __init__(self, options: ConfidenceOptions) -> None:
        self._threshold = options.threshold

    def begins(self, levels: int) -> bool:  # noqa: ARG002  # the family's signature
        """Always draft: there is no confidence in what is not drafted."""
        return True

    def more(self, level: int, chance: float | None) -> bool:  # noqa: ARG002  # the family's signature
        """Compare the chance with the threshold."""
        return chance is None or chance >= self._threshold

    def observe(self, outcome: Outcome) -> None:
        """Learn nothing."""
