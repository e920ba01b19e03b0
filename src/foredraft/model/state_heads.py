"""What drafting heads on the target's hidden states share: transformers' layers, embeddings, an LM head, passes.

Their layers are fed by the states that enter some layers of the target, side by side. Names of weights are those of the
`speculators` format. Does not depend on what a head's layers are given, nor on how a draft grows.
"""

import copy
from typing import Any

import torch
from torch import nn

from foredraft.graph.layout import Layout
from foredraft.graph.tree import IntArray
from foredraft.model.heads import ids_of
from foredraft.model.kv_cache import TreeCache
from foredraft.model.mask import attention_mask


class StateLayers(nn.Module):
    """Transformer layers of a transformers configuration, their last norm, and the map of the target's states to one.

    The states have `wide` numbers in all. On the meta device, the weights are to be loaded.
    """

    def __init__(self, config: Any, wide: int) -> None:
        super().__init__()
        from transformers import AutoModel

        bare = copy.deepcopy(config)
        bare.vocab_size, bare.pad_token_id = 1, None  # the embeddings are the target's, or in the file
        body = AutoModel.from_config(bare, attn_implementation="sdpa")
        self.config, self.layers, self.norm = bare, body.layers, body.norm
        self.fc = nn.Linear(wide, config.hidden_size, bias=False)
        with torch.device("cpu"):  # its frequencies are computed, and in no file
            self.rotary = type(body.rotary_emb)(bare)

    def normed(self, size: int) -> nn.Module:
        """Return a norm like the last one, for vectors of `size` numbers."""
        made: nn.Module = type(self.norm)(size, eps=self.config.rms_norm_eps)
        return made

    def new_cache(self) -> TreeCache:
        return TreeCache((None,) * len(self.layers))

    def arguments(self, layout: Layout, cache: TreeCache, like: torch.Tensor) -> dict[str, Any]:
        """Return what every layer is given besides its rows: float[1, R, D] `like` these."""
        positions = torch.from_numpy(layout.positions[None]).to(like.device)
        span = cache.spans[None]
        return {
            "attention_mask": attention_mask(layout, span, None, like.dtype).to(like.device),
            "position_ids": positions,
            "position_embeddings": self.rotary(like, positions),
            "past_key_values": cache,
        }


class Ends(nn.Module):
    """A head's embeddings, float[V, D], and its LM head, which scores some tokens or all."""

    embeddings: torch.Tensor

    def __init__(self, embeddings: torch.Tensor, lm_head: nn.Module, ids: IntArray | None) -> None:
        super().__init__()
        self.register_buffer("embeddings", embeddings)
        self.lm_head = lm_head
        self.ids = ids_of(lm_head) if ids is None else ids  # int32[N], the token of each logit; None for all

    def embedded(self, layout: Layout) -> torch.Tensor:
        """Return the embeddings of a layout's rows, float[1, R, D]."""
        ids = torch.from_numpy(layout.token_ids[None]).to(self.embeddings.device)
        return nn.functional.embedding(ids, self.embeddings)
