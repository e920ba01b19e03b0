"""Which models can be verified as a tree, and the reason for each that cannot.

Reads a transformers configuration only; does not load or run the model.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

from foredraft.errors import ForedraftWarning, UnsupportedModelError
from foredraft.model.families import (
    ALIBI,
    DECODERS,
    INDEXED,
    LAYER_REASONS,
    MASK_NAMES,
    RECURRENT,
    RECURRENT_LAYERS,
    REFUSED_FAMILIES,
    TESTED_FAMILIES,
    UNMASKED_LAYERS,
)
from foredraft.options import shown

# the types that a mask describes
_LAYERS = frozenset(("full_attention", "sliding_attention", "chunked_attention", INDEXED))
# the fields that say which tokens a layer sees
_MASK_FIELDS = ("layer_types", "sliding_window", "attention_chunk_size")
# fields of recurrent models, where the configuration names no types of layers
_STATEFUL_MARKS = (
    "ssm_cfg", "state_size", "conv_kernel", "mamba_d_state", "linear_num_key_heads", "lru_width", "rwkv_version",
)  # fmt: skip
_LIMITS = {
    "attention_chunk_size": (1024, "its attention depends on a row's index in the pass beyond that"),
    **dict.fromkeys(
        ("keep_window_size", "index_topk"),
        (0, "it chooses the tokens that it attends to beyond that, and among equal ones by the pass"),
    ),
}
"""Fields that limit the tokens for which rows are exact, less so many rows that a pass can have, and why."""


@dataclass(frozen=True, slots=True)
class Support:
    """Properties of a model, from its configuration."""

    family: str  # transformers' `model_type`, that of the text model in a model that also sees or hears
    layer_types: tuple[str, ...]  # for each layer, transformers' name of its type
    windows: tuple[int | None, ...]  # for each layer, its sliding window, or None
    window: int | None  # maximum tokens of a sequence, or None if the configuration sets no limit
    window_note: str  # why `window` is smaller than the model's own, or an empty string
    tested: bool  # whether the family is in `TESTED_FAMILIES`
    recurrent: tuple[bool, ...]  # for each layer, whether it keeps a recurrent state
    masks: Mapping[str, int | None]  # the window of each mask that it needs, by the name that its layers know it by


def cache_argument(model: Any) -> str:
    """Return the name of the argument of a model's forward that takes the cache; transformers 5.24 renamed it."""
    names = signature(model.forward).parameters
    return next((each for each in ("cache", "cache_params") if each in names), "past_key_values")


def inspect(config: Any) -> Support:
    """Return a configuration's properties; raises UnsupportedModelError with the reason for a model without support.

    Of a model that also sees or hears, the properties are those of its text model.
    """
    try:
        return _support(config)
    except RuntimeError as error:  # transformers' for a field that layers have several values of
        raise UnsupportedModelError(
            f"This {config.model_type} model has layers that differ in a field which foredraft reads once for all of "
            f"them ({str(error).partition('.')[0]}), so it does not know their masks."
        ) from error


def _support(config: Any) -> Support:
    _refuse_family(config)
    text = config.get_text_config(decoder=True)
    if text is not config:
        _refuse_family(text)
    family, layers = str(text.model_type), _layer_types(text)
    for number, kind in enumerate(layers):
        if kind not in _LAYERS | RECURRENT_LAYERS | UNMASKED_LAYERS:
            reason = LAYER_REASONS.get(kind, "foredraft does not know")
            raise UnsupportedModelError(
                f"Layer {number} of this {family} model is of type {kind!r}, which {reason}; "
                "foredraft supports full and sliding attention."
            )
    sliding = getattr(text, "sliding_window", None)
    slides = [kind in ("sliding_attention", "hybrid_sliding") for kind in layers]
    if any(slides) and not sliding:
        raise UnsupportedModelError(
            f"This {family} model has sliding-attention layers but sets no sliding_window in its configuration."
        )
    windows = tuple(sliding if each else None for each in slides)
    window, note = _window(text)
    read = any(hasattr(type(text), text.attribute_map.get(name, name)) for name in _MASK_FIELDS)
    limits = set(layers) != {"full_attention"} and (sliding or 0) < (window or float("inf"))
    if family in TESTED_FAMILIES and limits and not read:
        named = ", ".join(f"{name} {shown(value)}" for name in _MASK_FIELDS if (value := getattr(text, name, None)))
        raise UnsupportedModelError(
            f"The configuration of this model sets {named}, which the code of {family} models does not read, so its "
            "texts would depend on how they are split into passes; remove it from config.json, or correct model_type."
        )
    kinds = zip(layers, windows, strict=True)
    masks = {MASK_NAMES.get(kind, kind): each for kind, each in kinds if kind not in UNMASKED_LAYERS}
    recurrent = tuple(kind in RECURRENT_LAYERS for kind in layers)
    return Support(family, tuple(layers), windows, window, note, family in TESTED_FAMILIES, recurrent, masks)


