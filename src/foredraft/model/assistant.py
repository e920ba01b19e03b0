"""Gemma 4's assistants: small models whose layers attend to the target's keys and values instead of their own.

A row's inputs are a token's embedding and the last state of the token before it, both the target's; its output is the
LM head's input, and the state for the next token. No row sees another, and all have the position of the text's last
token, so a tree needs no mask and no cache. transformers has the model; it drafts chains
(`SinglePositionMultiTokenCandidateGenerator`). Does not depend on which nodes are expanded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from foredraft.contracts import SequenceView
from foredraft.errors import UsageError
from foredraft.graph.tree import IntArray
from foredraft.model.gguf.drafters import read_gguf_assistant
from foredraft.model.hub import named_gguf
from foredraft.model.loading import check_complete, load_config, located, usage_errors

_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


@dataclass(frozen=True, slots=True)
class Assistant:
    """A loaded assistant, the target's embeddings, and the target's layers to which each type of its layers attends."""

    model: Any
    embeddings: nn.Module
    layers: Mapping[str, int]


def load_assistant(named: str, target: Any) -> Assistant:
    """Load the assistant in a folder, a GGUF file or of a hub id, in the target's dtype and on its device.

    Raises UsageError if it cannot be loaded, or is of another kind or for another target.
    """
    file = named_gguf(named)
    model = None if file is None else read_gguf_assistant(file, target.dtype)
    config = load_config(named) if model is None else model.config
    own, text = target.config.get_text_config(), config.get_text_config()
    wrong = ""
    if config.model_type not in _TYPES:
        wrong = f"a {config.model_type} model; method 'assistant' takes those of the types {' and '.join(_TYPES)}"
    elif not own.model_type.startswith("gemma4"):
        wrong = f"for a Gemma 4 model, and the target is a {own.model_type} model"
    elif config.backbone_hidden_size != own.hidden_size:
        wrong = f"for hidden states of {config.backbone_hidden_size} numbers, and the target's have {own.hidden_size}"
    elif text.vocab_size != own.vocab_size:
        wrong = f"for a vocabulary of {text.vocab_size:,} tokens, and the target has {own.vocab_size:,}"
    elif missing := set(text.layer_types) - set(getattr(own, "layer_types", None) or ()):
        wrong = f"for a target with layers of {' and '.join(sorted(missing))}, which this one has not"
    if wrong:
        raise UsageError(f"{named} is {wrong}. Give the assistant that was published for the target.")
    if model is None:
        location = located(named)
        with usage_errors("assistant (transformers before 5.24 builds none)", named):
            loading: Any = AutoModelForCausalLM.from_pretrained  # its annotations do not know of two results
            model, found = loading(location, dtype=target.dtype, output_loading_info=True)
        check_complete(location, found, model)
    model = model.to(target.device).eval()
    model.requires_grad_(requires_grad=False)
    # those that compute keys of their own: the last ones of a small Gemma 4 read others' too
    keeping = own.layer_types[: len(own.layer_types) - own.num_kv_shared_layers]
    return Assistant(model, target.get_input_embeddings(), {kind: layer for layer, kind in enumerate(keeping)})


class AssistantRollout:
    """One sequence's tree, as `Growing`, whose rows are batches of one token."""

    def __init__(self, assistant: Assistant, most_rows: int) -> None:
        self._own, self.most_rows = assistant, max(most_rows, 1)
        self.limits = int(assistant.model.config.get_text_config().vocab_size), None
        self._kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by type of layer, keys and values
        self._position = 0
        self._outputs = torch.empty(0)  # float[1 + H, D], the states after the root and every row of the tree

    @torch.inference_mode()
    def start(self, view: SequenceView) -> torch.Tensor | None:
        if view.states is None or view.attended is None:
            return None
        self._kept = {kind: view.attended(layer) for kind, layer in self._own.layers.items()}
        self._position = len(view.ids) - 1
        logits, self._outputs = self._passed(view.ids[-1:].astype(np.int32), view.states[-1:])
        return logits

    @torch.inference_mode()
    def expand(self, tokens: IntArray, parents: IntArray) -> torch.Tensor:
        logits, outputs = self._passed(tokens, self._outputs[torch.from_numpy(parents + 1)])
        self._outputs = torch.cat([self._outputs, outputs])
        return logits

    def keep(self, _path: Sequence[int]) -> None:
        self._kept, self._outputs = {}, self._outputs[:0]

    def close(self) -> None:
        self.keep([])

    def _passed(self, tokens: IntArray, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run R tokens after their states, float[R, D]; return logits, float[R, V], and the next states."""
        rows = len(tokens)
        ids = torch.from_numpy(tokens.astype(np.int64)).to(states.device)
        inputs = torch.cat([self._own.embeddings(ids), states], dim=-1)[:, None]
        found = self._own.model(
            inputs_embeds=inputs,
            position_ids=torch.full((rows, 1), self._position, device=states.device),
            shared_kv_states={
                kind: (keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1))
                for kind, (keys, values) in self._kept.items()
            },
        )
        return found.logits[:, 0], found.last_hidden_state[:, 0]
