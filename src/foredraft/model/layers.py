"""A model's list of layers, and copies of the model that share its weights but run other layers.

A copy is shallow: the modules on the way down to the list are new, everything else is the model's own, so that its own
forward embeds, scales, masks and rotates as ever. Knows transformers' modules; not what the layers are replaced for.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from foredraft.errors import UnsupportedModelError, UsageError

LayerForward = Callable[..., torch.Tensor]
"""What stands in for a layer: hidden states, float[B, R, D], and all that the model gives a layer, to hidden states."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Where a model keeps what an early exit needs, as paths of module names.

    Attributes:
        layers: the list of layers.
        norm: what normalises the last layer's output.
        lm_head: what scores it.
        count: how many layers there are.
        tuples: whether a layer returns a tuple with the hidden states first, rather than the hidden states.
    """

    layers: str
    norm: str
    lm_head: str
    count: int
    tuples: bool

    def check_exit(self, layers: int) -> None:
        """Refuse an exit behind `layers` layers where there is none before it, or none behind.

        Raises:
            UsageError: N out of range.
        """
        if not 1 <= layers < self.count:
            raise UsageError(f"layers is {layers}; this model has {self.count}, so it must be 1 to {self.count - 1}.")


def model_parts(model: Any) -> ModelParts:
    """Find a causal language model's layers, final norm and language model head.

    Raises:
        UnsupportedModelError: the layers are no plain list, or are spread over devices by hooks.
    """
    family, count = str(model.config.model_type), int(model.config.num_hidden_layers)
    lists = [
        path for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    outermost = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    norms = _norms(model, outermost[0]) if len(outermost) == 1 else []
    if len(outermost) != 1 or len(norms) != 1:
        raise UnsupportedModelError(
            f"The {count} layers of this {family} model are not a plain list followed by one norm, so it cannot exit "
            "early; draft with another method."
        )
    path = outermost[0]
    owners = [model, *(model.get_submodule(path.rsplit(".", i)[0]) for i in range(1, path.count(".") + 1))]
    if any("forward" in vars(owner) for owner in owners):
        raise UnsupportedModelError(
            f"This {family} model's forward is wrapped, as where layers are spread over devices (device='auto'), so it "
            "cannot exit early; load it onto one device."
        )
    head = model.get_output_embeddings()
    lm_head = next(name for name, module in model.named_modules() if module is head)
    return ModelParts(path, norms[0], lm_head, count, _returns_tuple(model, path))


def with_modules(model: Any, replaced: Mapping[str, nn.Module]) -> Any:
    """Return a copy of `model` with other modules at some paths; all weights that are not replaced are shared."""
    twin = _shallow(model)
    for path, module in replaced.items():
        owner = twin
        *above, name = path.split(".")
        for step in above:
            own = _shallow(getattr(owner, step))
            setattr(owner, step, own)
            owner = own
        setattr(owner, name, module)
    return twin


def with_layers(
    model: Any,
    parts: ModelParts,
    chosen: Mapping[int, nn.Module | LayerForward],
    replaced: Mapping[str, nn.Module] | None = None,
) -> Any:
    """Return a copy of `model` that runs `chosen` layers, by their place, and passes the others' input on.

    Args:
        model: whose weights are shared.
        parts: what `model_parts` says of it.
        chosen: layers, or functions that stand in for the layer in that place.
        replaced: further modules, by path.
    """
    own = model.get_submodule(parts.layers)
    places = [chosen.get(place, passed_on) for place in range(parts.count)]
    layers = [
        each if isinstance(each, nn.Module) else standing_in(own[place], each, tuples=parts.tuples)
        for place, each in enumerate(places)
    ]
    return with_modules(model, {parts.layers: nn.ModuleList(layers), **(replaced or {})})


def standing_in(layer: nn.Module, forward: LayerForward, *, tuples: bool) -> nn.Module:
    """Return what stands in for `layer` in a list: its attributes, none of its weights, and `forward` for its own."""
    twin: nn.Module = _shallow(layer)
    for what in ("_modules", "_forward_hooks", "_forward_pre_hooks"):
        vars(twin)[what] = OrderedDict()  # weights that nobody runs can be freed, and hooks are the layer's own
    twin.forward = (lambda *args, **kwargs: (forward(*args, **kwargs),)) if tuples else forward
    return twin


def passed_on(hidden: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
    """Return hidden states as they came: what stands in for a layer that is left out."""
    return hidden


def _shallow(module: nn.Module) -> Any:
    twin = copy.copy(module)
    vars(twin)["_modules"] = dict(vars(module)["_modules"])  # else a module set in the twin would be set in both
    return twin


def _norms(model: Any, layers: str) -> list[str]:
    """Return the paths of what may be the final norm: beside the list, a norm that is not the embedding's."""
    owner, _, _ = layers.rpartition(".")
    names = [name for name, _ in model.get_submodule(owner).named_children()]
    return [
        f"{owner}.{name}" if owner else name
        for name in names
        if ("norm" in name or name.startswith("ln_")) and "emb" not in name
    ]


@torch.inference_mode()
def _returns_tuple(model: Any, layers: str) -> bool:
    """Run one token, and see what the first layer returns."""
    seen: list[bool] = []
    first = model.get_submodule(layers)[0]
    handle = first.register_forward_hook(lambda _module, _inputs, output: seen.append(isinstance(output, tuple)))
    try:
        token = torch.zeros((1, 1), dtype=torch.long, device=model.get_input_embeddings().weight.device)
        model(input_ids=token, attention_mask=torch.ones_like(token), use_cache=False)
    finally:
        handle.remove()
    return seen[0]
