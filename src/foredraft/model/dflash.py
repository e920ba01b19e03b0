"""Heads of DFlash, DSpark and DFlash 2: they draft a block of tokens in one pass, of the root and placeholders.

DFlash (z-lab, 2026): block diffusion with one step. All rows of the block see each other, and in every layer the keys
and values that are made of the target's states of the text; in a layer with a sliding window, of its end. DSpark
(DeepSeek, 2026) adds to the scores of a token what the token before it is worth, in a product of low rank. DFlash 2
(z-lab, 2026) mixes a row with the one before it around attention and MLP, and scores a row's best tokens again by the
token before. Does not depend on what is drafted from the rows' scores.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from foredraft.model.speculators import CAUSAL, FULL, SLIDING, TYPE, Speculator
from foredraft.model.state_heads import StateCache, StateHead, StateLayers, layer_arguments, load_state_head
from foredraft.options import whole_number

METHOD, WITH_TOKENS, WITH_CANDIDATES = "dflash", "dspark", "dflash2"
_PLAIN, _GATED = "vanilla", "gated"  # kinds of DSpark's product that are run
_SCALES = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}


class MarkovHead(nn.Module):
    """What a token adds to the scores of the next one, in DSpark; `gated` by the row's state."""

    def __init__(self, vocabulary: int, drafted: int, rank: int, width: int, *, gated: bool) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        if gated:
            self.gate_proj = nn.Linear(width + rank, rank)
        self._gated = gated

    def forward(self, logits: torch.Tensor, tokens: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return a row's logits, float[R, N], after each of the tokens, by its own and its state, float[1, D]."""
        known = self.markov_w1(tokens)
        if self._gated:
            known = known * torch.sigmoid(self.gate_proj(torch.cat([state.expand(len(known), -1), known], dim=-1)))
        return logits + self.markov_w2(known)  # type: ignore[no-any-return]  # a module's output is Any


class CandidateSelector(nn.Module):
    """What a token is worth after another one, in DFlash 2, for the best tokens of a row."""

    def __init__(self, vocabulary: int, width: int, config: Mapping[str, Any]) -> None:
        super().__init__()
        rank, self._count = config["selector_rank"], config["selector_top_k"]
        if whole_number(self._count) is None or not 1 <= self._count <= vocabulary:
            raise ValueError(f"selector_top_k is {self._count!r}")
        self.predecessor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def forward(self, logits: torch.Tensor, tokens: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Do what `MarkovHead` does; other tokens than the row's best cannot follow."""
        best, chosen = logits.topk(self._count)
        known = self.predecessor_codebook[tokens] * self.hidden_projection(state)
        scores = best + known @ self.successor_codebook[chosen[0]].T
        return torch.full_like(logits, -torch.inf).repeat(len(tokens), 1).index_copy(1, chosen[0], scores)


class MixedRows(nn.Module):
    """DFlash 2's convolutions over a block, before and after a part of a layer, whose taps differ by row."""

    def __init__(self, width: int, config: Mapping[str, Any]) -> None:
        super().__init__()
        taps, self._group = config["conv_kernel_size"], config["conv_group_size"]
        if width % self._group:
            raise ValueError(f"conv_group_size {self._group} does not divide {width}")
        self.base_kernel = nn.Parameter(torch.empty(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // self._group), bias=False)

    def forward(self, rows: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Run a part of the layer on a whole block's rows, float[1, R, D]."""
        own = self.kernel_projection(rows).unflatten(-1, (*self.base_kernel.shape[:2], -1))
        before, after = (self.base_kernel + own.repeat_interleave(self._group, dim=-1)).unbind(2)
        return self._mixed(part(self._mixed(rows, before)), after)

    def _mixed(self, rows: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        taps = kernel.shape[2]
        shifted = nn.functional.pad(rows, (0, 0, taps - 1, 0)).unfold(1, taps, 1).flip(-1)
        return (shifted.transpose(2, 3) * kernel).sum(2)


class DFlashLayers(StateLayers):
    """The layers, of Qwen 3's kind, and what scores a token by the one before it, in DSpark and DFlash 2."""

    def __init__(self, found: Speculator, wide: int) -> None:
        super().__init__(found.layer_config, wide)
        layer, config, mixes = found.layer_config, found.config, found.config[TYPE] == WITH_CANDIDATES
        width, window, self._by_row = layer.hidden_size, layer.sliding_window, CAUSAL in config
        self.hidden_norm = self.normed(width)
        self.markov_head = _markov_head(found) if config[TYPE] == WITH_TOKENS else None
        self.candidate_selector = CandidateSelector(layer.vocab_size, width, config) if mixes else None
        for name, each in itertools.product(("attention_conv", "mlp_conv"), self.layers if mixes else ()):
            each.add_module(name, MixedRows(width, config))
        # z-lab's, of embeddings and of logits, and the largest logit; 0 for no limit
        self.scale, self.factor, self.largest = (float(config.get(name, usual)) for name, usual in _SCALES.items())
        # whether a row of the block sees no later ones, by type of layers
        sliding = not config.get("sliding_window_non_causal", mixes)
        self._causal: Mapping[str, bool] = config.get(CAUSAL) or {FULL: False, SLIDING: sliding}
        # z-lab's window ends at each row; the one of `speculators` is so many tokens before the block, for all rows
        self._windows = {FULL: None, SLIDING: window if self._by_row or not window else window + 1}

    def new_cache(self) -> TreeCache:
        return TreeCache([self._windows[kind] for kind in self.kinds])

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
        masks = {kind: self._mask(kind, layout, cache, embedded) for kind in set(self.kinds)}
        arguments = layer_arguments(self, embedded, self.positions(layout), masks, cache)
        for layer, given in zip(self.layers, self.given(arguments), strict=True):
            embedded = _mixed_layer(layer, embedded, given) if self.candidate_selector else layer(embedded, **given)
        return self.norm(embedded)  # type: ignore[no-any-return]  # a module's output is Any

    def _mask(self, kind: str, layout: Layout, cache: TreeCache, like: torch.Tensor) -> torch.Tensor:
        window, sees = self._windows[kind], None if self._causal[kind] else np.ones((layout.rows,) * 2, np.bool_)
        seen_from = layout.positions if self._by_row else np.full_like(layout.positions, layout.at)
        seen = replace(layout, ancestors=sees, positions=seen_from)
        return joined_mask([seen], [cache.spans[window].stored], like.dtype, window).to(like.device)


def _mixed_layer(layer: Any, rows: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    normed = layer.input_layernorm(rows)
    rows = rows + layer.attention_conv(normed, lambda mixed: layer.self_attn(hidden_states=mixed, **given)[0])
    mixed: torch.Tensor = rows + layer.mlp_conv(layer.post_attention_layernorm(rows), layer.mlp)
    return mixed


def load_dflash(folder: Path, model: Any, method: str = METHOD) -> StateHead[DFlashLayers]:
    """Load the head of one of these methods in a folder.

    Raises what `load_state_head` does, StoreError without a placeholder's id, and UsageError for a product of DSpark's
    that is not run.
    """

    def make(found: Speculator, width: int) -> DFlashLayers:
        found.check_block(1 + _first(found.config), block_size=found.config.get("block_size"))
        return DFlashLayers(found, len(found.layers) * width)

    return load_state_head(folder, method, model, make)


def _markov_head(found: Speculator) -> MarkovHead | None:
    layer, kind = found.layer_config, found.config.get("markov_head_type", _PLAIN)
    if not (rank := int(found.config.get("markov_rank", 256))):
        return None
    if kind not in (_PLAIN, _GATED):
        raise UsageError(
            f"The drafter in {found.location} has a Markov head of type {kind}, and {_PLAIN} and {_GATED} ones are "
            "run; give another."
        )
    drafted = layer.vocab_size if found.ids is None else len(found.ids)
    return MarkovHead(layer.vocab_size, drafted, rank, layer.hidden_size, gated=kind == _GATED)


def _first(config: Mapping[str, Any]) -> int:
    """Return the first row that drafts: DSpark's first one does unless it says otherwise."""
    return 0 if config.get("sample_from_anchor", config[TYPE] == WITH_TOKENS) else 1


class DFlashBlock:
    """One sequence's passes, as `Block`."""

    def __init__(self, head: StateHead[DFlashLayers]) -> None:
        self._head, self.new_cache = head, head.layers.new_cache
        size, self._first = head.config["block_size"], _first(head.config)
        self.levels = size - self._first
        self._masks = np.full(size, head.config["mask_token_id"], np.int64)
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
        block = Layout(self._masks, positions, None, text.length)
        text.cache.reserve(block.rows)
        embedded = self._head.ends.embedded(block) * layers.scale
        self._rows = layers(embedded, block, text.cache)[0, self._first :]
        text.cache.commit([])

    def scores(self, level: int, tokens: IntArray) -> torch.Tensor:
        row, layers = self._rows[level : level + 1], self._head.layers
        logits = self._head.ends.lm_head(row) * layers.factor
        if layers.largest > 0:
            logits = torch.tanh(logits / layers.largest) * layers.largest
        rescore, before = layers.markov_head or layers.candidate_selector, torch.from_numpy(tokens.astype(np.int64))
        found: torch.Tensor = logits if rescore is None else rescore(logits, before.to(row.device), row)
        return found.expand(len(tokens), -1)