def warn_where_rows_depend(config: Any) -> None:
    """Warn if a row's logits depend on the other rows of a pass, so that drafted text may differ from plain decoding.

    bitsandbytes multiplies columns with a large value in any row of the pass separately, and rounds the others to eight
    bits (LLM.int8, Dettmers et al. 2022, section 3.2). Other kinds round a row's own values, which differ in the last
    digit with the number of rows, and so by a step of 8 bits where they are rounded.
    """
    settings: Any = getattr(config, "quantization_config", None)
    kind = getattr(settings, "quant_method", "")
    groups = getattr(getattr(settings, "quantization_config", None), "config_groups", None) or {}
    reason, remedy = "", "`foredraft prove` compares them"
    if getattr(settings, "load_in_8bit", False) and getattr(settings, "llm_int8_threshold", 0.0) > 0:
        reason = f"bitsandbytes, llm_int8_threshold {settings.llm_int8_threshold}"
        remedy = "Load it with llm_int8_threshold=0.0 to make them equal"
    elif (
        kind in ("bitnet", "fp8", "mxfp8", "fbgemm_fp8")
        or any(each.input_activations for each in groups.values())
        or "DynamicActivation" in str(getattr(settings, "quant_type", ""))  # torchao's
    ):
        reason = f"{getattr(kind, 'value', kind)}, which quantises activations"
    if reason:
        warnings.warn(
            f"This model's quantisation ({reason}) rounds a token's values depending on the other tokens of the pass, "
            f"so drafted texts may differ from plain decoding's. {remedy}.",
            ForedraftWarning,
            stacklevel=2,
        )


def _refuse_family(config: Any) -> None:
    """Raise UnsupportedModelError for a configuration whose family or fields say that no tree can be verified."""
    family = str(config.model_type)
    encodes = family in DECODERS and not getattr(config, "is_decoder", False)
    encodes |= not getattr(config, "is_causal", True)  # transformers' masks are then those of an encoder
    reason = next((each for each, names in REFUSED_FAMILIES.items() if family in names), "")
    if getattr(config, "is_encoder_decoder", False):
        reason = "is an encoder-decoder"
    elif encodes or getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        reason = "is an encoder, whose tokens attend to later ones"
    elif getattr(config, "alibi", False) or getattr(getattr(config, "attn_config", None), "alibi", False):
        reason = ALIBI
    elif not getattr(config, "layer_types", None) and any(getattr(config, mark, None) for mark in _STATEFUL_MARKS):
        reason = RECURRENT
    if reason:
        raise UnsupportedModelError(
            f"This {family} model {reason}, so drafts cannot be verified exactly; foredraft supports decoder-only "
            "attention models with rotary or learned positions."
        )


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


def _window(config: Any) -> tuple[int | None, str]:
    """Return the most tokens of a sequence, None for no limit, and why they are fewer than the model's own."""
    names = ("max_position_embeddings", "n_positions", "max_target_positions")  # the last one is Whisper's
    window = next((size for name in names if (size := getattr(config, name, None))), None)
    limits = [(int(window), "")] if window else []
    rope = getattr(config, "rope_parameters", None) or {}
    for group in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if group.get("rope_type") in ("dynamic", "longrope"):
            name = "original_max_position_embeddings"
            reason = f"{group['rope_type']} rotary positions change with the length of the sequence beyond that"
            if original := group.get(name) or getattr(config, name, None):
                limits.append((int(original), reason))
    for name, (rows, reason) in _LIMITS.items():
        if size := getattr(config, name, None):
            if size <= rows:
                raise UnsupportedModelError(
                    f"This {config.model_type} model's {name} is {size}, and foredraft supports it from {rows + 1} on, "
                    f"because {reason}."
                )
            limits.append((size - rows, reason))
    limit, reason = min(limits, default=(None, ""))
    own = f" of {window}" if window else ""
    return limit, f"limited to {limit}{own} tokens, because {reason}" if reason else ""
