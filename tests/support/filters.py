"""Filters, and rows of scores that none can choose from."""

import numpy as np
import pytest

FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.5, "top_p": 0.8},
    {"temperature": 2.5, "top_k": 20, "top_p": 0.7, "min_p": 0.1},
    {"temperature": 0.05, "top_p": 0.99},
]
WITH_FILTERS = pytest.mark.parametrize("options", FILTERS, ids=lambda options: "-".join(map(str, options)) or "none")
UNUSABLE = {
    "NaN": [0, np.nan, 1, 0], "infinite": [0, np.inf, 1, 0], "nothing left": [-np.inf] * 4, "all NaN": [np.nan] * 4,
}  # fmt: skip
