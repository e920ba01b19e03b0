"""The target with some of its sub-layers skipped: a draft model that shares every weight with it.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding" (ACL 2024). A
sub-layer, attention or MLP, adds to the residual stream; skipped, it adds nothing. The choice for a model is stored in
a JSON file that names the model's fingerprint. Contains the sub-layer names of model families. Does not depend on how
the choice is made.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foredraft.atomic_file import store_file
from foredraft.errors import StoreError, UnsupportedModelError, UsageError
from foredraft.model.fingerprint import fingerprint
from foredraft.model.layers import model_parts, shared_copy, shorter
from foredraft.model.target import TorchTarget
from foredraft.options import shown, whole_number

_KIND, _FORMAT = "foredraft layer-skip", 1


@dataclass(frozen=True, slots=True)
class Skipped:
    """The skipped sub-layers, by layer number from 0, ascending."""

    attention: tuple[int, ...]
    mlp: tuple[int, ...]

    def check(self, layers: int) -> None:
        """Raise UsageError unless a model of `layers` layers has these; neither all nor none may be skipped."""
        for name, numbers in (("attention", self.attention), ("mlp", self.mlp)):
            wrong = [number for number in numbers if not 0 <= number < layers]
            if wrong:
                raise UsageError(f"{name} names layer {wrong[0]}; this model has layers 0 to {layers - 1}.")
        if not 0 < len(self.attention) + len(self.mlp) < 2 * layers:
            raise UsageError(
                f"Of the {2 * layers} sub-layers {'all' if self.attention else 'none'} would be skipped; name some."
            )


def layer_numbers(given: Any, name: str) -> tuple[int, ...]:
    """Return a list of different layer numbers in ascending order; None is the empty list. Raises UsageError."""
    if given is None:
        return ()
    listed = given if isinstance(given, Sequence) and not isinstance(given, str) else [None]
    numbers = {number for each in listed if (number := whole_number(each)) is not None}
    if len(numbers) < len(listed):
        raise UsageError(f"{name} is {shown(given)}; it must be a list of different layer numbers such as [3, 5].")
    return tuple(sorted(numbers))


def default_skipped(layers: int) -> Skipped:
    """Return every second layer from a quarter of the way on; the last one, which gives the logits, stays if it can."""
    if layers == 1:
        return Skipped((0,), ())
    numbers = tuple(range(max(layers // 4, 1), max(layers - 1, 2), 2))
    return Skipped(numbers, numbers)


def skipping(target: TorchTarget, skipped: Skipped) -> TorchTarget:
    """Return `target` without the sub-layers `skipped`; weights are shared, caches are not.

    Raises UsageError if the target does not have these layers, and UnsupportedModelError if the family's sub-layers are
    not known, or its layers are not a plain list.
    """
    model, family = target.model, target.support.family
    if family not in _FAMILIES:
        raise UnsupportedModelError(
            f"The sub-layers of {family} models cannot be skipped one by one; layer_skip drafts for "
            f"{', '.join(sorted(_FAMILIES))}. Choose another method."
        )
    parts = model_parts(model)
    skipped.check(parts.count)
    attention, mlp = _FAMILIES[family]
    left: dict[int, nn.Module] = {}
    for number, layer in enumerate(model.get_submodule(parts.layers)):
        if number not in skipped.attention:
            left[number] = layer if number not in skipped.mlp else _without(layer, *mlp, torch.zeros_like)
        elif number not in skipped.mlp:
            left[number] = _without(layer, *attention, _no_attention)
    return target.with_model(shorter(model, parts, left))


# for each family, the name of the attention within a layer and of the norms that it alone uses; the same of the MLP
_USUAL = ("self_attn", ("input_layernorm",)), ("mlp", ("post_attention_layernorm",))
_WRAPPED = (
    ("self_attn", ("input_layernorm", "post_attention_layernorm")),
    ("mlp", ("pre_feedforward_layernorm", "post_feedforward_layernorm")),
)
_FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "smollm3"), _USUAL),
    **dict.fromkeys(("gemma2", "gemma3_text"), _WRAPPED),
    "gpt2": (("attn", ("ln_1",)), ("mlp", ("ln_2",))),
    "gpt_neox": (("attention", ("input_layernorm",)), ("mlp", ("post_attention_layernorm",))),
}


def _without(layer: nn.Module, name: str, norms: tuple[str, ...], instead: Callable[..., Any]) -> nn.Module:
    """Return a copy of a layer without the norms, and with another forward of a sub-layer."""
    copied: nn.Module = shared_copy(layer)
    skipped = getattr(copied, name)
    skipped.forward = instead
    for child, _ in list(skipped.named_children()):
        delattr(skipped, child)  # so that unused weights are neither hashed nor compiled
    for norm in norms:
        setattr(copied, norm, nn.Identity())
    return copied


def _no_attention(hidden_states: torch.Tensor, *_args: object, **_kwargs: object) -> tuple[torch.Tensor, None]:
    return torch.zeros_like(hidden_states), None


def write_skipped(path: Path, skipped: Skipped, model: Any, about: Mapping[str, Any]) -> None:
    """Write a choice for `model`, with further JSON fields `about`; raises StoreError if the file cannot be written."""
    content = {
        "kind": _KIND, "format": _FORMAT, "model": fingerprint(model), "attention": skipped.attention,
        "mlp": skipped.mlp, **about,
    }  # fmt: skip
    store_file(path, (json.dumps(content, indent=1) + "\n").encode())


def read_skipped(path: Path, model: Any) -> Skipped:
    """Read the choice for `model`; raises StoreError if the file is missing, damaged, or of another kind or model."""
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or (content.get("kind"), content.get("format")) != (_KIND, _FORMAT):
            raise UsageError(f"it is not a file of skipped layers of format {_FORMAT}")
        if content.get("model") != fingerprint(model):
            raise UsageError("it was made for another model")
        skipped = Skipped(*(layer_numbers(content.get(name), name) for name in ("attention", "mlp")))
        skipped.check(int(model.config.num_hidden_layers))
    except (OSError, ValueError) as error:
        raise StoreError(
            f"The file {path} of skipped layers cannot be used: {str(error).rstrip('.')}. Make one for this model with "
            "scripts/skipped_layers.py."
        ) from error
    return skipped
