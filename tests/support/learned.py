"""What a compiled table of learned successors promises."""

import numpy as np

import naive.index_tables


def check_learned(arrays):
    """Assert it: each context where it is looked for, with successors that are tokens and weights that are numbers."""
    for slot in np.flatnonzero(arrays.keys).tolist():
        a, b = divmod(int(arrays.keys[slot]), 2**21)
        assert naive.index_tables.learned_row(arrays, a - 1, b - 1) == slot
        present = arrays.tokens[slot][arrays.weights[slot] > 0].tolist()
        assert min(present, default=0) >= 0
        assert len(set(present)) == len(present)
        assert np.isfinite(arrays.totals[slot])
