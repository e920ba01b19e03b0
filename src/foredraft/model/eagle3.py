"""EAGLE-3's head, which predicts its own next state from a token and a state, and P-EAGLE's, which scores a block.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (NeurIPS 2025).
A row's inputs are a token and the state of the token before it: the target's, of a low, a middle and a high layer, for
the text, and the head's own for drafted tokens. P-EAGLE (2026), in the `speculators` format, has the same layers, and
placeholders in the place of the tokens and states that follow the root. Does not depend on which nodes are expanded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from foredraft.contracts import TokenIds
from foredraft.graph.layout import lay_out_text
from foredraft.graph.tree import IntArray
from foredraft.model.speculators import FLAGS, Speculator
from foredraft.model.state_heads import StateCache, StateHead, StateLayers, load_state_head
from foredraft.model.target import TorchTarget

METHOD, WITH_BLOCKS = "eagle3", "peagle"


class Eagle3Layers(StateLayers):
    """The layers: the first one takes a token's embedding and its state side by side.

    `config` may set the `FLAGS`; `count` layers of the target are read.
    """

    def __init__(self, layer_config: Any, config: Mapping[str, Any], count: int, wide: int) -> None:
        super().__init__(layer_config, wide)
        width, first, flags = layer_config.hidden_size, self.layers[0], {name: bool(config.get(name)) for name in FLAGS}
        first.hidden_norm = self.normed(width)
        for name in ("q_proj", "k_proj", "v_proj"):
            own = first.self_attn.get_submodule(name)
            made = nn.Linear(2 * width, own.out_features, bias=own.bias is not None)
            first.self_attn.set_submodule(name, made)
        self._before, self._output = flags["norm_before_residual"], flags["norm_output"]
        self.input_norm = self.normed(wide) if flags["norm_before_fc"] else None
        self.fc_norm = nn.ModuleList(self.normed(wide // count) for _ in range(count)) if flags["fc_norm"] else None

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        """Return one state, float[..., D], for the target's states side by side, float[..., K * D]."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(states)  # type: ignore[no-any-return]  # a module's output is Any

    def forward(
        self, embedded: torch.Tensor, states: torch.Tensor, arguments: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows, float[B, R, D] embeddings and states; return the LM head's inputs and the next states."""
        (first, *others), (given, *for_others) = self.layers, self.given(arguments)
        normed = first.hidden_norm(states)
        rows = torch.cat([first.input_layernorm(embedded), normed], dim=-1)
        hidden = (normed if self._before else states) + first.self_attn(hidden_states=rows, **given)[0]
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for layer, given in zip(others, for_others, strict=True):
            hidden = layer(hidden, **given)
        scored = self.norm(hidden)
        return scored, scored if self._output else hidden


def load_eagle3(folder: Path, model: Any, method: str = METHOD) -> StateHead[Eagle3Layers]:
    """Load the head of either method in a folder.

    Raises what `load_state_head` does, and StoreError for a P-EAGLE without a placeholder's id.
    """

    def make(found: Speculator, width: int) -> Eagle3Layers:
        wide = len(found.layers) * width
        layers = Eagle3Layers(found.layer_config, found.config, len(found.layers), wide)
        if method == WITH_BLOCKS:
            found.check_block(speculative_tokens=_levels(found.config))
            layers.mask_hidden = nn.Parameter(torch.empty(1, 1, wide))
        return layers

    return load_state_head(folder, method, model, make)


def _levels(config: Mapping[str, Any]) -> Any:
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return proposals[0].get("speculative_tokens", 8)  # the format's default in training; raw ones do not say


class PEagleBlock:
    """One sequence's passes, as `Block`; `model` runs the `HeadModel` of `head`."""

    def __init__(self, head: StateHead[Eagle3Layers], model: TorchTarget) -> None:
        self._head, self._model, self.new_cache = head, model, model.new_cache
        self.levels = _levels(head.config)
        self._masks = np.full(self.levels - 1, head.config["mask_token_id"], np.int64)
        self._logits = torch.empty(0)  # float[L, V]

    def read(self, text: StateCache, ids: TokenIds, states: torch.Tensor) -> None:
        layers = self._head.layers
        for new in text.missing(len(ids), states):
            known, masks = states[new], self._masks if new.stop >= len(states) else self._masks[:0]
            layout = lay_out_text(np.concatenate([ids[text.begun :][new], masks]), new.start)
            placeholders = layers.get_parameter("mask_hidden")[0].expand(len(masks), -1)
            fused = layers.fused(torch.cat([known, placeholders]))
            rows = torch.cat([self._head.ends.embedded(layout)[0], fused], dim=-1)
            self._logits, _ = self._model.forward_rows(layout, text.cache, rows, scored=1 + len(masks))
            text.cache.commit(range(len(known)))

    def scores(self, level: int, tokens: IntArray) -> torch.Tensor:
        return self._logits[level : level + 1].expand(len(tokens), -1)
