"""A language model and its output matrix as a causal language model, for kinds that transformers has no class for.

Does not know which kinds these are, or where their weights are (`text_part`).
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoModel, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from foredraft.model.support import cache_argument


class TextModel(PreTrainedModel, GenerationMixin):
    """The text model of a wrapper, such as Qwen2-VL, Qwen2.5-VL or Qwen3-VL, whose positions are three equal ones."""

    base_model_prefix = "model"
    _supports_sdpa = _supports_attention_backend = True  # what its language model does not support, that one refuses
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  # transformers reads it as is

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = AutoModel.from_config(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]  # transformers leaves it without annotations

    def forward(
        self, input_ids: torch.Tensor, past_key_values: Any = None, logits_to_keep: int | torch.Tensor = 0, **given: Any
    ) -> CausalLMOutputWithPast:
        """Return the scores float[B, S, V] of the last `logits_to_keep` tokens, or of those it lists; 0 is all."""
        output = self.model(input_ids=input_ids, **{cache_argument(self.model): past_key_values}, **given)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        return CausalLMOutputWithPast(logits=logits)
