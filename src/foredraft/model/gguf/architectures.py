"""The architectures of GGUF files, as a table: llama.cpp's name of each -> transformers' model and what differs there.

A row says which configuration fields a key of the file fills, which tensor a weight is where the package `gguf` has no
name for it, and how a tensor has to be rearranged, because llama.cpp's conversion stores it in another order. What is
the same for most families stands in `KEYS` and `TENSORS`. What no table says is refused by those who read them. Knows
names, not values: `configuration.py` reads the keys and `weights.py` the tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from foredraft.model.gguf import families
from foredraft.model.gguf.families import SIGMOID
from foredraft.model.gguf.metadata import Keys, Shapes

KEYS: Mapping[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attention.scale": ("attention_multiplier",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "residual_scale": ("residual_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "use_parallel_residual": ("use_parallel_residual",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size",
    ),
    "expert_shared_count": ("n_shared_experts",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers"),
    "altup.active_idx": ("altup_active_idx",),
    "altup.num_inputs": ("altup_num_inputs",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"),
    "ssm.state_size": ("linear_key_head_dim", "mamba_d_state", "state_size", "ssm_state_size"),
    "ssm.group_count": ("linear_num_key_heads", "mamba_n_groups", "n_groups"),
    "ssm.time_step_rank": ("linear_num_value_heads", "mamba_n_heads", "num_heads", "mamba_num_heads"),
}  # fmt: skip
"""A key, without the architecture's name before it -> fields, of which the one that the configuration has is set."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_gating_func": (0, 1),  # of the softmax, which a family without another one applies
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_weights_norm": (False,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "rope.scaling.alpha": (0.0,),
    "use_parallel_residual": (True,),
}
"""Values of keys that change nothing, so that a configuration without a field for the key is right."""

DEFAULTS: Mapping[str, Any] = {
    "norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
    "num_dense_layers": 0, "moe_layer_start_index": 0,
}  # fmt: skip
"""Fields -> their values in llama.cpp where a file has no key for them; a family's own default may be another."""

FLAGS: Mapping[str, tuple[str, ...]] = {
    "attention_bias": ("attn_q.bias", "attn_qkv.bias"), "attention_out_bias": ("attn_output.bias",),
    "mlp_bias": ("ffn_up.bias",), "use_bias": ("attn_output.bias", "ssm_in.bias"), "use_qkv_bias": ("attn_q.bias",),
    "qkv_bias": ("attn_q.bias",), "bias": ("attn_qkv.bias",), "qk_layernorm": ("attn_q_norm.weight",),
    "use_qk_norm": ("attn_q_norm.weight",), "use_conv_bias": ("ssm_conv1d.bias",),
    "mamba_conv_bias": ("ssm_conv1d.bias",), "use_expert_bias": ("exp_probs_b.bias",),
}  # fmt: skip
"""Fields that are true if a layer has a tensor whose name ends so."""

UNUSED = (
    "tensor_data_layout", "rope.scaling.finetuned", "attention.value_length", "rope.scaling.yarn_attn_factor",
)  # fmt: skip
"""Keys that say how a conversion ordered tensors, or sizes that tensors have, or that llama.cpp does not use."""

TENSORS: Mapping[str, str] = {
    "linear_attn.dt": "ssm_dt", "mixer.dt": "ssm_dt", "mamba.dt": "ssm_dt",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps", "mlp.e_score_correction": "exp_probs_b",
    "enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "eh_proj": "nextn.eh_proj", "post_norm": "nextn.shared_head_norm",
    "pre_projection": "nextn.pre_projection", "post_projection": "nextn.post_projection",
}  # fmt: skip
"""A module of transformers, in a layer or the model, or a weight of its own -> its tensor, where `gguf` has no name."""

TIED = {"output": "token_embd"}
"""Tensors that a file may leave out -> the tensor that is used for both then."""

ABSENT: Mapping[str, float] = {"o_proj.bias": 0.0, "layer_scalar": 1.0}
"""Ends of names of weights that a file may leave out -> the number that changes nothing, which they are then."""

