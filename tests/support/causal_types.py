"""A tiny configuration of each type in transformers' mapping of causal language models.

Made from the type's default configuration by one table of sizes, and rows of what else a type needs.
"""

from transformers import CONFIG_MAPPING, SiglipVisionConfig

from support.families import VOCABULARY, WINDOW


def _by_name(rows):
    """{name: value} of {"name name ...": value}."""
    return {name: value for names, value in rows.items() for name in names.split()}


_SIZES = _by_name({
    "n_group topk_group o_groups conf_num_hidden_layers": 1,
    "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers "
    "depth max_window_layers num_key_value_heads num_kv_heads num_global_key_value_heads num_experts_per_tok moe_topk "
    "moe_k altup_num_inputs num_codebooks block_size linear_num_key_heads": 2,
    "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads num_experts n_routed_experts num_local_experts "
    "moe_num_experts zero_expert_num rotary_dim spatial_merge_size index_n_heads linear_num_heads "
    "linear_num_value_heads": 4,
    "head_dim global_head_dim dim_head d_head kv_channels qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim "
    "laurel_rank hidden_size_per_layer_input query_pre_attn_scalar patch_size linear_head_dim "
    "linear_key_head_dim": 8,
    "sliding_window window_size local_attention": WINDOW,
    "q_lora_rank kv_lora_rank qk_head_dim moe_intermediate_size shared_expert_intermediate_size "
    "shared_experts_intermediate_size moe_shared_expert_intermediate_size shared_intermediate_size num_buckets "
    "linear_value_head_dim": 16,
    "hidden_size n_embd d_model emb_dim embedding_size word_embed_proj_dim input_embedding_size output_embedding_size "
    "pronunciation_embed_dim shape_embed_dim image_size out_hidden_size projector_input_dim projector_output_dim "
    "vision_output_dim input_size adapter_input_size adapter_in_dim "
    "adapter_out_dim": 32,
    "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size expert_ffn_hidden_size dff dim_ff "
    "d_inner intermediate_size_mlp dense_intermediate_size keep_window_size index_topk": 64,
    "vocab_size vocab_size_per_layer_input decoder_vocab_size audio_vocab_size pronunciation_vocab_size "
    "shape_vocab_size": VOCABULARY,
    "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions": 256,
})  # fmt: skip
"""The size that each field of a configuration is given."""

_DECODER = {"is_decoder": True, "is_encoder_decoder": False}
_MIXED = ["sliding_attention", "full_attention"]
_LINEAR = ["linear_attention", "full_attention"]
_SSD = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
_OWN = _by_name({
    "bailing_hybrid": {"num_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1], **_SSD},
    "falcon_h1": {"mamba_d_ssm": 64, **_SSD},
    "granitemoehybrid": {"layer_types": _LINEAR, **_SSD},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_dt_rank": 4},
    "kimi_linear": {"layer_types": _LINEAR, "num_experts_per_tok": 2},
    "lfm2 lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": WINDOW},
    "zamba2": _SSD,
    "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text electra "
    "ernie marian mbart megatron-bert mvp pegasus plbart prophetnet rembert roberta roberta-prelayernorm roc_bert "
    "roformer trocr whisper xlm-roberta xlm-roberta-xl": _DECODER,
    "cohere_compass_text": {
        "layer_types": _MIXED,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in _MIXED},
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "mellum": {"layer_types": _MIXED},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "layer_types": _MIXED},
    "dots3_note_text": {  # of its layers with a window, which have sizes of their own
        "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
        "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"] * 2, "adapter_merge_size": 4},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": _MIXED * 2, "num_kv_shared_layers": 2, "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {"num_hidden_layers": 4, "layer_types": _MIXED * 2, "num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hrm_text": {"num_layers_per_stack": 2, "H_cycles": 2, "L_cycles": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense hunyuan_v1_moe ministral": {"head_dim": 8},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 16.0, "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "xmod": {"default_language": "en_XX", **_DECODER},
})  # fmt: skip
"""What else a type's configuration needs, or a part's inside it."""

_WHOLE = _by_name({
    "blt gemma4_unified_assistant musicgen musicgen_melody qwen4_exp qwen4_exp_text "
    "reformer zaya": {},
    "gemma4_assistant": {
        "text_config": {
            "num_hidden_layers": 30, "num_kv_shared_layers": 30, "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
        }
    },
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 30},
})  # fmt: skip
"""Types that are refused by their configuration, in full size; and fields whose defaults are unlike real models'."""

STATES = {
    "a convolution's last inputs": ("lfm2", "lfm2_moe", "lfm3"),
    "a convolution's last inputs, and a matrix": (
        "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear",
        "lara_mini", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
        "qwen3_5_text", "qwen3_next", "recurrent_gemma", "zamba", "zamba2",
    ),
}  # fmt: skip
"""What the recurrent layers of tested families keep of a text; the other layers, if any, keep keys and values."""

LAYER_FAMILIES = {
    "minimax_m3_sparse": ("minimax_m3_vl_text",),
    "heavily_compressed_attention": ("deepseek_v4",),
    "local_attention": ("gpt_neo",),
}  # fmt: skip
"""For each type of layers that is refused, families with layers of it; they run if their configuration has none."""


def tiny_configuration(model_type):
    """A configuration of this type with two layers or one of each kind, a small width, and no end token."""
    if model_type in _WHOLE:
        return CONFIG_MAPPING[model_type](**_WHOLE[model_type])
    config = _shrunk(CONFIG_MAPPING[model_type](), _OWN.get(model_type, {}))
    if model_type == "gemma3n":  # its own vision part is built by timm; this one has the fields that are read of it
        fields = {"rms_norm_eps": 1e-6, "vocab_offset": VOCABULARY, "vocab_size": 8}
        vars(config)["vision_config"] = _shrunk(SiglipVisionConfig(**fields), fields)
    return config


def _shrunk(config, own):
    given, layers = {"tie_word_embeddings": False}, _layers(config)
    heads = vars(config).get("num_attention_heads")
    for name, value in vars(config).items():
        if name in config.sub_configs and value is not None:
            given[name] = _shrunk(value, _OWN.get(value.model_type, {}))
        elif isinstance(value, list | tuple) and layers and len(value) == config.num_hidden_layers:
            given[name] = [_SIZES.get(name, value[layer]) for layer in layers]
        elif name in _SIZES and type(value) is int:
            given[name] = _SIZES["num_attention_heads" if name == "num_key_value_heads" and value == heads else name]
    if layers:
        given["num_hidden_layers"] = len(layers)
    tokens = {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": None}
    return type(config)(**(given | tokens | own))


def _layers(config):
    """Numbers of one layer of each type, and of more until they are two; none if there are no types of layers."""
    kinds = getattr(config, "layer_types", None) or []
    first = [number for number, kind in enumerate(kinds) if kind not in kinds[:number]]
    return sorted([*first, *[number for number in range(len(kinds)) if number not in first]][: max(2, len(first))])
