"""Gives the mixers of a model's recurrent layers operators that follow a tree, where a cache of ours is passed to them.

A mixer of transformers computes its projections and calls functions of its module for the convolution and the scan. It
keeps its code and its weights; only what these names mean is replaced, and only for our caches, so that the model's own
`generate` is as before. A mixer that calls none of these functions is not adopted.
"""

from collections.abc import Callable
from functools import partial
from inspect import unwrap
from types import FunctionType
from typing import Any

from transformers.cache_utils import Cache

from foredraft.errors import UnsupportedModelError
from foredraft.model.recurrent import operators
from foredraft.model.recurrent.layer import OperatorLayer
from foredraft.model.support import inspect

_OPERATORS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": operators.convolution,
    "torch_chunk_gated_delta_rule": operators.gated_delta_rule,
    "chunk_kimi_delta_attention": operators.gated_delta_rule,
    "mamba2_chunk_scan": operators.mamba2_scan,
    "mamba_selective_scan": operators.mamba_scan,
}
"""What stands for each function of transformers' modules of recurrent models."""


_BLOCKS: dict[str, Callable[..., Any]] = {"RecurrentGemmaRecurrentBlock": operators.griffin_block}
"""What stands for the forward of a mixer's class that calls no such function."""


class _TreeForward:
    """The forward of the mixer of one layer, which is copied and pickled as one of the copied mixer."""

    def __init__(self, mixer: Any, number: int) -> None:
        self._mixer, self._number = mixer, number
        self._layer: Any = None  # of the cache of the running pass
        self._theirs = type(mixer).forward
        code = unwrap(self._theirs)
        scope = code.__globals__ | {name: partial(self._call, _OPERATORS[name]) for name in _called(mixer)}
        self._ours: Callable[..., Any] = FunctionType(
            code.__code__, scope, code.__name__, code.__defaults__, code.__closure__
        )
        if block := _BLOCKS.get(type(mixer).__name__):
            self._ours = partial(self._call, block)

    def __reduce__(self) -> tuple[type["_TreeForward"], tuple[Any, int]]:
        return _TreeForward, (self._mixer, self._number)

    def __call__(self, *args: Any, **options: Any) -> Any:
        caches = (each for each in (*args, *options.values()) if isinstance(each, Cache))
        layers = next((each.layers[self._number :] for each in caches), [])
        if not layers or not isinstance(layers[0], OperatorLayer):
            return self._theirs(self._mixer, *args, **options)
        self._layer = layers[0]
        return self._ours(self._mixer, *args, **options)

    def _call(self, operator: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return operator(self._layer, *args, **options)


def adopt(model: Any) -> None:
    """Do so for the layers of a model that are recurrent; UnsupportedModelError where a layer's mixer is not known."""
    recurrent = {number for number, each in enumerate(inspect(model.config).recurrent) if each}
    if not recurrent:
        return
    mixers = [
        (number, module)
        for path, module in model.named_modules()
        if _called(module) or type(module).__name__ in _BLOCKS
        for number in [int(part) for part in path.split(".") if part.isdigit()][:1]  # none outside of a list of layers
    ]
    if missing := recurrent ^ {number for number, _ in mixers}:
        raise UnsupportedModelError(
            f"Layer {min(missing)} of this {model.config.model_type} model keeps a recurrent state, and its code calls "
            f"none of the functions that foredraft replaces ({', '.join(_OPERATORS)}), so drafts cannot be verified; "
            "load the model with transformers' own classes."
        )
    for number, mixer in mixers:
        own = vars(mixer).get("forward")
        if own is not None and not isinstance(own, _TreeForward):
            raise UnsupportedModelError(
                f"The recurrent layers of this {model.config.model_type} model are wrapped, as where layers are spread "
                "over devices (device='auto'), so drafts cannot be verified; load it onto one device."
            )
        mixer.forward = _TreeForward(mixer, number)  # also of a copied mixer, which has the other one's


def _called(module: Any) -> set[str]:
    """Return the names of the functions to replace that a module's own forward calls."""
    code = unwrap(type(module).forward)
    return {name for name in code.__code__.co_names if name in _OPERATORS and name in code.__globals__}
