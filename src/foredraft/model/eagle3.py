"""EAGLE-3's head, which predicts its own next state from a token and a state, and trees that it grows.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (NeurIPS 2025).
A row's inputs are a token and the state of the token before it: the target's, of a low, a middle and a high layer, for
the text, and the head's own for drafted tokens. Does not depend on which nodes are expanded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from foredraft.contracts import TokenIds
from foredraft.graph.layout import Layout, lay_out_text
from foredraft.graph.tree import IntArray
from foredraft.model.growth import laid_out
from foredraft.model.kv_cache import TreeCache
from foredraft.model.speculators import read_speculator
from foredraft.model.state_heads import Ends, StateLayers

METHOD = "eagle3"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # of a configuration, false by default
_ROWS = 512  # of a pass over the text; limits the mask's memory; chosen


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
        first, *others = self.layers
        normed = first.hidden_norm(states)
        rows = torch.cat([first.input_layernorm(embedded), normed], dim=-1)
        hidden = (normed if self._before else states) + first.self_attn(hidden_states=rows, **arguments)[0]
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for layer in others:
            hidden = layer(hidden, **arguments)
        scored = self.norm(hidden)
        return scored, scored if self._output else hidden


class Eagle3Head(nn.Module):
    """The layers, embeddings and LM head; `reads` are the target's layers whose states it takes."""

    def __init__(self, layers: Eagle3Layers, ends: Ends, reads: tuple[int, ...]) -> None:
        super().__init__()
        self.layers, self.ends, self.reads = layers, ends, reads

    def forward(self, layout: Layout, states: torch.Tensor, cache: TreeCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a layout's rows with their states, float[R, D], after those in the cache, as `Eagle3Layers` does."""
        cache.reserve(layout.rows)
        arguments = self.layers.arguments(layout, cache, states)
        scored, outputs = self.layers(self.ends.embedded(layout), states[None], arguments)
        return scored[0], outputs[0]


def load_eagle3(folder: Path, model: Any) -> Eagle3Head:
    """Load the head in a folder, in the model's dtype and on its device.

    Raises what `read_speculator` does.
    """
    found = read_speculator(folder, METHOD, model)
    like = model.get_input_embeddings().weight
    with torch.device("meta"):
        layers = Eagle3Layers(found.layer_config, found.config, len(found.layers), len(found.layers) * like.shape[1])
    ends = found.ends(model)
    found.fill(layers, like)
    return Eagle3Head(layers, ends, found.layers)


class Eagle3Rollout:
    """One sequence's tree in the head's own KV cache, as `Growing`; it reads the target's states of the text.

    Rows of drafted tokens are computed again for the tokens that are accepted, from the target's states.
    """

    def __init__(self, head: Eagle3Head, most_rows: int) -> None:
        self._head, self.most_rows = head, max(most_rows, 1)
        self.limits = len(head.ends.embeddings), None
        self.hidden: torch.Tensor | None = None  # the LM head's inputs
        self._clear()

    def _clear(self) -> None:
        self._cache, self._begun = self._head.layers.new_cache(), 0
        self._outputs = torch.empty(0)  # float[1 + H, D], the next states after the root and every row of the tree
        self._parents: IntArray = np.empty(0, np.int32)
        self._root: torch.Tensor | None = None  # logits after the root, once there are any

    @property
    def committed(self) -> int:
        return self._begun + int(self._cache.length)

    @torch.inference_mode()
    def start(self, ids: TokenIds, states: torch.Tensor | None = None) -> torch.Tensor | None:
        """Read a text as `Growing` says; its first token with a row is the one after the first known state."""
        begun = len(ids) if states is None else len(ids) - len(states)
        if states is None or begun != self._begun:
            self._clear()
            self._begun = begun
        self.keep([])
        done = int(self._cache.length)
        if states is None or (done == len(states) and self._root is None):
            return None
        for start in range(done, len(states), _ROWS):
            new = slice(start, start + _ROWS)
            layout = lay_out_text(ids[begun:][new].copy(), start)
            scored, outputs = self._head(layout, self._head.layers.fused(states[new]), self._cache)
            self._cache.commit(range(layout.rows))
            self._outputs, self.hidden = outputs[-1:], scored[-1:]
            self._root = self._head.ends.lm_head(self.hidden)
        self._outputs = self._outputs[:1]
        self._cache.reserve(self.most_rows)
        return self._root

    @torch.inference_mode()
    def expand(self, tokens: IntArray, parents: IntArray) -> torch.Tensor:
        above = np.concatenate([self._parents, parents])
        layout = laid_out(tokens, above, self._cache.length)
        self.hidden, outputs = self._head(layout, self._outputs[torch.from_numpy(parents + 1)], self._cache)
        self._cache.hold()
        self._parents, self._outputs = above, torch.cat([self._outputs, outputs])
        return self._head.ends.lm_head(self.hidden)  # type: ignore[no-any-return]  # a module's output is Any

    def keep(self, _path: Sequence[int]) -> None:
        self._cache.commit([])
        self._parents = self._parents[:0]

    def close(self) -> None:
        self._clear()
