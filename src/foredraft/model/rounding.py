"""Precision of dtypes: in which ones texts are compared token for token, and how much rounding may change logits.

Dtypes are named as `--dtype` takes them. Does not depend on what is compared.
"""

from typing import Any

import torch

EXACT = ("float32", "float64")  # in these a drafted text equals plain decoding; in others, near-ties may flip
_TOLERANCE = {"float32": 1e-3, "float64": 1e-6}  # relative error; chosen
_COARSE = 0.1  # for other dtypes: other kernels differ by 0.07 on 32 random layers in bfloat16; a wrong mask by 1


def dtype_name(model: Any) -> str:
    """Return the dtype that a model was loaded in, as `--dtype` names it."""
    return str(model.dtype).removeprefix("torch.")


def error_beyond_rounding(scores: torch.Tensor, expected: torch.Tensor, model: Any) -> float:
    """Return the relative error of logits, as a norm; 0 if rounding in the model's dtype explains it. It may be NaN."""
    expected = expected.float()
    error = float((scores.float() - expected).norm() / expected.norm().clamp_min(1e-30))
    return 0.0 if error < _TOLERANCE.get(dtype_name(model), _COARSE) else error
