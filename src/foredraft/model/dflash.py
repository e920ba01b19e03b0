"""DFlash's head, which drafts a block of tokens in one pass, whose rows are the root and placeholders.

DFlash (z-lab, 2026): block diffusion with one step. All rows of the block see each other, and in every layer the keys
and values that are made of the target's states of the text. Does not depend on what is drafted from the rows' scores.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foredraft.contracts import TokenIds
from foredraft.errors import StoreError
from foredraft.graph.layout import Layout, lay_out_text
from foredraft.model.state_heads import StateCache, StateHead, StateLayers, load_state_head

METHOD = "dflash"


class DFlashLayers(StateLayers):
    """The layers, of Qwen 3's kind."""

    def __init__(self, layer_config: Any, wide: int) -> None:
        super().__init__(layer_config, wide)
        self.hidden_norm = self.normed(layer_config.hidden_size)

    def read(self, states: torch.Tensor, arguments: Mapping[str, Any]) -> None:
        """Write the keys and values of the target's states, float[1, R, K * D], into every layer's cache."""
        from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

        fused, turns = self.hidden_norm(self.fc(states)), arguments["position_embeddings"]
        for number, layer in enumerate(self.layers):
            own = layer.self_attn
            keys, values = (each(fused).unflatten(-1, (-1, own.head_dim)) for each in (own.k_proj, own.v_proj))
            keys = own.k_norm(keys).transpose(1, 2)
            arguments["past_key_values"].update(
                apply_rotary_pos_emb(keys, keys, *turns)[1], values.transpose(1, 2), number
            )

    def forward(self, embedded: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Run the rows of a block, float[1, R, D], and return the LM head's inputs."""
        for layer in self.layers:
            embedded = layer(embedded, **arguments)
        return self.norm(embedded)  # type: ignore[no-any-return]  # a module's output is Any


def load_dflash(folder: Path, model: Any) -> StateHead[DFlashLayers]:
    """Load the head in a folder; raises what `load_state_head` does, and StoreError without a placeholder's id."""
    made = load_state_head(
        folder, METHOD, model,
        lambda found, width: DFlashLayers(found.layer_config, len(found.layers) * width),
    )  # fmt: skip
    for name in ("mask_token_id", "block_size"):
        if made.config.get(name) is None:
            raise StoreError(f"The drafter in {folder} names no {name}; copy or download it again.")
    return made


class DFlashBlock:
    """One sequence's passes: the head's KV cache follows the text."""

    def __init__(self, head: StateHead[DFlashLayers]) -> None:
        self._head, self._text = head, StateCache(head.layers.new_cache)
        size, self._first = int(head.config["block_size"]), 0 if head.config.get("sample_from_anchor") else 1
        self.levels = size - self._first  # of tokens that a pass drafts
        self._masks = np.full(size, int(head.config["mask_token_id"]), np.int64)
        self._sees = np.ones((size, size), np.bool_)

    @torch.inference_mode()
    def scores(self, ids: TokenIds, states: torch.Tensor, levels: int) -> torch.Tensor:
        """Return the logits of the first `levels` tokens after a text, float[levels, V].

        `states` are the target's, as in `SequenceView`.
        """
        layers, text = self._head.layers, self._text
        for new in text.missing(len(ids), states):
            rows = lay_out_text(np.zeros(len(states[new]), np.int64), new.start)
            text.cache.reserve(rows.rows)
            layers.read(states[None, new], layers.arguments(rows, text.cache, states))
            text.cache.commit(range(rows.rows))
        self._masks[0] = ids[-1]
        positions = text.length + np.arange(len(self._masks), dtype=np.int64)
        block = Layout(self._masks, positions, self._sees, text.length)
        text.cache.reserve(block.rows)
        embedded = self._head.ends.embedded(block)
        scored = layers(embedded, layers.arguments(block, text.cache, embedded))[0]
        text.cache.commit([])
        return self._head.ends.lm_head(scored[self._first : self._first + levels])  # type: ignore[no-any-return]  # a module's output is Any
