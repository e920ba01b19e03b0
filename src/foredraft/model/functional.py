"""A model's forward as a function of tensors alone, which is what a compiler ahead of time takes.

The cache goes in as its buffers and is written in place; masks, positions and slots go in as they are laid out. Knows
transformers' forward and attention interface. Does not know how it is compiled, or who calls it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foredraft.model.attention_kernel import LANES, attend

_COMPILED = "foredraft_compiled"


class FunctionalForward(nn.Module):
    """The logits and last hidden states of a pass, from its rows and the buffers of one sequence's cache.

    Args:
        model: a causal language model in evaluation mode.
        layer_types: for each layer, its attention type.
        windows: for each layer, its sliding window, or None; layers of one window share slots and mask.
    """

    def __init__(self, model: Any, layer_types: Sequence[str], windows: Sequence[int | None]) -> None:
        super().__init__()
        self.model = model
        spans = list(dict.fromkeys(windows))
        self._span_of = [spans.index(window) for window in windows]
        self._type_of = dict(zip(layer_types, self._span_of, strict=True))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        masks: list[torch.Tensor],
        slots: list[torch.Tensor],
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score rows, and write their states into the cache's buffers.

        Args:
            token_ids: int64[1, R].
            positions: int64[1, R].
            masks: for each window, float[1, 1, R, S + R], added to attention scores; S slots are in use.
            slots: for each window, int64[R], the slots that the rows' states go to: S and those behind it.
            keys: for each layer, float[1, heads, C, head_dim], written in place; C is at least S + R.
            values: the same.

        Returns:
            float[R, V], and the last hidden states, float[R, D].
        """
        layers: list[Any] = []  # transformers' list type takes no subclass
        for layer, span in enumerate(self._span_of):
            visible = masks[span].shape[-1]
            torch._check(visible <= keys[layer].shape[2])  # noqa: SLF001  # the documented way to tell the exporter
            layers.append(_BufferLayer(keys[layer], values[layer], slots[span], visible))
        mask = masks[0] if len(self._type_of) == 1 else {kind: masks[span] for kind, span in self._type_of.items()}
        output = self.model(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=Cache(layers=layers),
            use_cache=True,
            output_hidden_states=True,
        )
        return output.logits[0], output.hidden_states[-1][0]


class _BufferLayer(CacheLayerMixin):
    """One layer's buffers as transformers' cache layer: rows go to given slots, attention sees the first ones."""

    is_compileable = True
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, visible: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it without annotations
        self.keys, self.values = keys, values
        self.is_initialized = True
        self._slots, self._visible = slots, visible

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the buffers are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows' states to their slots; return all that these rows may attend to."""
        self.keys.index_copy_(2, self._slots, key_states)
        self.values.index_copy_(2, self._slots, value_states)
        return self.keys[:, :, : self._visible], self.values[:, :, : self._visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002  # transformers' signature
        """Return the number of visible slots, and 0."""
        return self._visible, 0

    def get_seq_length(self) -> int:
        """Return 0: positions are given, so nobody needs to derive them."""
        return 0

    def get_max_length(self) -> int:
        """Return -1: the buffer is what it is."""
        return -1

    get_max_cache_shape = get_max_length  # the name of the same method in transformers before 5.20


@contextmanager
def compiled_attention(config: Any) -> Iterator[None]:
    """Have the model attend by `attend`, for which the compiler has a kernel, until the block ends.

    Only where it runs torch's scaled dot product attention; other kernels stay as they are.
    """
    kernel = config._attn_implementation  # noqa: SLF001  # transformers has no public name for it
    if kernel != "sdpa":
        yield
        return
    ALL_ATTENTION_FUNCTIONS.register(_COMPILED, _attention)
    config._attn_implementation = _COMPILED  # noqa: SLF001  # the same
    try:
        yield
    finally:
        config._attn_implementation = kernel  # noqa: SLF001  # the same


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' `sdpa` does, by `attend` where it takes what is given.

    Args:
        module: the attention layer.
        query: float[1, heads, R, head_dim].
        key: float[1, key heads, S + R, head_dim].
        value: the same.
        attention_mask: float[1, 1, R, S + R].
        dropout: 0.
        scaling: of the scores.
        **options: what else transformers' kernels take.
    """
    one_mask = attention_mask is not None and attention_mask.shape[1] == 1  # for all heads
    if attention_mask is None or not one_mask or query.shape[0] != 1 or query.shape[-1] % LANES:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = attend(query[0], key[0], value[0], attention_mask[0, 0], scale)
    return attended.unflatten(1, (query.shape[1], -1))[None], None
