"""Training of draft models and heads: traces of the target's texts, tasks that learn from them, and one training loop.

Does not depend on drafters or engines.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.errors import UsageError

Numbers = npt.NDArray[np.int64]
"""Window numbers, int64."""
Tell = Callable[[str, int, int, int, str], None]
"""Reports a phase's progress: its name, done, total, a count, and the count's unit."""


def check_numbers(options: Any, counts: Sequence[str], above_0: Sequence[str], shares: Sequence[str]) -> None:
    """Check that options are counts, finite numbers above 0, or shares; UsageError names the first that is not."""
    rules: tuple[tuple[Sequence[str], Callable[[float], bool], str], ...] = (
        (counts, lambda value: value >= 1, "at least 1"),
        (above_0, lambda value: 0 < value < math.inf, "above 0"),
        (shares, lambda value: 0 <= value <= 1, "0 to 1"),
    )
    for names, is_valid, wanted in rules:
        for name in names:
            if not is_valid(getattr(options, name)):
                raise UsageError(f"{name} is {getattr(options, name)}; it must be {wanted}.")
