"""Mixtures of experts in a compiled forward: rows are multiplied by the matrices of the experts that each has chosen.

A pass reads an expert's matrices once for all of its rows, and a row's sums do not depend on the other rows. What an
expert computes besides products, and who chooses it, is the model's own code. Uses transformers' interface for experts.
Does not know how the kernel is compiled (experts.cpp.jinja).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

SUMMED = 8  # sums of a row's product at once: two fused additions begin a cycle, and each takes four (Zen 3)
BLOCKS = "_blocks"
"""What the name of a mixture's quantised matrices, as `multiply_expert_blocks` takes them, ends with."""

_NAME = "foredraft"  # of ours among transformers' ways to run experts


# Only compiled code multiplies: rows float[N, K] by the matrices, float[E, M, K], of their experts, int64[N], to
# float[N, M].
torch.library.define("foredraft::multiply_experts", "(Tensor rows, Tensor weights, Tensor experts) -> Tensor")
torch.library.register_fake(
    "foredraft::multiply_experts",
    lambda rows, weights, _experts: rows.new_empty(rows.shape[0], weights.shape[1]),
)


def multiplied(module: Any, name: str, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Return each row's product with its expert's matrix `name` and its bias, float[N, M]."""
    product: torch.Tensor
    if (blocks := getattr(module, name + BLOCKS, None)) is not None:
        product = torch.ops.foredraft.multiply_expert_blocks(rows, blocks, experts)
    else:
        weights = by_rows(module, getattr(module, name)).contiguous()
        product = torch.ops.foredraft.multiply_experts(rows, weights, experts)
    return product + getattr(module, f"{name}_bias")[experts] if module.has_bias else product


def _run_experts(module: Any, rows: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Run a module of experts for rows float[R, D], with the experts int64[R, A] of each and their shares float[R, A].

    Computes what transformers' own functions do (`transformers.integrations.moe`). In older releases, such as 5.16,
    no experts have a norm, and they do not say so.
    """
    count, experts = chosen.shape[-1], chosen.reshape(-1)
    inputs = rows.repeat_interleave(count, dim=0)
    if module.has_gate:
        inner = module._apply_gate(multiplied(module, "gate_up_proj", inputs, experts))  # noqa: SLF001  # their interface
    else:
        inner = module.act_fn(multiplied(module, "up_proj", inputs, experts))
    outputs = multiplied(module, "down_proj", inner, experts)
    if getattr(module, "has_post_expert_norm", False):
        outputs = module.post_expert_norm(outputs)
    together: torch.Tensor = (outputs * shares.reshape(-1, 1)).view(rows.shape[0], count, -1).sum(1)
    return together.to(rows.dtype)


def expert_matrices(model: nn.Module) -> list[tuple[Any, str, nn.Parameter]]:
    """Return the matrices of a model's experts, float[E, M, K] or float[E, K, M], each with its module and name."""
    mixtures = [module for module in model.modules() if hasattr(module, "is_transposed")]  # transformers sets it
    found = [(module, *each) for module in mixtures for each in module.named_parameters(recurse=False)]
    return [each for each in found if each[2].ndim == 3]


def by_rows(module: Any, matrices: torch.Tensor) -> torch.Tensor:
    """Return a view of a mixture's matrices as float[E, M, K], a row for each number that they make."""
    return matrices.mT if module.is_transposed else matrices


@contextmanager
def compiled_experts(model: Any) -> Iterator[None]:
    """Make a model's experts run by our kernel until the block ends."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # takes seconds to import

    config = model.config.get_text_config()
    before = config._experts_implementation  # noqa: SLF001  # transformers has no public name for it
    ALL_EXPERTS_FUNCTIONS[_NAME] = _run_experts
    config._experts_implementation = _NAME  # noqa: SLF001  # the same
    try:
        yield
    finally:
        config._experts_implementation = before  # noqa: SLF001  # the same
