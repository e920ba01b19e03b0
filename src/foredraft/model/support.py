"""Which models can be verified as a tree, and the reason for each that cannot.

Reads a transformers configuration only; does not load or run the model.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

from foredraft.errors import ForedraftWarning, UnsupportedModelError
from foredraft.model.families import DECODERS, LAYER_REASONS, REFUSED_FAMILIES, TESTED_FAMILIES

_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")  # the types of layers that a mask describes
_STATEFUL_MARKS = ("ssm_cfg", "state_size", "conv_kernel", "mamba_d_state", "linear_num_key_heads", "rwkv_version")


@dataclass(frozen=True, slots=True)
class Support:
    """Properties of a model, from its configuration."""

    family: str  # transformers' `model_type`, that of the text model in a model that also sees or hears
    layer_types: tuple[str, ...]  # for each layer, `full_attention`, `sliding_attention` or `chunked_attention`
    windows: tuple[int | None, ...]  # for each layer, its sliding window, or None
    window: int | None  # maximum tokens of a sequence, or None if the configuration sets no limit
    window_note: str  # why `window` is smaller than the model's own, or an empty string
    tested: bool  # whether the family is in `TESTED_FAMILIES`


def cache_argument(model: Any) -> str:
    """Return the name of the argument of a model's forward that takes the cache, which transformers 5.24 renamed."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def inspect(config: Any) -> Support:
    """Return a configuration's properties; raises UnsupportedModelError with the reason for a model without support.

    Of a model that also sees or hears, the properties are those of its text model.
    """
    _refuse_family(config)
    text = config.get_text_config(decoder=True)
    if text is not config:
        _refuse_family(text)
    family, layers = str(text.model_type), _layer_types(text)
    for number, kind in enumerate(layers):
        if kind not in _LAYERS:
            reason = LAYER_REASONS.get(kind, "foredraft does not know")
            raise UnsupportedModelError(
                f"Layer {number} of this {family} model is of type {kind!r}, which {reason}; "
                "foredraft supports full and sliding attention."
            )
    sliding = getattr(text, "sliding_window", None)
    if "sliding_attention" in layers and not sliding:
        raise UnsupportedModelError(
            f"This {family} model has sliding-attention layers but sets no sliding_window in its configuration."
        )
    windows = tuple(sliding if kind == "sliding_attention" else None for kind in layers)
    window, note = _window(text, layers)
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


def _refuse_family(config: Any) -> None:
    """Raise UnsupportedModelError for a configuration whose family or fields say that no tree can be verified."""
    family = str(config.model_type)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{family} is an encoder-decoder model; foredraft supports decoder-only models.")
    encodes = family in DECODERS and not getattr(config, "is_decoder", False)
    if encodes or getattr(config, "use_bidirectional_attention", None) is True:
        raise UnsupportedModelError(
            f"This {family} model is an encoder, whose tokens attend to later ones; foredraft supports "
            "decoder-only models."
        )
    reason = _reason(REFUSED_FAMILIES, family)
    attention = getattr(config, "attn_config", None)
    if getattr(config, "alibi", False) or getattr(attention, "alibi", False):
        reason = _reason(REFUSED_FAMILIES, "bloom")
    declared = getattr(config, "layer_types", None)
    if not declared and any(getattr(config, mark, None) is not None for mark in _STATEFUL_MARKS):
        reason = LAYER_REASONS["linear_attention"]
    if reason:
        raise UnsupportedModelError(
            f"This {family} model {reason}, so drafts cannot be verified exactly; foredraft supports decoder-only "
            "attention models with rotary or learned positions."
        )


def _reason(reasons: Mapping[str, tuple[str, ...]], name: str) -> str:
    """Return the reason for which a family or a type of layer is refused; empty if it is not."""
    return next((reason for reason, names in reasons.items() if name in names), "")


def _layer_types(config: Any) -> list[str]:
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        raise UnsupportedModelError(
            f"The configuration of this {config.model_type} model describes no stack of decoder layers (it has no "
            "num_hidden_layers); foredraft supports decoder-only language models."
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


def _window(config: Any, layers: list[str]) -> tuple[int | None, str]:
    """Return the most tokens of a sequence, None for no limit, and why they are fewer than the model's own."""
    window = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if "chunked_attention" in layers and chunk and (not window or chunk < window):
        return int(chunk), (
            f"limited to {chunk} of {window} tokens, the size of its attention's chunks, because the model scales "
            "attention across chunks by a row's index in the pass"
        )
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
