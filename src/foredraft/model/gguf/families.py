"""What the configurations of some families need beyond fields with names: sizes that follow from others, and lists.

One short function a family, over fields that the tables have filled. Knows no weights' values.
"""

import math
from statistics import NormalDist
from typing import Any

from foredraft.model.gguf.metadata import Keys, Shapes

Fields = dict[str, Any]

SIGMOID = 2
"""The value of expert_gating_func for experts that are chosen by the sigmoid of their scores."""
_DIGITS = 6
"""Digits behind the point that numbers of 32 bits keep after arithmetic."""


def query_scale(wide: int, fields: Fields, _keys: Keys, _shapes: Shapes) -> None:
    """Set the number whose root divides scores: a head's width; with `wide` layers (27B), the model's by its heads."""
    is_wide = fields["num_hidden_layers"] == wide
    fields["query_pre_attn_scalar"] = (
        fields["hidden_size"] // fields["num_attention_heads"] if is_wide else fields["head_dim"]
    )


def ministral(fields: Fields, keys: Keys, _shapes: Shapes) -> None:
    """Set how queries grow with their positions, which files of Mistral do not say."""
    if (scale := keys.get("attention.temperature_scale")) is not None:  # a Ministral, not a Mistral
        rope = fields["rope_parameters"]
        rope["llama_4_scaling_beta"] = scale
        rope.setdefault("original_max_position_embeddings", keys.get("context_length"))


def gemma3n(fields: Fields, keys: Keys, shapes: Shapes) -> None:
    """Set the sparsity of each layer, and sizes that tensors have."""
    layers = fields["num_hidden_layers"]
    scales = keys.get("activation_sparsity_scale", [-math.inf] * layers)
    fields |= {
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), _DIGITS) for scale in scales],
        "laurel_rank": shapes["blk.0.laurel_l.weight"][0],
        "vocab_size_per_layer_input": shapes["per_layer_token_embd.weight"][0],
    }


def gemma4(fields: Fields, keys: Keys, shapes: Shapes) -> None:
    """Set sizes that differ by the kind of layer, and what tensors tell: shared keys, experts."""
    kinds, lengths = fields["layer_types"], fields["intermediate_size"]
    heads = fields["num_key_value_heads"]
    if isinstance(heads, list):
        of_kind = dict(zip(kinds, heads, strict=True))
        fields["num_key_value_heads"] = of_kind.get("sliding_attention", heads[0])
        fields["num_global_key_value_heads"] = of_kind.get("full_attention", heads[0])
    if isinstance(lengths, list):
        fields |= {"intermediate_size": lengths[0], "use_double_wide_mlp": lengths[-1] > lengths[0]}
    fields |= {
        "global_head_dim": fields["head_dim"],
        "head_dim": keys.get("attention.key_length_swa", fields["head_dim"]),
        "attention_k_eq_v": any(
            f"blk.{index}.attn_k.weight" in shapes and f"blk.{index}.attn_v.weight" not in shapes
            for index in range(fields["num_hidden_layers"])
        ),
        "enable_moe_block": "blk.0.ffn_gate_inp.weight" in shapes,
        "vocab_size_per_layer_input": shapes.get("per_layer_token_embd.weight", (fields["vocab_size"],))[0],
    }
    keys.get("attention.value_length_swa")  # that of keys, as transformers has it
    if keys.get("rope.dimension_count_swa", fields["head_dim"]) != fields["head_dim"]:
        raise ValueError("rope.dimension_count_swa is not the width of a head in layers with a window")


def falcon(fields: Fields, _keys: Keys, shapes: Shapes) -> None:
    """Set which of Falcon's kinds of layers the file has: with groups of heads (11B), and a second norm (40B)."""
    norms, groups = 1 + ("blk.0.attn_norm_2.weight" in shapes), fields["num_kv_heads"]
    fields |= {
        "new_decoder_architecture": norms == 2 or 1 < groups < fields["num_attention_heads"], "parallel_attn": True,
        "num_ln_in_parallel_attn": norms, "multi_query": groups == 1, "alibi": False,
    }  # fmt: skip


