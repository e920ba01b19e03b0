"""What a compiled table of learned successors promises."""

import numpy as np

import naive.index_tables


def check_learned(arrays):
    """Assert it: each context where it is looked for, with successors that are tokens and weights that are numbers."""
    used = np.flatnonzero(arrays.keys != -1)
    assert 2 * len(used) <= len(arrays.keys)
    assert len(used) == arrays.clock[1]
    for slot in used.tolist():
        a, b = divmod(int(arrays.keys[slot]), 2**32)
        assert naive.index_tables.learned_row(arrays.keys, a - 1, b) == slot
        present = arrays.tokens[slot][arrays.weights[slot] > 0].tolist()
        assert min(present, default=0) >= 0
        assert len(set(present)) == len(present)
        assert np.isfinite(arrays.totals[slot])
