"""Attention in a compiled forward: rows of several sequences attend to their own slots of the same buffers.

Each row has a range of slots, so that one kernel serves a pass of any number of texts. Uses transformers' interface for
attention. Does not know how the kernel is compiled (attention.cpp.jinja).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foredraft.errors import UsageError
from foredraft.model.compiled.latents import HEADS, LatentHeads

if TYPE_CHECKING:
    from foredraft.model.compiled.export import FunctionalForward

LANES = 16  # float32 numbers in the widest vector register, of 512 bits; the size of a head must be a multiple of this


# Only compiled code attends: rows float[heads, R, D], D a multiple of `LANES`, to their slots of keys and values,
# float[key heads, C, D], of which each serves heads / key heads query heads in a row. Returned is float[R, heads * D]
# in the query's dtype; sums are in float32 at least. The mask, float[R, W], is added to the scores of a row's slots.
# `ranges`, int64[2, R], has each row's first slot, and how many it has, 1 to W; equal ones stand together. `sinks`,
# float[heads], are the scores of one more slot of every row, whose value is zero. With a `softcap` over 0, scores are
# this times tanh of their share of it, before the mask is added.
torch.library.define(
    "foredraft::attend",
    "(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor ranges, float scaling, Tensor? sinks=None, "
    "float softcap=0.0) -> Tensor",
)
torch.library.register_fake(
    "foredraft::attend", lambda query, *_others: query.new_empty(query.shape[1], query.shape[0] * query.shape[2])
)


@contextmanager
def replaced_attention(model: Any, attention: Callable[..., tuple[torch.Tensor, None]]) -> Iterator[None]:
    """Make the layers of a model that ask transformers which attention to use get this one, until the block ends."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # takes seconds to import

    config, name = model.config, f"foredraft_{id(model)}"  # another thread may run another model meanwhile
    kernel = config._attn_implementation  # noqa: SLF001  # transformers has no public name for it
    ALL_ATTENTION_FUNCTIONS[name] = attention
    try:
        config._attn_implementation = name  # noqa: SLF001  # the same
        yield
    finally:
        try:
            config._attn_implementation = kernel  # noqa: SLF001  # the same
        except KeyboardInterrupt:  # transformers' setter takes long enough to be interrupted
            config._attn_implementation = kernel  # noqa: SLF001  # the same
            raise
        finally:
            del ALL_ATTENTION_FUNCTIONS[name]


@contextmanager
def compiled_attention(
    forward: "FunctionalForward", attend: Callable[..., torch.Tensor] = torch.ops.foredraft.attend
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
        heads: LatentHeads | None = getattr(module, HEADS, None)
        if heads is not None:
            kept = (forward.keys[layer][0],) * 2
            return heads.attend(query, value.shape[-1], lambda asked: attend(asked, *kept, mask, ranges, scale)), None
        others = (s_aux, softcap) if softcap else () if s_aux is None else (s_aux,)
        attended = attend(query[0], key[0], value[0], mask, ranges, scale, *others)
        return attended.unflatten(1, (query.shape[1], -1))[None], None

    with replaced_attention(forward.model, attention):
        yield attended_by
