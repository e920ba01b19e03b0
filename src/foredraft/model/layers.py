"""A model's list of layers, and copies of the model that share its weights but run other layers.

A copy is shallow: modules are new, their weights are the model's own, so that its own forward embeds, scales, masks and
rotates as ever. Knows transformers' modules; not what the layers are replaced for.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from foredraft.errors import UnsupportedModelError, UsageError


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Where a model keeps what an early exit needs, as paths of module names.

    Attributes:
        layers: the list of layers.
        norm: what normalises the last layer's output.
        lm_head: what scores it.
        count: how many layers there are.
    """

    layers: str
    norm: str
    lm_head: str
    count: int

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
    return ModelParts(path, norms[0], lm_head, count)


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


class Passage:
    """Where hidden states enter a part of a model that begins late, or come out of one that ends early.

    Args:
        enters: whether they enter, in the place of what the embeddings give.

    Attributes:
        enters: the same.
        states: float[B, R, D], of a pass: given before it, or there after it.
    """

    def __init__(self, *, enters: bool) -> None:
        self.enters = enters
        self.states = torch.empty(0)

    def into(self, layer: nn.Module) -> nn.Module:
        """Return a copy of a layer that takes its input from here."""
        twin = _shallow(layer)
        vars(twin)["_forward_pre_hooks"] = OrderedDict(vars(layer)["_forward_pre_hooks"])
        twin.register_forward_pre_hook(lambda _layer, inputs: (self.states, *inputs[1:]))
        return twin  # type: ignore[no-any-return]  # a module's copy is Any

    def out_of(self, layer: nn.Module) -> nn.Module:
        """Return a copy of a layer that leaves its output here besides."""

        def leave(_layer: nn.Module, _inputs: object, output: Any) -> None:
            self.states = output[0] if isinstance(output, tuple) else output

        twin = _shallow(layer)
        vars(twin)["_forward_hooks"] = OrderedDict(vars(layer)["_forward_hooks"])
        twin.register_forward_hook(leave)
        return twin  # type: ignore[no-any-return]  # the same


def shorter(
    model: Any, parts: ModelParts, layers: Mapping[int, nn.Module], replaced: Mapping[str, nn.Module] | None = None
) -> Any:
    """Return a model of the same kind that runs fewer layers, whose keys and values lie in the cache from 0 on.

    Args:
        model: whose weights are shared.
        parts: what `model_parts` says of it.
        layers: the layers in order, by the place of the layer in `model` whose kind they are of.
        replaced: further modules, by path.
    """
    config = copy.deepcopy(model.config)
    numbered = nn.ModuleList(_numbered(layer, place, config) for place, layer in enumerate(layers.values()))
    twin = with_modules(model, {parts.layers: numbered, **(replaced or {})})
    config.num_hidden_layers = len(layers)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = [kinds[place] for place in layers]
    twin.config = twin.base_model.config = config
    return twin


@contextmanager
def scored_states(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collect what the model's LM head scores until the block ends: float[B, R, D], its last hidden states."""
    found: list[torch.Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _module, inputs: found.append(inputs[0]))
    try:
        yield found
    finally:
        handle.remove()


def standing_in(layer: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Return what stands in for a module: its attributes, none of its weights, and `forward` for its own."""
    twin: nn.Module = _shallow(layer)
    for what in ("_modules", "_forward_hooks", "_forward_pre_hooks"):
        vars(twin)[what] = OrderedDict()  # weights that nobody runs can be freed, and hooks are the layer's own
    twin.forward = forward
    return twin


def _numbered(module: nn.Module, place: int, config: Any) -> nn.Module:
    """Return a copy of a layer for a model of that configuration, its keys and values at `place` in the cache."""
    twin = _shallow(module)
    vars(twin).update({name: what for name, what in (("layer_idx", place), ("config", config)) if name in vars(twin)})
    modules = vars(twin)["_modules"]
    modules |= {name: _numbered(child, place, config) for name, child in modules.items() if child is not None}
    return twin  # type: ignore[no-any-return]  # a module's copy is Any


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
