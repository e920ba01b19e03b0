"""A tiny Gemma 4 and an untrained assistant for it."""

import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from support.causal_types import tiny_configuration
from support.families import VOCABULARY, tiny_model


def sharing_modes(config):
    """As `Gemma4TextConfig.kv_sharing_modes` of transformers 5.24; that of 5.23 raises where all layers share."""
    count, own = config.num_hidden_layers, config.num_hidden_layers - config.num_kv_shared_layers
    stored = {kind: layer for layer, kind in enumerate(config.layer_types[:own])}.values()
    return ["reuse" if layer >= own else "store" if layer in stored else None for layer in range(count)]


def target_model():
    return tiny_model(tiny_configuration("gemma4_text"))


def save_assistant(folder, target, **changes):
    """Save an assistant; `changes` are fields of its configuration that do not fit the target."""
    own = target.config
    sizes = {layer.self_attn.layer_type: layer.self_attn.head_dim for layer in target.model.layers}
    text = Gemma4TextConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"], num_attention_heads=4, head_dim=sizes["sliding_attention"],
        global_head_dim=sizes["full_attention"],
        num_key_value_heads=2, num_global_key_value_heads=2, sliding_window=own.sliding_window,
        max_position_embeddings=256, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
        enable_moe_block=False, use_double_wide_mlp=False,
    )  # fmt: skip
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=own.hidden_size)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(2)
    model = Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=2 * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return str(folder)
