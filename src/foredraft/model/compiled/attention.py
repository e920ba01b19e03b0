"""Attention in a compiled forward: rows of several sequences attend to their own slots of the same buffers.

Each row has a range of slots, so that one kernel serves a pass of any number of texts. Uses transformers' interface for
attention. Does not know how the kernel is compiled (attention.cpp.jinja).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.library import custom_op
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foredraft.errors import UsageError
from foredraft.model.compiled.latents import latent_heads

if TYPE_CHECKING:
    from foredraft.model.compiled.export import FunctionalForward

LANES = 16  # float32 numbers in the widest vector register, of 512 bits; the size of a head must be a multiple of this


@custom_op("foredraft::attend", mutates_args=())
def attend(
    query: torch.Tensor,  # float[heads, R, D], D a multiple of `LANES`
    key: torch.Tensor,  # float[key heads, C, D]; each serves heads / key heads query heads in a row
    value: torch.Tensor,  # the same
    mask: torch.Tensor,  # float[R, W], added to the scores of a row's slots
    ranges: torch.Tensor,  # int64[2, R], each row's first slot, and how many it has, 1 to W; equal ones stand together
    scaling: float,  # of the scores
    sinks: torch.Tensor | None = None,  # float[heads], the score of one more slot of every row, whose value is zero
    softcap: float = 0.0,  # the scores are this times tanh of their share of it, before the mask is added; 0 for no cap
) -> torch.Tensor:
    """Attend from R rows to their slots; used where nothing is compiled, and to test the kernel.

    Returns float[R, heads * D] in the dtype of `query`; sums are in float32 at least.
    """
    precise = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[0] // key.shape[0]
    attended = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
    for start, count in set(map(tuple, ranges.T.tolist())):
        rows = (ranges[0] == start) & (ranges[1] == count)
        slots = slice(start, start + count)
        keys, values = (each[:, slots].to(precise).repeat_interleave(groups, 0) for each in (key, value))
        scores = query[:, rows].to(precise) * scaling @ keys.mT
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = scores + mask[rows, :count].to(precise)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].to(precise).expand(-1, len(mask[rows]), 1)], -1)
        weights = torch.softmax(scores, -1)[..., :count]
        attended[rows] = (weights @ values).to(query.dtype).transpose(0, 1)
    return attended.flatten(1)


@attend.register_fake
def _(query: torch.Tensor, *_others: object) -> torch.Tensor:
    heads, rows, size = query.shape
    return query.new_empty(rows, heads * size)


@contextmanager
def replaced_attention(model: Any, attention: Callable[..., tuple[torch.Tensor, None]]) -> Iterator[None]:
    """Make the layers of a model that ask transformers which attention to use get this one, until the block ends."""
    config, name = model.config, f"foredraft_{id(model)}"  # another thread may run another model meanwhile
    kernel = config._attn_implementation  # noqa: SLF001  # transformers has no public name for it
    ALL_ATTENTION_FUNCTIONS[name] = attention
    config._attn_implementation = name  # noqa: SLF001  # the same
    try:
        yield
    finally:
        config._attn_implementation = kernel  # noqa: SLF001  # the same
        del ALL_ATTENTION_FUNCTIONS[name]


@contextmanager
def compiled_attention(
    forward: "FunctionalForward", attend: Callable[..., torch.Tensor] = attend
) -> Iterator[list[int]]:
    """Make the model of `forward` use `attend`, for which the compiler has a kernel, until the block ends.

    For passes that are given ranges, or what else `attend` takes in their place and the masks'. What is yielded lists
    the layers that attended so. UsageError in a layer whose own attention may compute something else: any but
    transformers' `sdpa`, and those with sinks or capped scores, which have no `sdpa`.
    """
    attended_by: list[int] = []
    kernel = forward.model.config._attn_implementation  # noqa: SLF001  # transformers has no public name for it

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        dropout: float = 0.0,  # noqa: ARG001  # transformers' signature
        scaling: float | None = None,
        s_aux: torch.Tensor | None = None,
        softcap: float | None = None,
        **_options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend as transformers' functions do, float[1, heads, R, head_dim] to float[1, key heads, C, head_dim]."""
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        layer = forward.layer_of(module)
        ranges, mask = forward.ranges[layer], attention_mask[0, 0]
        if kernel != ("sdpa" if s_aux is None and softcap is None else "eager"):
            raise UsageError(f"The attention of layer {layer} is {kernel!r}, for which there is no kernel.")
        attended_by.append(layer)
        if (heads := latent_heads(module)) is not None:
            kept = (forward.keys[layer][0],) * 2
            return heads.attend(query, value.shape[-1], lambda asked: attend(asked, *kept, mask, ranges, scale)), None
        others = (s_aux, softcap) if softcap else () if s_aux is None else (s_aux,)
        attended = attend(query[0], key[0], value[0], mask, ranges, scale, *others)
        return attended.unflatten(1, (query.shape[1], -1))[None], None

    with replaced_attention(forward.model, attention):
        yield attended_by