PARTS: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
    "ffn_gate_up_shexp": ("ffn_gate_shexp", "ffn_up_shexp"),
    "ffn_gate_up": ("ffn_gate", "ffn_up"),
    "attn_kv_b": ("attn_k_b", "attn_v_b"),
    "ssm_qkvz": ("attn_qkv", "attn_gate"),
    "ssm_conv1d_qkv": ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"),
}
"""A fused tensor -> those that are joined, row after row, where a file has them instead."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How files of one architecture become a model of transformers.

    Attributes:
        family: transformers' `model_type`.
        other: another one that some of the files are of, and which: those for whose keys this is true.
        complete: sets the fields, in place, that follow from several keys or from shapes of tensors.
        keys: further keys and their fields, or other ones than in `KEYS`. No field: the key says nothing new, or is
            read in `families.py`. A number: the only value that the family's code in transformers has.
        fixed: fields that have one value in all such files, as llama.cpp's code has it, with values of absent keys.
        tensors: further modules and their tensors, or other ones than in `TENSORS` and `gguf`.
        changes: how tensors are rearranged: a tensor's name, with or without suffix -> a name in `rearranged.CHANGES`.
        sliding: every so many layers one attends to all tokens, and the others to a window, where the file has one and
            no pattern; 0 if the file says it, or windows are not used.
        window_base: base of rotary frequencies in layers with a window, if not that of the others.
    """

    family: str
    other: tuple[str, Callable[[Keys], bool]] | None = None
    complete: Callable[[families.Fields, Keys, Shapes], None] | None = None
    keys: Mapping[str, tuple[str, ...] | float] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, str] = field(default_factory=dict)
    sliding: int = 0
    window_base: float | None = None

    def family_of(self, keys: Keys) -> str:
        """Return transformers' `model_type` of the file with these keys."""
        return self.other[0] if self.other is not None and self.other[1](keys) else self.family


_INTERLEAVED = {"attn_q": "halves", "attn_k": "halves"}  # rotary pairs lie beside each other there
_NORMS_FROM_ONE = {
    f"{name}.weight": "minus_one"
    for name in (
        *("attn_norm", "ffn_norm", "output_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"),
        *("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"),
    )
}  # the file's norms multiply, the model's add one first
_WITH_POSITIONS: Mapping[str, tuple[str, ...] | float] = {"rope.scaling.finetuned": True}  # llama.cpp's switch
_GRANITE = {"residual_multiplier": 1.0, "embedding_multiplier": 1.0, "logits_scaling": 1.0}
_MOE = {"block_sparse_moe.router": "ffn_gate_inp", "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps",
        "block_sparse_moe.experts.down_proj": "ffn_down_exps",
        "shared_mlp.input_linear": "ffn_gate_up_shexp|ffn_gate_up",
        "shared_mlp.output_linear": "ffn_down_shexp|ffn_down"}  # fmt: skip
_GEMMA_BASE = 10000.0
_SSM = {"ssm_a": "log_of_minus", "ssm_norm": "vector"}
_DELTA = {**_NORMS_FROM_ONE, "ssm_a": "delta_decays", "ssm_dt": "delta_vector", "ssm_conv1d": "delta_rows",
          "attn_qkv": "delta_rows", "attn_gate": "delta_rows", "ssm_alpha": "delta_vector", "ssm_beta": "delta_vector",
          "ssm_out": "delta_columns"}  # fmt: skip
