"""Whether two ways to compute the same scores differ by more than the order of the calculation explains."""

from typing import Any

import torch

from foredraft.model.quantized import dtype_name

_TOLERANCE = {"float32": 1e-3, "float64": 1e-6}


def relative_error(scores: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of what was expected."""
    return float((scores - expected).norm() / expected.norm().clamp_min(1e-30))


def within_rounding(error: float, model: Any) -> bool:
    """Say whether so large a relative error is what two orders of calculation give in a model's dtype; NaN is not."""
    return error < _TOLERANCE.get(dtype_name(model), 5e-2)
