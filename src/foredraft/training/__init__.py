"""Training what drafts: traces of the target's own texts, tasks that say what is learned of them, one loop."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
"""Numbers of windows."""
Tell = Callable[[str, int, int, int, str], None]
"""Is told how far a phase is: its name, done, total, and a count of what a unit names."""
