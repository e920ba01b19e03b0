"""Rotary positions as GGUF files say them, by keys and by tensors of factors, as transformers' rotary parameters.

Knows the rules of llama.cpp and transformers. Does not know which layers use them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.errors import UnsupportedModelError
from foredraft.model.gguf.metadata import Keys, Shapes

ReadTensor = Callable[[str], npt.NDArray[np.float32]]

_DEFAULT_BASE = 10000.0
"""Base of the frequencies where a file names none, as in llama.cpp."""
_UNTURNED = 1e29
"""Factors above this stop a frequency: conversions of Gemma 4 write 1e30."""
_PARTIAL = ("minimax_m2",)
"""Families that turn a part of a head's numbers, though their configurations say no factor for it by default."""
_LLAMA3_TURNS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXTS = (8192, 4096, 16384, 32768)
"""Original contexts, in tokens, to try for factors of Llama 3's rule: a file has its results, not its numbers."""


def rotary_parameters(
    keys: Keys, shapes: Shapes, read: ReadTensor, fields: Mapping[str, Any], known: Any
) -> dict[str, Any]:
    """Return transformers' rotary parameters of a file's layers that attend to all tokens.

    `fields` are those of the configuration so far, and `known` is the family's with its own defaults. Raises
    UnsupportedModelError for a rule that transformers does not have.
    """
    base, context = keys.get("rope.freq_base", _DEFAULT_BASE), keys.get("context_length")
    width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    rotated = keys.get("rope.dimension_count", width)
    if "partial_rotary_factor" in known.rope_parameters or known.model_type in _PARTIAL:
        found["partial_rotary_factor"] = rotated / width
    elif rotated != width and not hasattr(known, "qk_rope_head_dim"):
        raise _refused(f"rope.dimension_count = {rotated}, where a head has {width} numbers", known)
    found |= _scaling(keys, context, known)
    rules = [name for name in ("rope_factors_short.weight", "rope_freqs.weight") if name in shapes]
    rules += [f"the rule {found['rope_type']}"] if found["rope_type"] != "default" else []
    if len(rules) > 1:
        raise _refused(f"both {' and '.join(rules)}", known)
    attention = keys.get("rope.scaling.attn_factor", 1.0)
    if "rope_factors_short.weight" in shapes:
        found |= _longrope(read("rope_factors_short.weight"), read("rope_factors_long.weight"), attention)
        found["original_max_position_embeddings"] = keys.get("rope.scaling.original_context_length", context)
    elif attention != 1.0 and found["rope_type"] == "yarn" and "mscale_all_dim" not in found:
        found["attention_factor"] = attention * (1 + 0.1 * math.log(found["factor"]))
    elif attention != 1.0:
        raise _refused(f"rope.scaling.attn_factor = {attention} with the rule {found['rope_type']}", known)
    if "rope_freqs.weight" in shapes:
        found |= _from_factors(read("rope_freqs.weight"), base, context)
    return found


def _refused(what: str, known: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The rotary positions of this GGUF file have {what}, which transformers' {known.model_type} cannot compute. "
        "Give the model as a transformers folder or a hub id."
    )


def _scaling(keys: Keys, context: int, known: Any) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type", "linear")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear")) or 1.0  # 0 is none, as in llama.cpp
    original = keys.get("rope.scaling.original_context_length", context)
    if kind == "yarn":
        found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        return found | _yarn(keys, known)
    if kind not in ("linear", "none", "longrope"):
        raise _refused(f"rope.scaling.type = {kind!r}", known)
    return {"rope_type": "linear", "factor": factor} if kind != "none" and factor != 1.0 else {}


def _yarn(keys: Keys, known: Any) -> dict[str, Any]:
    """Return YaRN's further parameters; "truncate" rounds the ramp's ends to whole dimensions, as llama.cpp does."""
    betas = {name: keys.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    found = {name: value for name, value in betas.items() if value is not None}
    if (mixed := keys.get("rope.scaling.yarn_ext_factor", 1.0)) != 1.0:
        raise _refused(f"rope.scaling.yarn_ext_factor = {mixed}", known)
    if log_multiplier := keys.get("rope.scaling.yarn_log_multiplier", 0.0):
        found |= {"mscale": 1.0, "mscale_all_dim": log_multiplier}
    return {"truncate": True} | found


def _longrope(short: npt.NDArray[np.float32], long: npt.NDArray[np.float32], attention: float) -> dict[str, Any]:
    """Return LongRoPE's parameters: factors that divide each frequency, in short texts and in long ones."""
    factors = {"short_factor": short.tolist(), "long_factor": long.tolist()}
    return {"rope_type": "longrope", "attention_factor": attention, **factors}


def _from_factors(factors: npt.NDArray[np.float32], base: float, context: int) -> dict[str, Any]:
    """Return rotary parameters of the factors by which a file divides each frequency: by a known rule, or as they are.

    Rules are Llama 3's (transformers' "llama3"), and Gemma 4's, which turns the first numbers only ("proportional").
    """
    turned = int((factors == 1).sum())
    if 0 < turned < len(factors) and (factors[:turned] == 1).all() and (factors[turned:] > _UNTURNED).all():
        return {"rope_type": "proportional", "partial_rotary_factor": turned / len(factors)}
    lengths = 2 * np.pi * base ** (np.arange(len(factors)) / len(factors))
    for original in _LLAMA3_CONTEXTS:
        rule = {"factor": float(factors.max()), "original_max_position_embeddings": original, **_LLAMA3_TURNS}
        if np.allclose(_llama3(lengths, rule), factors, rtol=1e-4):
            return {"rope_type": "llama3", **rule}
    return _longrope(factors, factors, 1.0) | {"original_max_position_embeddings": context}


def _llama3(lengths: npt.NDArray[np.float64], rule: Mapping[str, float]) -> npt.NDArray[np.float64]:
    """Return Llama 3.1's factors for waves of some lengths in tokens: 1 for short, `factor` for long, or between."""
    turns = rule["original_max_position_embeddings"] / lengths
    low, high = rule["low_freq_factor"], rule["high_freq_factor"]
    ramp = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - ramp) / rule["factor"] + ramp)
