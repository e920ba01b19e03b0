"""A tiny Gemma 4 and an untrained assistant for it."""

import gguf
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


_OF_GGUF = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "pre_projection": "nextn.pre_projection",
    "post_projection": "nextn.post_projection", "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.q_norm": "attn_q_norm", "self_attn.o_proj": "attn_output", "layer_scalar": "layer_output_scale",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def save_gguf_assistant(file, model):
    """Save an assistant as llama.cpp (b10731) converts it."""
    text, kind = model.config.get_text_config(), "gemma4-assistant"
    layers, heads = text.num_hidden_layers, [layer.self_attn.head_dim for layer in model.model.layers]
    writer = gguf.GGUFWriter(file, kind)
    writer.add_tokenizer_model("none")
    writer.add_token_list([str(number) for number in range(text.vocab_size)])
    for key, value in {
        "block_count": layers, "nextn_predict_layers": layers, "attention.shared_kv_layers": layers,
        "context_length": text.max_position_embeddings, "embedding_length": text.hidden_size,
        "embedding_length_out": model.config.backbone_hidden_size, "feed_forward_length": text.intermediate_size,
        "attention.head_count": text.num_attention_heads, "attention.head_count_kv": text.num_key_value_heads,
        "attention.key_length": heads[1], "attention.key_length_swa": heads[0], "rope.dimension_count_swa": heads[0],
        "attention.sliding_window": text.sliding_window, "embedding_length_per_layer_input": 0,
    }.items():  # fmt: skip
        writer.add_uint32(f"{kind}.{key}", value)
    writer.add_float32(f"{kind}.attention.layer_norm_rms_epsilon", text.rms_norm_eps)
    writer.add_float32(f"{kind}.rope.freq_base", 1e6)
    writer.add_float32(f"{kind}.rope.freq_base_swa", 1e4)
    writer.add_array(f"{kind}.attention.sliding_window_pattern", [True, False])
    turned = heads[1] // 8  # a quarter of the pairs; the others stay, divided by a large number
    factors = torch.tensor([1.0] * turned + [1e30] * (heads[1] // 2 - turned))
    writer.add_tensor("rope_freqs.weight", factors.numpy())
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        block, path = name.removeprefix("model.layers.").split(".", 1) if ".layers." in name else ("", name)
        base = _OF_GGUF[path.removesuffix(".weight")]
        writer.add_tensor(f"blk.{block}.{base}.weight" if block else f"{base}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)
