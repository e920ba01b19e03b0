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
    wrong = [(name, "at least 1") for name in counts if not getattr(options, name) >= 1]
    wrong += [(name, "above 0") for name in above_0 if not 0 < getattr(options, name) < math.inf]
    wrong += [(name, "0 to 1") for name in shares if not 0 <= getattr(options, name) <= 1]
    for name, wanted in wrong:
        raise UsageError(f"{name} is {getattr(options, name)}; it must be {wanted}.")
