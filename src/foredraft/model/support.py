"""Which models can be verified as a tree, and the reason for each that cannot.

Reads a transformers configuration only; does not load or run the model.
"""

import warnings
from dataclasses import dataclass
from inspect import signature
from typing import Any

from foredraft.errors import ForedraftWarning, UnsupportedModelError

TESTED_FAMILIES = frozenset(
    ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gptj", "opt", "phi",
     "phi3", "falcon", "olmo2", "stablelm", "granite", "mixtral", "gpt_oss", "smollm3", "cohere2")
)  # fmt: skip
"""Families for which the project's tests compare tree rows with plain decoding."""

_ENCODER_FAMILIES = frozenset(
    ("bert", "roberta", "electra", "rembert", "camembert", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm",
     "ernie", "megatron-bert", "big_bird", "roformer", "data2vec-text", "xmod", "bert-generation", "xlm", "flaubert")
)  # fmt: skip
_ALIBI_FAMILIES = frozenset({"bloom", "mpt"})
_STATEFUL_MARKS = ("ssm_cfg", "state_size", "conv_kernel", "mamba_d_state", "linear_num_key_heads", "rwkv_version")
_STATEFUL_FAMILIES = frozenset({"mamba", "mamba2", "rwkv", "rwkv7", "recurrent_gemma", "xlstm", "falcon_mamba"})


@dataclass(frozen=True, slots=True)
class Support:
    """Properties of a model, from its configuration."""

    family: str  # transformers' `model_type`
    layer_types: tuple[str, ...]  # for each layer, `full_attention` or `sliding_attention`
    windows: tuple[int | None, ...]  # for each layer, its sliding window, or None
    window: int | None  # maximum tokens of a sequence, or None if the configuration sets no limit
    window_note: str  # why `window` is smaller than the model's own, or an empty string
    tested: bool  # whether the family is in `TESTED_FAMILIES`


def cache_argument(model: Any) -> str:
    """Return the name of the argument of a model's forward that takes the cache, which transformers 5.24 renamed."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def inspect(config: Any) -> Support:
    """Return a configuration's properties; raises UnsupportedModelError with the reason for a model without support."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    family = str(getattr(config, "model_type", "unknown"))
    layers = _layer_types(config)
    for number, kind in enumerate(layers):
        if kind not in ("full_attention", "sliding_attention"):
            reason = "keeps a state that cannot step back after a rejected draft"
            if kind.endswith("_attention") and kind != "linear_attention":
                reason = "cannot be masked as a tree"
            raise UnsupportedModelError(
                f"Layer {number} of this {family} model is of type {kind!r}, which {reason}; "
                "foredraft supports full and sliding attention."
            )
    _refuse_other_kinds(config, family)
    sliding = getattr(config, "sliding_window", None)
    if "sliding_attention" in layers and not sliding:
        raise UnsupportedModelError(
            f"This {family} model has sliding-attention layers but sets no sliding_window in its configuration."
        )
    windows = tuple(sliding if kind == "sliding_attention" else None for kind in layers)
    window, note = _window(config)
    return Support(family, tuple(layers), windows, window, note, family in TESTED_FAMILIES)


def warn_where_rows_depend(config: Any) -> None:
    """Warn if a row's logits depend on the other rows of a pass, so that drafted text may differ from plain decoding.

    bitsandbytes multiplies columns with a large value in any row of the pass separately, and rounds the others to eight
    bits (LLM.int8, Dettmers et al. 2022, section 3.2).
    """
    settings: Any = getattr(config, "quantization_config", None)
    if getattr(settings, "load_in_8bit", False) and getattr(settings, "llm_int8_threshold", 0.0) > 0:
        sentence = (
            f"This model's 8-bit quantisation (bitsandbytes, llm_int8_threshold {settings.llm_int8_threshold}) rounds "
            "a token's values depending on the other tokens of the pass, so drafted texts may differ from plain "
            "decoding's. Load it with llm_int8_threshold=0.0 to make them equal."
        )
        warnings.warn(sentence, ForedraftWarning, stacklevel=2)


def _refuse_other_kinds(config: Any, family: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{family} is an encoder-decoder model; foredraft supports decoder-only models.")
    if family in _ENCODER_FAMILIES and not getattr(config, "is_decoder", False):
        raise UnsupportedModelError(
            f"This {family} model is an encoder, whose tokens attend to later ones; foredraft supports "
            "decoder-only models."
        )
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedModelError(
            f"This {family} model is an encoder, whose tokens attend to later ones; foredraft supports decoder-only "
            "models."
        )
    if family in _STATEFUL_FAMILIES or any(getattr(config, mark, None) is not None for mark in _STATEFUL_MARKS):
        raise UnsupportedModelError(
            f"{family} keeps a recurrent state in its layers (from layer 0 on), which cannot step back after a "
            "rejected draft; foredraft supports attention layers only."
        )
    attention = getattr(config, "attn_config", None)
    if family in _ALIBI_FAMILIES or getattr(config, "alibi", False) or getattr(attention, "alibi", False):
        raise UnsupportedModelError(
            f"This {family} model uses ALiBi, which it derives from a row's index in the pass and not from its "
            "position, so the rows of a tree would be scored wrongly; use a model with rotary or learned positions."
        )
    for part in ("vision_config", "audio_config", "speech_config"):
        if getattr(config, part, None) is not None:
            raise UnsupportedModelError(
                f"{family} is a multi-modal model ({part}); foredraft supports text-only models. "
                "If it has a text-only class, load that model and pass it as (model, tokenizer)."
            )


def _layer_types(config: Any) -> list[str]:
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        raise UnsupportedModelError(
            f"The configuration of this {getattr(config, 'model_type', 'unknown')} model names no num_hidden_layers, "
            "so its layer types are unknown."
        )
    if declared := getattr(config, "layer_types", None):
        return list(declared)[:count]
    if getattr(config, "attention_chunk_size", None):
        return ["chunked_attention"] * count
    local = getattr(config, "attention_layers", None)  # gpt_neo
    if local and "local" in local:
        return ["local_attention" if kind == "local" else "full_attention" for kind in local]
    sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return ["sliding_attention" if sliding else "full_attention"] * count


def _window(config: Any) -> tuple[int | None, str]:
    window = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for group in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if group.get("rope_type") in ("dynamic", "longrope"):  # these change with the length of the sequence
            name = "original_max_position_embeddings"
            original = group.get(name) or getattr(config, name, None)
            if original and window and original < window:
                return int(original), (
                    f"limited to {original} of {window} tokens, because {group['rope_type']} rotary positions change "
                    "with the length of the sequence beyond that"
                )
    return (int(window) if window else None), ""
