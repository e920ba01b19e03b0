"""What drafting heads on the target's hidden states share: transformers' layers, embeddings, an LM head, passes.

Their layers are fed by the states that enter some layers of the target, side by side. Names of weights are those of the
`speculators` format. Does not depend on what a head's layers are given, nor on how a draft grows.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from foredraft.graph.layout import Layout
from foredraft.model.kv_cache import TreeCache
from foredraft.model.mask import attention_mask
from foredraft.model.speculators import Ends, Speculator, read_speculator

L_co = TypeVar("L_co", covariant=True)
S = TypeVar("S", bound="StateLayers")

_ROWS = 512  # of a pass over the text; limits the mask's memory; chosen


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
        return layer_arguments(layout, cache, like, self.rotary)


def layer_arguments(
    layout: Layout, cache: TreeCache, like: torch.Tensor, rotary: Callable[..., Any], window: int | None = None
) -> dict[str, Any]:
    """Return what layers are given besides rows `like` these, float[1, R, D], that see all of a text or a window."""
    positions = torch.from_numpy(layout.positions[None]).to(like.device)
    return {
        "attention_mask": attention_mask(layout, cache.spans[None], window, like.dtype).to(like.device),
        "position_ids": positions,
        "position_embeddings": rotary(like, positions),
        "past_key_values": cache,
    }


@dataclass(frozen=True, slots=True)
class StateHead(Generic[L_co]):
    """A loaded head: its layers, its embeddings and LM head, the target's layers that it reads, its configuration."""

    layers: L_co
    ends: Ends
    reads: tuple[int, ...]
    config: Any


def load_state_head(folder: Path, method: str, model: Any, make: Callable[[Speculator, int], S]) -> StateHead[S]:
    """Load the head of a method in a folder, in the model's dtype and on its device.

    `make` makes the layers, given the width of the target's states. Raises what `read_speculator` and `fill` do.
    """
    found = read_speculator(folder, method, model)
    like = model.get_input_embeddings().weight
    with torch.device("meta"):
        layers = make(found, like.shape[1])
    found.fill(layers, like)
    layers.rotary.to(like.device)
    return StateHead(layers, found.ends(model), found.layers, found.config)


class StateCache:
    """The KV cache of a head for one text, whose rows are the tokens of which the target's states are known."""

    def __init__(self, new_cache: Callable[[], TreeCache]) -> None:
        self._new_cache = new_cache
        self.clear()

    def clear(self, begun: int = 0) -> None:
        """Drop all rows; `begun` is the text's length less that of its known states."""
        self.cache, self.begun = self._new_cache(), begun

    @property
    def length(self) -> int:
        return int(self.cache.length)

    @property
    def read_tokens(self) -> int:
        """The number of the text's tokens that are read, or lie before those with known states."""
        return self.begun + self.length

    def missing(self, tokens: int, states: torch.Tensor) -> Iterator[slice]:
        """Yield the pieces of the states, float[m, W], of a text that have no rows yet; the caller commits them.

        The rows of another text, or of states that begin elsewhere, are dropped.
        """
        begun = tokens - len(states)
        if begun != self.begun or self.length > len(states):
            self.clear(begun)
        while self.length < len(states):
            yield slice(self.length, self.length + _ROWS)
