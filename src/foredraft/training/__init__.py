"""Training what drafts: traces of the target's own texts, tasks that say what is learned of them, one loop."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.errors import UsageError

Numbers = npt.NDArray[np.int64]
"""Numbers of windows."""
Tell = Callable[[str, int, int, int, str], None]
"""Is told how far a phase is: its name, done, total, and a count of what a unit names."""


def check_numbers(options: Any, counts: Sequence[str], above_0: Sequence[str], shares: Sequence[str]) -> None:
    """Refuse options of these names that are no counts, no finite numbers above 0, or no shares, naming the first."""
    rules: tuple[tuple[Sequence[str], Callable[[float], bool], str], ...] = (
        (counts, lambda value: value >= 1, "at least 1"),
        (above_0, lambda value: 0 < value < math.inf, "above 0"),
        (shares, lambda value: 0 <= value <= 1, "0 to 1"),
    )
    for names, holds, wanted in rules:
        for name in names:
            if not holds(getattr(options, name)):
                raise UsageError(f"{name} is {getattr(options, name)}; it must be {wanted}.")