def stablelm(fields: Fields, _keys: Keys, shapes: Shapes) -> None:
    """Set whether a network stands beside its attention; files of those that do not may have a key that says so."""
    fields["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in shapes


def by_softmax(keys: Keys) -> bool:
    """Return whether experts are chosen by the softmax; llama.cpp knows the first GLM-4.7-Flash by its vocabulary."""
    return bool(keys.get("expert_gating_func", SIGMOID if keys.get("vocab_size") == 154_880 else None) != SIGMOID)


def deepseek(fields: Fields, keys: Keys, _shapes: Shapes) -> None:
    """Set the parts of heads with latent attention, and the rule that chooses experts."""
    if keys.get("expert_count") and fields["norm_topk_prob"] and by_softmax(keys):
        raise ValueError("expert_weights_norm is true, which transformers' deepseek_v2 does not compute")
    rotated = keys.get("rope.dimension_count")
    key_width = keys.get("attention.key_length_mla", keys.get("attention.key_length"))
    fields |= {
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": key_width - rotated, "head_dim": rotated,
        "v_head_dim": keys.get("attention.value_length_mla", keys.get("attention.value_length")),
        "num_key_value_heads": fields["num_attention_heads"], "q_lora_rank": keys.get("attention.q_lora_rank"),
        "topk_method": "group_limited_greedy" if fields["n_group"] > 1 else "greedy",
    }  # fmt: skip
    rope = fields["rope_parameters"]
    if "mscale_all_dim" in rope:  # conversions of this architecture write a tenth of it
        rope["mscale_all_dim"] = rope["mscale"] = round(10 * rope["mscale_all_dim"], _DIGITS)


def delta(fields: Fields, keys: Keys, _shapes: Shapes) -> None:
    """Set which layers follow the gated delta rule, and the sizes of their values."""
    interval, layers = keys.get("full_attention_interval", 4), range(fields["num_hidden_layers"])
    recurrent = keys.get("attention.recurrent_layers", [(index + 1) % interval != 0 for index in layers])
    fields |= {
        "layer_types": ["linear_attention" if recurrent[index] else "full_attention" for index in layers],
        "linear_value_head_dim": keys.get("ssm.inner_size") // fields["linear_num_value_heads"],
    }
    if sections := keys.get("rope.dimension_sections"):
        fields["rope_parameters"]["mrope_section"] = sections[:3]


def convolutions(fields: Fields, _keys: Keys, _shapes: Shapes) -> None:
    """Set which layers are convolutions: those without key heads."""
    heads = fields["num_key_value_heads"]
    fields |= {
        "layer_types": ["full_attention" if count else "conv" for count in heads], "num_key_value_heads": max(heads),
    }  # fmt: skip


def mamba(fields: Fields, keys: Keys, _shapes: Shapes) -> None:
    """Set the sizes of Mamba-2's heads."""
    inner = keys.get("ssm.inner_size")
    fields |= {"head_dim": inner // fields["num_heads"], "expand": inner // fields["hidden_size"]}


def granite_hybrid(fields: Fields, keys: Keys, _shapes: Shapes) -> None:
    """Set which layers are Mamba-2's, those without key heads, their sizes, and whether positions are rotary."""
    heads, inner = fields["num_key_value_heads"], keys.get("ssm.inner_size")
    fields |= {
        "layer_types": ["attention" if count else "mamba" for count in heads], "num_key_value_heads": max(heads),
        "mamba_d_head": inner // fields["mamba_n_heads"], "mamba_expand": inner // fields["hidden_size"],
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned", True) else None,
        "shared_intermediate_size": fields.get("shared_intermediate_size", fields["intermediate_size"]),
    }  # fmt: skip


def nemotron_h(fields: Fields, keys: Keys, _shapes: Shapes) -> None:
    """Set the kind of each layer: with key heads, with a network, or neither; and the sizes of the last kind."""
    heads, lengths, inner = fields["num_key_value_heads"], fields["intermediate_size"], keys.get("ssm.inner_size")
    wide = "moe" if keys.get("expert_count") else "mlp"
    kinds = ["attention" if head else wide if length else "mamba" for head, length in zip(heads, lengths, strict=True)]
    fields |= {
        "layers_block_type": kinds, "num_key_value_heads": max(heads), "intermediate_size": max(lengths),
        "mamba_head_dim": inner // fields["mamba_num_heads"], "expand": inner // fields["hidden_size"],
        # llama.cpp lets steps be as short as they are, and the file does not say; transformers takes its logarithm
        "time_step_min": 1e-30,
    }  # fmt: skip


def falcon_h1(fields: Fields, keys: Keys, shapes: Shapes) -> None:
    """Set the sizes of Mamba-2's heads, and whether their outputs are normed."""
    inner = keys.get("ssm.inner_size")
    fields |= {
        "mamba_d_ssm": inner, "mamba_d_head": inner // fields["mamba_n_heads"],
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in shapes,
    }  # fmt: skip


def minicpm(fields: Fields, _keys: Keys, _shapes: Shapes) -> None:
    """Set the scales that files of the first conversions leave out, to those of llama.cpp's code."""
    usual = {"embedding_multiplier": 12.0, "residual_multiplier": 1.4 / fields["num_hidden_layers"] ** 0.5,
             "logits_scaling": fields["hidden_size"] / 256}  # fmt: skip
    fields |= usual | fields


def jamba(fields: Fields, keys: Keys, shapes: Shapes) -> None:
    """Set how often a layer attends, and how often it has experts: from which layer on, and every how many."""
    heads, layers = fields["num_key_value_heads"], fields["num_hidden_layers"]
    attends = [number for number, count in enumerate(heads) if count]
    chooses = [number for number in range(layers) if f"blk.{number}.ffn_gate_inp.weight" in shapes]
    fields |= {"num_key_value_heads": max(heads), "mamba_expand": keys.get("ssm.inner_size") // fields["hidden_size"]}
    for name, found in (("attn", attends), ("expert", chooses)):
        first, second = [*found, layers, 2 * layers][:2]
        fields |= {f"{name}_layer_offset": first, f"{name}_layer_period": max(second - first, first + 1)}


def kimi_linear(fields: Fields, keys: Keys, _shapes: Shapes) -> None:
    """Set which layers follow the delta rule, those without key heads, and which have experts."""
    heads, dense = fields["num_key_value_heads"], keys.get("leading_dense_block_count", 0)
    rotated = keys.get("rope.dimension_count")
    fields |= {
        "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        "mlp_layer_types": ["dense" if number < dense else "sparse" for number in range(len(heads))],
        "num_key_value_heads": fields["num_attention_heads"], "linear_num_heads": fields["num_attention_heads"],
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": keys.get("attention.key_length_mla") - rotated,
        "v_head_dim": keys.get("attention.value_length_mla"),
    }  # fmt: skip


def apertus(fields: Fields, keys: Keys, _shapes: Shapes) -> None:
    """Set the numbers of each layer's activation, which are no tensors in the file, and weights in the model."""
    numbers = {name: keys.plain(f"xielu.{name}") for name in ("alpha_p", "alpha_n", "beta", "eps")}
    for name, only in (("beta", 0.5), ("eps", -1e-6)):  # of transformers' code
        if not all(math.isclose(value, only, rel_tol=1e-6) for value in numbers[name]):
            raise ValueError(f"xielu.{name} is {numbers[name]}, and in transformers {only}")
    fields["layer_numbers"] = {f"mlp.act_fn.{name}": values for name, values in numbers.items()}


def llama4(fields: Fields, _keys: Keys, _shapes: Shapes) -> None:
    """Set whether queries and keys are normed; llama.cpp knows Maverick, whose are not, by its 128 experts."""
    fields["use_qk_norm"] = fields["num_local_experts"] != 128
