"""DFlash's and DSpark's heads, which draft a block of tokens in one pass, whose rows are the root and placeholders.

DFlash (z-lab, 2026): block diffusion with one step. All rows of the block see each other, and in every layer the keys
and values that are made of the target's states of the text. DSpark (DeepSeek, 2026) adds to the scores of a token what
the token before it is worth, in a product of low rank. Does not depend on what is drafted from the rows' scores.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from foredraft.contracts import TokenIds
from foredraft.errors import UsageError
from foredraft.graph.layout import Layout, lay_out_text
from foredraft.graph.tree import IntArray
from foredraft.model.kv_cache import TreeCache
from foredraft.model.mask import joined_mask
from foredraft.model.speculators import Speculator
from foredraft.model.state_heads import StateCache, StateHead, StateLayers, layer_arguments, load_state_head

METHOD, WITH_TOKENS = "dflash", "dspark"
_PLAIN, _GATED = "vanilla", "gated"  # kinds of DSpark's product that are run


class MarkovHead(nn.Module):
    """What a token adds to the scores of the next one; `gated` by the row's state."""

    def __init__(self, vocabulary: int, drafted: int, rank: int, width: int, *, gated: bool) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        if gated:
            self.gate_proj = nn.Linear(width + rank, rank)
        self._gated = gated

    def forward(self, tokens: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return what is added after each of the tokens, float[R, N], in a row with a state, float[1, D]."""
        known = self.markov_w1(tokens)
        if self._gated:
            known = known * torch.sigmoid(self.gate_proj(torch.cat([state.expand(len(known), -1), known], dim=-1)))
        return self.markov_w2(known)  # type: ignore[no-any-return]  # a module's output is Any


class DFlashLayers(StateLayers):
    """The layers, of Qwen 3's kind."""

    def __init__(self, layer_config: Any, wide: int, markov_head: MarkovHead | None = None) -> None:
        super().__init__(layer_config, wide)
        self.hidden_norm, self.markov_head = self.normed(layer_config.hidden_size), markov_head

    def new_cache(self) -> TreeCache:
        return TreeCache((None,) * len(self.layers))

    def positions(self, layout: Layout) -> torch.Tensor:
        """Return the positions of rows, int64[1, R]."""
        return torch.from_numpy(layout.positions[None]).to(self.fc.weight.device)

    def read(self, states: torch.Tensor, layout: Layout, cache: TreeCache) -> None:
        """Write the keys and values of the target's states, float[1, R, K * D], into every layer's cache."""
        from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

        fused, turns = self.hidden_norm(self.fc(states)), self.rotary(states, self.positions(layout))
        for number, layer in enumerate(self.layers):
            own = layer.self_attn
            keys, values = (each(fused).unflatten(-1, (-1, own.head_dim)) for each in (own.k_proj, own.v_proj))
            keys = own.k_norm(keys).transpose(1, 2)
            cache.update(apply_rotary_pos_emb(keys, keys, *turns)[1], values.transpose(1, 2), number)

    def forward(self, embedded: torch.Tensor, layout: Layout, cache: TreeCache) -> torch.Tensor:
        """Run the rows of a block, float[1, R, D], and return the LM head's inputs."""
        mask = joined_mask([layout], [cache.length], embedded.dtype).to(embedded.device)
        arguments = layer_arguments(self, embedded, self.positions(layout), mask, cache)
        for layer in self.layers:
            embedded = layer(embedded, **arguments)
        return self.norm(embedded)  # type: ignore[no-any-return]  # a module's output is Any


def load_dflash(folder: Path, model: Any, method: str = METHOD) -> StateHead[DFlashLayers]:
    """Load the head of either method in a folder.

    Raises what `load_state_head` does, StoreError without a placeholder's id, and UsageError for a product of DSpark's
    that is not run.
    """

    def make(found: Speculator, width: int) -> DFlashLayers:
        layer, rank = found.layer_config, int(found.config.get("markov_rank", 256)) if method == WITH_TOKENS else 0
        found.check_block(1 + _first(found.config, tokens=rank > 0), block_size=found.config.get("block_size"))
        kind = found.config.get("markov_head_type", _PLAIN)
        if rank and kind not in (_PLAIN, _GATED):
            raise UsageError(
                f"The drafter in {folder} has a Markov head of type {kind}, and {_PLAIN} and {_GATED} ones are run; "
                "give another."
            )
        drafted = layer.vocab_size if found.ids is None else len(found.ids)
        markov = MarkovHead(layer.vocab_size, drafted, rank, layer.hidden_size, gated=kind == _GATED) if rank else None
        return DFlashLayers(layer, len(found.layers) * width, markov)

    return load_state_head(folder, method, model, make)


def _first(config: Mapping[str, Any], *, tokens: bool) -> int:
    """Return the first row that drafts: DSpark's first one, whose `tokens` count, does unless it says otherwise."""
    return 0 if config.get("sample_from_anchor", tokens) else 1


class DFlashBlock:
    """One sequence's passes, as `Block`."""

    def __init__(self, head: StateHead[DFlashLayers]) -> None:
        self._head, self.new_cache = head, head.layers.new_cache
        size, self._first = head.config["block_size"], _first(head.config, tokens=head.layers.markov_head is not None)
        self.levels = size - self._first
        self._masks = np.full(size, head.config["mask_token_id"], np.int64)
        self._sees = np.ones((size, size), np.bool_)
        self._rows = torch.empty(0)  # float[L, D], the LM head's inputs

    def read(self, text: StateCache, ids: TokenIds, states: torch.Tensor) -> None:
        layers = self._head.layers
        for new in text.missing(len(ids), states):
            rows = lay_out_text(np.zeros(len(states[new]), np.int64), new.start)
            text.cache.reserve(rows.rows)
            layers.read(states[None, new], rows, text.cache)
            text.cache.commit(range(rows.rows))
        self._masks[0] = ids[-1]
        positions = text.length + np.arange(len(self._masks), dtype=np.int64)
        block = Layout(self._masks, positions, self._sees, text.length)
        text.cache.reserve(block.rows)
        self._rows = layers(self._head.ends.embedded(block), block, text.cache)[0, self._first :]
        text.cache.commit([])

    def scores(self, level: int, tokens: IntArray) -> torch.Tensor:
        row, markov = self._rows[level : level + 1], self._head.layers.markov_head
        logits = self._head.ends.lm_head(row).expand(len(tokens), -1)
        if markov is not None:
            logits = logits + markov(torch.from_numpy(tokens.astype(np.int64)).to(row.device), row)
        return logits  # type: ignore[no-any-return]  # a module's output is Any
