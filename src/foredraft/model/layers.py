"""A model's list of layers, and copies of the model that share its weights but run other layers.

A copy's modules are new and its weights are the model's, so the model's own forward code runs.
Does not depend on what the layers are replaced for.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from foredraft.errors import UnsupportedModelError, UsageError


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The modules that an early exit needs, as paths of module names, and the number of layers."""

    layers: str
    norm: str
    lm_head: str
    count: int

    def check_exit(self, layers: int) -> None:
        """Raise UsageError unless an exit after `layers` layers has at least one layer before and one after it."""
        if not 1 <= layers < self.count:
            raise UsageError(f"layers is {layers}; this model has {self.count}, so it must be 1 to {self.count - 1}.")


def model_parts(model: Any) -> ModelParts:
    """Find these; raises UnsupportedModelError if the layers are no plain list, or hooks spread them over devices."""
    family, count = str(model.config.model_type), int(model.config.num_hidden_layers)
    modules = dict(model.named_modules())
    lists = [path for path, each in modules.items() if isinstance(each, nn.ModuleList) and len(each) == count]
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
    lm_head = next(path for path, each in modules.items() if each is head)
    return ModelParts(path, norms[0], lm_head, count)


def shared_copy(module: nn.Module) -> Any:
    """Return a copy of a module and its submodules, which are new, that shares weights and hooks."""
    copied = copy.copy(module)
    children = {name: None if child is None else shared_copy(child) for name, child in vars(module)["_modules"].items()}
    vars(copied)["_modules"] = children
    return copied


def shorter(
    model: Any, parts: ModelParts, layers: Mapping[int, nn.Module], replaced: Mapping[str, nn.Module] | None = None
) -> Any:
    """Return a model of the same kind that shares the weights and runs fewer layers, numbered from 0 in the KV cache.

    `layers` are in order, by the index of the layer in `model` that they correspond to; `replaced` are other modules to
    replace, by path. Raises UnsupportedModelError if the model's configuration cannot describe these layers.
    """
    config = copy.deepcopy(model.config)
    kinds = getattr(model.config, "layer_types", None)
    wanted = kinds and [kinds[index] for index in layers]
    config.num_hidden_layers = len(layers)
    if wanted and wanted != config.layer_types:  # some configurations compute them from the number of layers
        try:
            config.layer_types = wanted
        except AttributeError as error:
            raise UnsupportedModelError(
                f"The configuration of this {config.model_type} model computes the types of layers from their number, "
                f"and of {len(layers)} layers gives others than these have; draft with another method."
            ) from error
    result = shared_copy(model)
    result.config = result.base_model.config = config
    copies = nn.ModuleList(map(shared_copy, layers.values()))
    for index, layer in enumerate(copies):
        for module in layer.modules():
            own = vars(module)
            own.update({name: value for name, value in (("layer_idx", index), ("config", config)) if name in own})
    for path, module in {parts.layers: copies, **(replaced or {})}.items():
        result.set_submodule(path, module)
    return result


LAST = -1  # the layer, as `Needs.hidden` numbers them, of the last hidden states


def eagle_layers(count: int) -> tuple[int, ...]:
    """Return the layers that EAGLE-3's authors read in a model of `count` layers: a low, a middle and a high one."""
    return (2, count // 2, count - 3) if count > 5 else (0, count // 2, count - 1)


def usual_taps(model: Any) -> tuple[tuple[int, ...], ...]:
    """Return the layers whose states a compiled pass returns together: EAGLE-3's, and what enters the last norm.

    Empty if the model's layers are no plain list.
    """
    try:
        count = model_parts(model).count
    except UnsupportedModelError:
        return ()
    return eagle_layers(count), (count,)


@contextmanager
def tapped_states(model: Any, layers: Iterable[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Collect what enters these layers in the block, float[B, R, D]; for `LAST`, what enters the LM head.

    The number of layers names the last norm. The LM head may be given fewer rows than a layer: those that are scored.
    """
    found: dict[int, torch.Tensor] = {}
    parts = model_parts(model) if set(layers) - {LAST} else None
    own = [] if parts is None else [*model.get_submodule(parts.layers), model.get_submodule(parts.norm)]
    with ExitStack() as stack:
        for number in layers:
            module = model.get_output_embeddings() if number == LAST else own[number]
            stack.enter_context(module.register_forward_pre_hook(partial(_keep, found, number)))
        yield found


def _keep(found: dict[int, torch.Tensor], number: int, _module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    found[number] = inputs[0]


def _norms(model: Any, layers: str) -> list[str]:
    """Return the paths of possible final norms: siblings of the list named as norms; the embedding's if it is alone."""
    owner, dot, _ = layers.rpartition(".")
    names = [name for name, _ in model.get_submodule(owner).named_children()]
    norms = [f"{owner}{dot}{name}" for name in names if "norm" in name or name.startswith("ln_")]
    return [name for name in norms if "emb" not in name] or norms  # LFM2's last one is its `embedding_norm`
