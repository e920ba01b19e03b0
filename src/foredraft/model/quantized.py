"""Linear layers in eight bits: integer weights by output channel, integer activations by row, exact integer products.

A processor without a matrix unit multiplies eight-bit integers four times as fast as floating-point numbers, so that
rows of a draft are cheap to verify; and a row comes out the same whatever rows stand beside it, so that texts are those
of plain decoding. Knows a model's layers. Does not know how it was loaded or who runs it.
"""

import warnings
from typing import Any

import torch
from torch import nn

from foredraft.errors import ForedraftWarning, UsageError
from foredraft.model.compiled.kernels import int8_product, multiply_int8
from foredraft.model.compiled.package import runs_on_cpu

INT8 = "int8"
"""The name, beside those of torch's dtypes, under which a model is loaded so."""

EXACT = ("float32", "float64", INT8)
"""Dtypes in which a drafted text is plain decoding's token for token; in others, near-ties may flip."""

_LARGEST = 127.0
_TOLERANCE = {"float32": 1e-3, "float64": 1e-6}  # other dtypes: 5e-2


class Int8Linear(nn.Module):
    """A linear layer whose weights and inputs are rounded to eight bits, symmetrically, and multiplied exactly.

    Each output channel of the weights has a scale, and each row of the inputs its own, found when it comes (as in
    LLM.int8, Dettmers et al. 2022, section 2.1, "row-wise", without its outliers). The result is in the inputs' dtype.

    Args:
        weight: floating point[out, in].
        bias: floating point[out], or None.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        weight = weight.detach().float()
        scale = _scale(weight)
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale[:, 0])
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return floating point[..., out] for [..., in]."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        scale = _scale(rows)
        multiply = multiply_int8 if torch.compiler.is_exporting() else int8_product
        product: torch.Tensor = multiply((rows / scale).round().to(torch.int8), self.weight)
        result = product.to(rows.dtype) * scale * self.scale
        if self.bias is not None:
            result = result + self.bias
        return result.to(rows.dtype).reshape(*hidden.shape[:-1], -1)


def quantize(model: Any) -> Any:
    """Round every linear layer of a model to eight bits, in place, and run the rest in float64.

    What is left, attention and norms, adds in an order that depends on the number of rows. In float32 that is enough to
    round some activation to the next integer in nearly every pass, which changes what is written as bfloat16 does; in
    float64 it is not (gemma2 and gptj, whose attention casts to float32 by itself, keep a small remainder of it).

    Args:
        model: a transformers model on the CPU.

    Raises:
        UsageError: a model that is not on the CPU, is quantised already, keeps experts' weights in blocks, or has no
            linear layers.
    """
    from transformers.pytorch_utils import Conv1D  # what GPT-2 calls its linear layers; the weight lies the other way

    if not runs_on_cpu(model):
        raise UsageError(f"The model is on {model.device}; {INT8} is for the CPU. Load it with --device cpu.")
    if getattr(model, "is_quantized", False) or is_int8(model):
        raise UsageError(f"The model is quantised already; leave the dtype {INT8} out.")
    if any(parameter.dim() == 3 for parameter in model.parameters()):
        raise UsageError(f"The model keeps its experts' weights in blocks, which {INT8} does not round; leave it out.")
    found = False
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is nn.Linear or type(layer) is Conv1D:
                weight = layer.weight if type(layer) is nn.Linear else layer.weight.t()
                setattr(module, name, Int8Linear(weight, layer.bias))
                found = True
    if not found:
        raise UsageError(f"The model has no linear layers to round to {INT8}; choose another dtype.")
    return model.double()


def is_int8(model: Any) -> bool:
    """Say whether `quantize` rounded the model."""
    return any(isinstance(module, Int8Linear) for module in model.modules())


def warn_where_rows_depend(model: Any) -> None:
    """Warn of a model whose drafted text may not be plain decoding's, as a row of it depends on those beside it.

    bitsandbytes multiplies the columns in which any row of a pass holds a large number apart (LLM.int8, Dettmers et al.
    2022, section 3.2), and rounds the others to eight bits: with other rows, other columns.
    """
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    if settings is None or not getattr(settings, "load_in_8bit", False):
        return
    if getattr(settings, "llm_int8_threshold", 0.0) > 0:
        warnings.warn(
            f"This model's eight bits (bitsandbytes, llm_int8_threshold {settings.llm_int8_threshold}) round a token's "
            "numbers by what stands in the same pass, so drafted texts may differ from plain decoding's. Load it with "
            "llm_int8_threshold=0.0, and they are the same.",
            ForedraftWarning,
            stacklevel=2,
        )


def dtype_name(model: Any) -> str:
    """Return the name of the dtype that a model was loaded in, as `--dtype` takes it."""
    return INT8 if is_int8(model) else str(model.dtype).removeprefix("torch.")


def _scale(rows: torch.Tensor) -> torch.Tensor:
    """Return floating point[n, 1]: what one step of a row's integers stands for; 1 for a row of zeros."""
    largest = rows.abs().amax(-1, keepdim=True)
    return torch.where(largest == 0, torch.ones_like(largest), largest / _LARGEST)  # a NaN goes through


def relative_error(scores: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of what was expected."""
    return float((scores - expected).norm() / expected.norm().clamp_min(1e-30))


def within_rounding(error: float, model: Any) -> bool:
    """Say whether so large a relative error is what two orders of calculation give in a model's dtype; NaN is not."""
    return error < _TOLERANCE.get(dtype_name(model), 5e-2)
