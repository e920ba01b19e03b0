"""Latent attention (MLA) in a compiled forward: rows attend to latents, not to the keys and values made of them.

Instead of every slot's latents, a query is multiplied by its head's part of the matrix that expands them to keys, and
what it attended to by the part for values (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.2). That model's rotary
positions by complex numbers, for which the compiler has no code, become products of real ones. Uses transformers'
names. Does not know how attention or products are computed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from foredraft.errors import UsageError
from foredraft.model.compiled.experts import multiplied

_COMPLEX = "deepseek_v2"  # the family that rotates by complex numbers
HEADS = "latent_heads"  # of an attention module that attends to latents: its `LatentHeads`


class LatentHeads(nn.Module):
    """An attention module's expansion of latents, by heads: the matrices of a mixture in which each head is an expert.

    UsageError for an expansion of another form than transformers' own.
    """

    is_transposed = has_bias = False

    def __init__(self, attention: Any) -> None:
        super().__init__()
        weight, rotated = attention.kv_b_proj.weight, int(attention.qk_rope_head_dim)
        if weight.shape[1] == rotated:  # `side_by_side` tells latents from keys and values by their sizes
            raise UsageError(f"Latents and rotated keys of this model both have {rotated} numbers; it is not compiled.")
        # what a linear map makes of a unit vector is a column of its matrix, to the last bit
        units = torch.eye(weight.shape[1], dtype=weight.dtype)[None, None]
        marks = torch.arange(units.shape[2] * rotated).reshape(1, 1, -1, rotated).to(weight.dtype)
        with torch.no_grad():
            keys, values = attention.expand_kv(units, marks)
        turned = keys[..., -rotated:]
        if attention.kv_b_proj.bias is not None or not torch.equal(turned, marks.expand_as(turned)):
            raise UsageError("This model expands latents in a way of its own; it is not compiled.")
        self.latent, self.heads = weight.shape[1], keys.shape[1]
        # float[heads, latent, part of a key that is not rotated], and float[heads, value, latent]
        self.keys = nn.Parameter(keys[0, ..., :-rotated].contiguous(), requires_grad=False)
        self.values = nn.Parameter(values[0].mT.contiguous(), requires_grad=False)

    def attend(self, query: torch.Tensor, rotated: int, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return what a query, float[1, heads, R, key], attends to, float[1, R, heads, value].

        The last `rotated` numbers of a key have positions. `attend` takes queries to latents and their rotated keys,
        float[heads, R, latent + rotated], and returns sums of these, float[R, heads * (latent + rotated)].
        """
        plain, turned = query[0].split((query.shape[3] - rotated, rotated), dim=-1)
        rows = query.shape[2]
        experts = torch.arange(self.heads).repeat(rows)
        latents = multiplied(self, "keys", plain.transpose(0, 1).flatten(0, 1), experts)
        asked = torch.cat((latents.unflatten(0, (rows, self.heads)).transpose(0, 1), turned), dim=-1)
        attended = attend(asked).unflatten(1, (self.heads, -1))[..., : self.latent]
        return multiplied(self, "values", attended.flatten(0, 1), experts).view(1, rows, self.heads, -1)


@contextmanager
def attended_latents(model: nn.Module) -> Iterator[None]:
    """Make a model's modules of latent attention attend to latents, until the block ends."""
    with ExitStack() as changes:
        for module in [each for each in model.modules() if hasattr(each, "expand_kv")]:
            changes.enter_context(patch.object(module, HEADS, LatentHeads(module), create=True))
            changes.enter_context(patch.object(module, "expand_kv", lambda latents, rotated: (latents, rotated)))
            changes.enter_context(patch.object(module, "kv_b_proj", nn.Identity()))
        yield


@contextmanager
def real_rotations(model: Any) -> Iterator[None]:
    """Make a model that rotates by complex numbers rotate by pairs of real ones, until the block ends.

    The function that rotates is that of its code's module, where other models of the family find it too. Frequencies
    that change with the length of a text stay those of a text within the window, as foredraft's texts are.
    """
    with ExitStack() as changes:
        for module in [each for each in model.modules() if getattr(each, "rope_type", None) == "dynamic"]:
            changes.enter_context(patch.object(module, "rope_type", "default"))  # asks for no change of frequencies
        if model.config.model_type == _COMPLEX:
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
