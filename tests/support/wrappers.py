"""Tiny random models with a vision part, as objects and as folders with a tokenizer."""

import functools

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from support.families import VOCABULARY
from support.tokenizers import pretrained_words

# transformers 5.24's Llama 4 reads this of its language model's output, which has none, and fails in every pass
MoeCausalLMOutputWithPast.image_outputs = None

TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
_MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
_EYE = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
_QWEN_EYE = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
_MARKS = (
    "image_token_id", "video_token_id", "image_token_index", "audio_token_id", "boi_token_id", "eoi_token_id",
    "boi_token_index", "eoi_token_index", "vision_start_token_id", "vision_end_token_id",
)  # fmt: skip
"""Ids that stand for images; these are beyond the tiny vocabulary, so that no text has one."""

WRAPPERS = {
    "gemma3": (_MIXED, _EYE),
    "gemma4": (
        {
            **_PER_LAYER,
            "sliding_window": 16,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 16,
        },
        {**_EYE, "head_dim": 8, "num_key_value_heads": 2, "model_type": "gemma4_vision"},
    ),
    "mistral3": ({}, {**_EYE, "head_dim": 8}),
    "qwen2_vl": (_SECTIONS, {**_QWEN_EYE, "hidden_size": 32, "embed_dim": 16}),
    "qwen2_5_vl": (_SECTIONS, _QWEN_EYE),
    "qwen3_vl": (_SECTIONS, {**_QWEN_EYE, "deepstack_visual_indexes": [0], "num_position_embeddings": 4}),
    "qwen3_vl_moe": (
        {**_SECTIONS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        {**_QWEN_EYE, "deepstack_visual_indexes": [0], "num_position_embeddings": 4},
    ),
    "idefics3": ({}, _EYE),
    "mllama": (
        {
            "num_hidden_layers": 3,
            "cross_attention_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        {
            **_EYE,
            "num_global_layers": 1,
            "attention_heads": 2,
            "vision_output_dim": 32,
            "max_num_tiles": 1,
            "intermediate_layers_indices": [0],
            "supported_aspect_ratios": [[1, 1]],
        },
    ),
    "llama4": (
        {"intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1},
        {**_EYE, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
}
"""By type: what differs from the usual tiny text model, and the vision part."""


def wrapper_config(kind, **more):
    text, eye = WRAPPERS[kind]
    usual = AutoConfig.for_model(kind)
    seeing = usual.vision_config
    return type(usual)(
        text_config=type(usual.text_config)(**{**TEXT, **text}).to_dict(),
        vision_config={**({} if seeing is None else seeing.to_dict()), **eye},
        **{"tie_word_embeddings": False, **more},
        **{mark: 200 + i for i, mark in enumerate(_MARKS) if hasattr(usual, mark)},
    )


def tiny_wrapper(config):
    """A model whose weights are as spread as trained ones are, so that it does not write one token for ever."""
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                spread = 0.1 if "embed" in name else weight.shape[-1] ** -0.5 * 2
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 1
    return model


@functools.cache
def wrapper_of(kind):
    return tiny_wrapper(wrapper_config(kind))


def saved(model, folder):
    """Save a model with the tokenizer of words that tests share; return the folder's name."""
    model.save_pretrained(folder)
    pretrained_words().save_pretrained(folder)
    return str(folder)