_IMAGE_KEYS: Mapping[str, tuple[str, ...] | float] = {"rope.dimension_sections": (), "n_deepstack_layers": ()}
"""Keys of models with an eye: in a text without images, a token has one position, and no layer takes image features."""
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama", other=("mixtral", lambda keys: bool(keys.get("expert_count"))), changes=_INTERLEAVED
    ),
    "mistral3": Architecture(
        "ministral3", other=("mistral", lambda keys: keys.get("attention.temperature_scale") is None),
        complete=families.ministral, changes=_INTERLEAVED,
    ),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen2vl": Architecture("qwen2", keys=_IMAGE_KEYS),
    "qwen3": Architecture("qwen3"),
    "qwen3vl": Architecture("qwen3", keys=_IMAGE_KEYS),
    "qwen3moe": Architecture("qwen3_moe", fixed={"norm_topk_prob": True}),
    "qwen3vlmoe": Architecture("qwen3_moe", keys=_IMAGE_KEYS, fixed={"norm_topk_prob": True}),
    "gemma": Architecture("gemma", changes=_NORMS_FROM_ONE),
    "gemma2": Architecture(
        "gemma2", complete=partial(families.query_scale, 46), fixed={"sliding_window": 4096},
        changes=_NORMS_FROM_ONE, sliding=2,
    ),
    "gemma3": Architecture(
        "gemma3_text", complete=partial(families.query_scale, 62), changes=_NORMS_FROM_ONE, sliding=6,
        window_base=_GEMMA_BASE,
    ),
    "gemma3n": Architecture(
        "gemma3n_text", complete=families.gemma3n, fixed={"final_logit_softcapping": 30.0}, sliding=5,
        window_base=_GEMMA_BASE,
    ),
    "gemma4": Architecture(
        "gemma4_text", complete=families.gemma4, fixed={"final_logit_softcapping": 30.0},
        tensors={"router": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps.scale"}, window_base=_GEMMA_BASE,
    ),
    "phi2": Architecture("phi"),
    "phi3": Architecture("phi3"),
    "gpt-oss": Architecture(
        "gpt_oss", keys={"expert_feed_forward_length": ("intermediate_size",), "feed_forward_length": ()},
        changes={"ffn_gate_up_exps": "experts_by_turns", "ffn_down_exps": "experts_across"}, sliding=2,
    ),
    "smollm3": Architecture("smollm3", changes=_INTERLEAVED),
    "granite": Architecture("granite", keys=_WITH_POSITIONS, fixed=_GRANITE, changes=_INTERLEAVED),
    "granitemoe": Architecture(
        "granitemoe", other=("granitemoeshared", lambda keys: bool(keys.get("expert_shared_feed_forward_length"))),
        keys=_WITH_POSITIONS, fixed=_GRANITE, tensors=_MOE, changes=_INTERLEAVED,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid", complete=families.granite_hybrid, tensors=_MOE,
        fixed={**_GRANITE, "num_local_experts": 0}, changes={**_INTERLEAVED, **_SSM},
    ),
    "olmo": Architecture("olmo", keys={"attention.layer_norm_epsilon": 1e-5}, changes=_INTERLEAVED),
    "olmo2": Architecture(
        "olmo2", other=("olmo3", lambda keys: bool(keys.get("attention.sliding_window"))), sliding=4
    ),
    "olmoe": Architecture("olmoe"),
    "command-r": Architecture("cohere", fixed={"logit_scale": 1.0}),
    "cohere2": Architecture("cohere2", sliding=4),
    "stablelm": Architecture(
        "stablelm", complete=families.stablelm, keys={"use_parallel_residual": ()},
        tensors={"self_attn.q_layernorm.norms": "attn_q_norm", "self_attn.k_layernorm.norms": "attn_k_norm"},
    ),
    "starcoder2": Architecture("starcoder2"),
    "gpt2": Architecture(
        "gpt2", changes=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), "transposed")
    ),
    "falcon": Architecture("falcon", complete=families.falcon, changes={"attn_qkv": "by_groups"}),
    "gptneox": Architecture("gpt_neox", changes={"attn_qkv": "by_heads"}),
    "nemotron": Architecture("nemotron", changes=_NORMS_FROM_ONE),
    "minimax-m2": Architecture(
        "minimax_m2", keys={"expert_feed_forward_length": ("intermediate_size",), "expert_gating_func": SIGMOID}
    ),
    "exaone4": Architecture("exaone4", sliding=4),
    "glm4": Architecture("glm4"),
    "glm4moe": Architecture("glm4_moe", keys={"expert_gating_func": SIGMOID}),
    "seed_oss": Architecture("seed_oss"),
    "arcee": Architecture("arcee", changes=_INTERLEAVED),
    "ernie4_5": Architecture("ernie4_5"),
    "deepseek2": Architecture(
        "deepseek_v3", other=("deepseek_v2", families.by_softmax), complete=families.deepseek,
        keys={"attention.head_count_kv": (), "expert_gating_func": ()},
    ),
    "lfm2": Architecture(
        "lfm2", complete=families.convolutions, fixed={"block_auto_adjust_ff_dim": False}
    ),
    "lfm2moe": Architecture(
        "lfm2_moe", complete=families.convolutions, keys={"expert_gating_func": SIGMOID},
        fixed={"norm_topk_prob": True}, tensors={"feed_forward.experts.gate_up_proj": "ffn_gate_up_exps"},
    ),
    "qwen35": Architecture("qwen3_5_text", complete=families.delta, changes=_DELTA),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", complete=families.delta, keys={"feed_forward_length": ()}, changes=_DELTA
    ),
    "qwen3next": Architecture(
        "qwen3_next", complete=families.delta, fixed={"norm_topk_prob": True},
        tensors={"linear_attn.in_proj_qkvz": "ssm_qkvz"},
        changes={**_NORMS_FROM_ONE, "ssm_a": "log_of_minus", "ssm_qkvz": "by_key_heads"},
    ),
    "mamba2": Architecture(
        "mamba2", complete=families.mamba,
        keys={"attention.head_count": (), "feed_forward_length": (), "context_length": ()}, changes=_SSM,
    ),
    "nemotron_h": Architecture(
        "nemotron_h", complete=families.nemotron_h, tensors={"mixer.out_proj": "ssm_out"}, changes=_SSM
    ),
    "nemotron_h_moe": Architecture(
        "nemotron_h", complete=families.nemotron_h, keys={"expert_gating_func": SIGMOID},
        tensors={"mixer.out_proj": "ssm_out", "mixer.experts.up_proj": "ffn_up_exps",
                 "mixer.experts.down_proj": "ffn_down_exps"},
        changes=_SSM,
    ),
    "falcon-h1": Architecture(
        "falcon_h1", complete=families.falcon_h1, fixed={"mamba_norm_before_gate": False}, changes=_SSM
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        keys={
            "feed_forward_length": (), "expert_feed_forward_length": ("intermediate_size",),
            "expert_shared_feed_forward_length": (), "expert_shared_count": 1, "expert_used_count": ("moe_topk",),
        },
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        keys={
            "expert_count": ("moe_num_experts",), "expert_used_count": ("moe_k",),
            "expert_shared_count": ("moe_num_shared_experts",), "expert_shared_feed_forward_length": (),
            "interleave_moe_layer_step": ("moe_layer_interval",),
            "leading_dense_block_count": ("moe_layer_start_index",),
        },
        tensors={"mlp.gate.moe_statics.e_score_correction": "exp_probs_b"},
    ),
    "dots1": Architecture("dots1", keys={"expert_gating_func": SIGMOID}),
    "afmoe": Architecture(
        "afmoe",
        keys={
            "expert_shared_count": ("num_shared_experts",), "expert_weights_scale": ("route_scale",),
            "expert_weights_norm": True, "expert_gating_func": SIGMOID,
        },
        fixed={"mup_enabled": True}, sliding=4,
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        keys={
            "expert_shared_count": ("num_shared_experts",), "expert_shared_feed_forward_length": (),
            "expert_gating_func": SIGMOID,
        },
        sliding=4,
    ),
    "internlm2": Architecture("llama", changes=_INTERLEAVED),
    "minicpm": Architecture("granite", complete=families.minicpm, changes=_INTERLEAVED),
    "jamba": Architecture(
        "jamba", complete=families.jamba, keys={"ssm.time_step_rank": ("mamba_dt_rank",)},
        tensors={"feed_forward.experts.gate_up_proj": "ffn_gate_up_exps"},
        changes={"ssm_a": "log_of_minus"},
    ),
    "kimi-linear": Architecture(
        "kimi_linear", complete=families.kimi_linear, fixed={"norm_topk_prob": True},
        keys={"leading_dense_block_count": (), "kda.head_dim": ("linear_head_dim",), "expert_gating_func": SIGMOID},
        tensors={
            "self_attn.conv1d": "ssm_conv1d_qkv", "self_attn.forget_gate.dt": "ssm_dt",
            "self_attn.forget_gate.A_log": "ssm_a", "self_attn.forget_gate.f_a_proj": "ssm_f_a",
            "self_attn.forget_gate.f_b_proj": "ssm_f_b",
        },
        changes={"ssm_a": "log_of_minus"},
    ),
    "apertus": Architecture("apertus", complete=families.apertus),
    "jais2": Architecture("jais2"),
    "exaone": Architecture("llama"),
    "llama4": Architecture(
        "llama4_text", complete=families.llama4,
        keys={
            "feed_forward_length": ("intermediate_size_mlp",), "expert_feed_forward_length": ("intermediate_size",),
            "interleave_moe_layer_step": ("interleave_moe_layer_step",), "leading_dense_block_count": 0,
            "expert_gating_func": SIGMOID, "attention.sliding_window": 8192,
        },
        tensors={"feed_forward.experts.gate_up_proj": "ffn_gate_up_exps"},
        changes=dict.fromkeys(("ffn_gate_up_exps", "ffn_down_exps"), "experts_across"),
    ),
}  # fmt: skip

_OF_DFLASH = (
    "target_layers", "target_hidden_size", "block_size", "sample_from_anchor", "has_confidence_head",
    "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "embedding_scale", "logit_scale",
    "final_logit_softcapping", "attention.causal",
)  # fmt: skip
DRAFTERS: Mapping[str, Architecture] = {
    "gemma4-assistant": Architecture(
        "gemma4_text", complete=families.gemma4, keys={"embedding_length_out": ()}, window_base=_GEMMA_BASE
    ),
    "eagle3": Architecture(
        "llama", changes=_INTERLEAVED,
        keys={"target_layers": (), "target_hidden_size": (), "norm_before_residual": (), "norm_before_fc": ()},
    ),
    "dflash": Architecture(
        "qwen3", keys={**dict.fromkeys(_OF_DFLASH, ()), **_IMAGE_KEYS}, fixed={"use_sliding_window": True}
    ),
}  # fmt: skip
"""Files of drafters; `drafters.py` reads their keys without a field, and has their names of tensors."""
