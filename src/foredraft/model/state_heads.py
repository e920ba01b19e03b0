"""What drafting heads on the target's hidden states share: transformers' layers, embeddings, an LM head, passes.

Their layers are fed by the states that enter some layers of the target, side by side. Names of weights are those of the
`speculators` format. Does not depend on what a head's layers are given, nor on how a draft grows.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from foredraft.model.compiled.package import MOST_ROWS
from foredraft.model.head_files import damaged_unless_read
from foredraft.model.kv_cache import TreeCache
from foredraft.model.speculators import FULL, SLIDING, Ends, Speculator, read_speculator
from foredraft.model.support import cache_argument
from foredraft.options import whole_number

L_co = TypeVar("L_co", covariant=True)
S = TypeVar("S", bound="StateLayers")


class StateLayers(nn.Module):
    """Transformer layers of a transformers configuration, their last norm, and the map of the target's states to one.

    The states have `wide` numbers in all. On the meta device, the weights are to be loaded.
    """

    def __init__(self, config: Any, wide: int) -> None:
        super().__init__()
        from transformers import AutoModel

        bare, window = copy.deepcopy(config), getattr(config, "sliding_window", None)
        types = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
        if SLIDING in types and window is not None and (whole_number(window) or 0) < 1:
            raise ValueError(f"sliding_window is {window!r}")
        self.kinds = [SLIDING if window and kind == SLIDING else FULL for kind in types]
        bare.vocab_size, bare.pad_token_id = 1, None  # the embeddings are the target's, or in the file
        body = AutoModel.from_config(bare, attn_implementation="sdpa")
        bare.layer_types, bare.sliding_window = self.kinds, window if SLIDING in self.kinds else None
        if SLIDING in self.kinds:
            bare.model_type = "drafter"  # a family of its own, as Llama's code reads no windows
        self.config, self.layers, self.norm = bare, body.layers, body.norm
        self.fc = nn.Linear(wide, config.hidden_size, bias=False)
        with torch.device("cpu"):  # its frequencies are computed, and in no file
            self.rotary = type(body.rotary_emb)(bare)

    def given(self, arguments: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return what each layer is given: `arguments`, and of masks by types of layers its own."""
        given = arguments["attention_mask"]
        masks = given if isinstance(given, dict) else dict.fromkeys(self.kinds, given)
        return [{**arguments, "attention_mask": masks[kind]} for kind in self.kinds]

    def normed(self, size: int) -> nn.Module:
        """Return a norm like the last one, for vectors of `size` numbers."""
        made: nn.Module = type(self.norm)(size, eps=self.config.rms_norm_eps)
        return made


def layer_arguments(layers: Any, like: torch.Tensor, positions: torch.Tensor, mask: Any, cache: Any) -> dict[str, Any]:
    """Return what layers are given besides rows like `like`, at positions int64[1, R]; `mask` may be one by type."""
    return {
        "attention_mask": mask,
        "position_ids": positions,
        "position_embeddings": layers.rotary(like, positions),
        cache_argument(layers.layers[0]): cache,
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
    with damaged_unless_read("drafter", folder), torch.device("meta"):
        layers = make(found, like.shape[1])
    found.fill(layers, like)
    layers.rotary.to(like.device)
    return StateHead(layers, found.ends(model), found.layers, found.config)


class HeadModel(nn.Module):
    """The layers and the LM head of a `StateHead` as a model of transformers' interface, which foredraft's target runs.

    A row of `inputs_embeds`, float[1, R, 2 D], is a token's embedding and the state of the token before it. The
    output's `hidden_states` are the next states alone, of the rows that are scored. `location` is the target's name or
    path, where a GGUF file may hold the integers of the LM head.
    """

    def __init__(self, head: StateHead[Any], location: str = "") -> None:
        super().__init__()
        self.config, self.layers, self.lm_head = head.layers.config, head.layers, head.ends.lm_head
        self.embedded_width = 2 * head.ends.embeddings.shape[1]
        self.name_or_path = location
        self.eval()

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, past_key_values: Any,
        attention_mask: Any = None, logits_to_keep: int | torch.Tensor = 0, **_others: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Run rows; `logits_to_keep` is as in transformers: the last so many rows, 0 for all, or these."""
        embedded, states = inputs_embeds.chunk(2, dim=-1)
        arguments = layer_arguments(self.layers, embedded, position_ids, attention_mask, past_key_values)
        scored, following = self.layers(embedded, states, arguments)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(scored[:, kept]), hidden_states=(following[:, kept],))


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

    def missing(self, tokens: int, states: torch.Tensor) -> Iterator[slice]:
        """Yield the pieces of the states, float[m, W], of a text that have no rows yet; the caller commits them.

        The rows of another text, or of states that begin elsewhere, are dropped.
        """
        begun = tokens - len(states)
        if begun != self.begun or self.length > len(states):
            self.clear(begun)
        while self.length < len(states):
            yield slice(self.length, self.length + MOST_ROWS)
