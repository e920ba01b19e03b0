"""A GGUF file's keys as a transformers configuration: each key fills a field, or has no effect, or the file is refused.

Reads the file's metadata, the shapes of its tensors, and the few tensors that hold rotary frequencies. Does not read
weights, and knows no tokenizer.
"""

from collections.abc import Mapping
from typing import Any

from foredraft.errors import UnsupportedModelError, told
from foredraft.model.gguf.architectures import (
    ARCHITECTURES,
    DEFAULTS,
    DRAFTERS,
    FLAGS,
    KEYS,
    NEUTRAL,
    UNUSED,
    Architecture,
)
from foredraft.model.gguf.metadata import Keys, Metadata, Shapes
from foredraft.model.gguf.rotary import ReadTensor, rotary_parameters

_INSTEAD = "Give the model as a transformers folder or a hub id"


def configuration(metadata: Metadata, shapes: Shapes, read: ReadTensor) -> Any:
    """Return the transformers configuration of a file; `shapes` are its tensors', rows first, and `read` gives values.

    Raises UnsupportedModelError for an architecture that no row knows, and for a key whose value would be lost.
    """
    from transformers import CONFIG_MAPPING  # slow to import

    row, keys = row_of(metadata.architecture), Keys(metadata)
    family = row.family_of(keys)
    if family not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"This GGUF file is a {metadata.architecture} model, for which this transformers has no {family}; update "
            "it: pip install -U transformers."
        )
    try:
        fields = _fields(row, keys, CONFIG_MAPPING[family](), shapes, read)
        if row.complete is not None:
            row.complete(fields, keys, shapes)
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:  # of a key that is missing or odd
        raise UnsupportedModelError(
            f"The keys of this {metadata.architecture} file do not fit together ({told(error)}); download it again. "
            f"{_INSTEAD}."
        ) from error
    if unread := keys.unread():
        told_keys = ", ".join(f"{key} = {metadata.get(key)}" for key in unread)
        raise UnsupportedModelError(
            f"This GGUF file says {told_keys}, which foredraft does not know for {metadata.architecture} models, so "
            f"its scores could be another model's. {_INSTEAD}, and report the key."
        )
    try:
        return CONFIG_MAPPING[family](**fields)
    except Exception as error:  # configurations check their fields in many ways
        raise UnsupportedModelError(
            f"transformers refuses the configuration of this {metadata.architecture} file ({told(error)}). {_INSTEAD}."
        ) from error


def _fields(row: Architecture, keys: Keys, known: Any, shapes: Shapes, read: ReadTensor) -> dict[str, Any]:
    """Return the fields that the tables fill, of a configuration like `known`, which has the family's own values."""
    usual = {name: value for name, value in DEFAULTS.items() if hasattr(known, name)}
    fields = {**usual, **row.fixed, **_named(row, keys, known)}
    fields |= _sizes(keys, shapes, known, fields)
    fields |= _layer_types(row, keys, known, fields)
    if hasattr(known, "rope_parameters"):
        rope = rotary_parameters(keys, shapes, read, fields, known)
        fields["rope_parameters"] = _rotary(row, keys, known, fields, rope)
    else:  # learned positions, or none
        for key in ("rope.dimension_count", "rope.freq_base"):
            keys.get(key)
    return fields


def row_of(architecture: str) -> Architecture:
    """Return the table's row; UnsupportedModelError for an architecture without one."""
    if architecture in DRAFTERS:
        return DRAFTERS[architecture]
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"This GGUF file is of the architecture {architecture!r}, which foredraft does not read; it reads "
            f"{', '.join(ARCHITECTURES)}. {_INSTEAD}."
        )
    return ARCHITECTURES[architecture]


def _named(row: Architecture, keys: Keys, known: Any) -> dict[str, Any]:
    found = {}
    silent = {key for key in (*UNUSED, *row.keys) if row.keys.get(key, ()) == ()}
    for key, names in {**dict.fromkeys((*NEUTRAL, *UNUSED), ()), **KEYS, **row.keys}.items():
        value = keys.get(key)
        if value is None or key in silent or value == names:
            continue
        if key == "attention.head_count_kv" and value == keys.get("attention.head_count"):
            continue  # as if it were not there
        name = next((each for each in names if hasattr(known, each)), None) if isinstance(names, tuple) else None
        if name is not None:
            found[name] = value
        elif isinstance(names, int | float) or value not in NEUTRAL.get(key, ()):
            raise UnsupportedModelError(
                f"This GGUF file says {key} = {value}, for which transformers' {known.model_type} has no field, so its "
                f"scores could be another model's. {_INSTEAD}."
            )
    return found


def _sizes(keys: Keys, shapes: Shapes, known: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that follow from tensors, and those of keys that a file may leave out, as in llama.cpp."""
    heads = keys.get("attention.head_count", 0)
    keys.get("vocab_size")  # the embedding has as many rows
    # all layers of an assistant draft
    drafting = keys.get("nextn_predict_layers", 0) * ("nextn.pre_projection.weight" not in shapes)
    found = {
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "num_hidden_layers": keys.get("block_count") - drafting,
    }
    for name, ends in FLAGS.items():
        if hasattr(known, name):
            found[name] = any(tensor.endswith(ends) for tensor in shapes)
    if heads:
        names = (name for name in KEYS["attention.head_count_kv"] if hasattr(known, name))
        found |= {name: heads for name in names if name not in fields}
        if not isinstance(getattr(type(known), "head_dim", None), property):
            found["head_dim"] = keys.get("attention.key_length", fields["hidden_size"] // heads)
        if hasattr(known, "attention_multiplier") and "attention_multiplier" not in fields:
            found["attention_multiplier"] = found["head_dim"] ** -0.5
    return found


def _layer_types(row: Architecture, keys: Keys, known: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window of layers that have one, and which do."""
    if not hasattr(known, "sliding_window"):
        return {}
    pattern, window = keys.get("attention.sliding_window_pattern", row.sliding), fields.get("sliding_window") or None
    if not hasattr(known, "layer_types") or not pattern:
        return {"sliding_window": window}
    layers = range(fields["num_hidden_layers"])
    slides = pattern if isinstance(pattern, list) else [index % pattern < pattern - 1 for index in layers]
    kinds = ["sliding_attention" if window and slides[index] else "full_attention" for index in layers]
    return {"sliding_window": window, "layer_types": kinds}


def _rotary(
    row: Architecture, keys: Keys, known: Any, fields: Mapping[str, Any], rope: dict[str, Any]
) -> dict[str, Any]:
    """Return rotary parameters as the configuration has them: of all layers, or of each kind."""
    base = keys.get("rope.freq_base_swa", row.window_base or rope["rope_theta"])
    if "sliding_attention" in known.rope_parameters:
        return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": base}}
    if base != rope["rope_theta"] and "sliding_attention" in fields.get("layer_types", ()):
        raise UnsupportedModelError(
            f"This GGUF file has rope.freq_base_swa = {base} beside {rope['rope_theta']}; transformers' "
            f"{known.model_type} has one base for all layers. {_INSTEAD}."
        )
    return rope
