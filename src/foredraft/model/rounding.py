"""How exact a dtype is: in which of them texts are compared token for token, and what rounding does to scores.

Knows dtypes by the names that `--dtype` takes. Does not know what is compared, or why.
"""

from typing import Any

import torch

EXACT = ("float32", "float64")
"""Dtypes in which a drafted text is plain decoding's token for token; in others, near-ties may flip."""

_TOLERANCE = {"float32": 1e-3, "float64": 1e-6}  # other dtypes: 5e-2


def dtype_name(model: Any) -> str:
    """Return the name of the dtype that a model was loaded in, as `--dtype` takes it."""
    return str(model.dtype).removeprefix("torch.")


def relative_error(scores: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of what was expected."""
    return float((scores - expected).norm() / expected.norm().clamp_min(1e-30))


def within_rounding(error: float, model: Any) -> bool:
    """Say whether so large a relative error is what two orders of calculation give in a model's dtype; NaN is not."""
    return error < _TOLERANCE.get(dtype_name(model), 5e-2)
