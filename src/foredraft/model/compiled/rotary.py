"""DeepSeek-V2's rotary positions by complex numbers, for which the compiler has no code, as products of real ones.

Uses the names of transformers' code of that model. Does not know what is rotated.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

_FAMILY = "deepseek_v2"


@contextmanager
def real_rotations(model: Any) -> Iterator[None]:
    """Make a model that rotates by complex numbers rotate by pairs of real ones, until the block ends.

    The function that rotates is that of its code's module, where other models of the family find it too.
    """
    with ExitStack() as changes:
        if model.config.model_type == _FAMILY:
            code = sys.modules[type(model).__module__]
            ours = partial(_rotated, code.apply_rotary_emb)
            changes.enter_context(patch.object(code, "apply_rotary_emb", ours))
            for module in [each for each in model.modules() if hasattr(each, "inv_freq")]:
                changes.enter_context(patch.object(module, "forward", partial(_turns, module)))
        yield


def _turns(module: Any, _states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Return the cosines and sines of positions, int64[B, R], as float32[B, R, D / 2, 2]."""
    angles = position_ids[..., None].float() * module.inv_freq.float()
    turns: torch.Tensor = torch.stack((angles.cos(), angles.sin()), dim=-1) * module.attention_scaling
    return turns


def _rotated(
    theirs: Callable[..., tuple[torch.Tensor, ...]], xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Rotate each pair of neighbouring numbers of queries and keys, float[B, heads, R, D]; transformers' names."""
    if freqs_cis.is_complex():  # of another model of the family, which another thread runs
        return theirs(xq, xk, freqs_cis)
    cosine, sine = freqs_cis.unsqueeze(1).unbind(-1)
    rotated = []
    for states in (xq, xk):
        left, right = states.float().unflatten(-1, (-1, 2)).unbind(-1)
        pairs = (left * cosine - right * sine, left * sine + right * cosine)
        rotated.append(torch.stack(pairs, dim=-1).flatten(-2).type_as(states))
    return tuple(rotated)
