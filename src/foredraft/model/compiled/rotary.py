"""Rotary positions by complex numbers, for which a compiled forward has no code, as the same products of real ones.

Uses the names in transformers' models that have them. Does not know what is rotated.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

_HEADS = {"deepseek_v2": 1, "llama4_text": 2}
"""For each family whose `apply_rotary_emb` takes complex numbers, which dimension of what is rotated are the heads."""


@contextmanager
def real_rotations(model: Any) -> Iterator[None]:
    """Make a model that rotates by complex numbers rotate by pairs of real ones, until the block ends.

    The function that rotates is that of its code's module, where other models of the family find it too.
    """
    text = model.config.get_text_config()
    heads = _HEADS.get(text.model_type)
    with ExitStack() as changes:
        if heads is not None:
            for code in {sys.modules[type(each).__module__] for each in model.modules()}:
                if theirs := getattr(code, "apply_rotary_emb", None):
                    ours = partial(_rotated, theirs, heads)
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
    theirs: Callable[..., tuple[torch.Tensor, ...]], heads: int,
    xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Rotate each pair of neighbouring numbers of queries and keys, float[..., D], as transformers names them."""
    if freqs_cis.is_complex():  # of another model of the family, which another thread runs
        return theirs(xq, xk, freqs_cis)
    cosine, sine = freqs_cis.unsqueeze(heads).unbind(-1)
    rotated = []
    for states in (xq, xk):
        left, right = states.float().unflatten(-1, (-1, 2)).unbind(-1)
        pairs = (left * cosine - right * sine, left * sine + right * cosine)
        rotated.append(torch.stack(pairs, dim=-1).flatten(-2).type_as(states))
    return tuple(rotated)
