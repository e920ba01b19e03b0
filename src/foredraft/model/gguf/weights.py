"""The weights of a GGUF file as those of a transformers model: each weight from its tensors, each tensor used.

Puts tensors together and in order, by the tables of this package and the names that the package `gguf` has. Does not
read metadata, and does not build the model.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from foredraft.errors import UnsupportedModelError, told
from foredraft.model.gguf.architectures import ABSENT, PARTS, TENSORS, TIED
from foredraft.model.gguf.configuration import row_of
from foredraft.model.gguf.rearranged import CHANGES
from foredraft.model.gguf.tensors import Tensors

_LAYER = re.compile(r"(?:\w+\.)*?(?:layers|h)\.(\d+)\.(.+)")  # of transformers: a layer's number, and the rest
_BLOCK = re.compile(r"blk\.(\d+)\.")  # of llama.cpp
_INDEXED = re.compile(r"(.+)\.(\d+)")
_SUFFIXES = ("", ".weight", ".bias")
_KEYS_AND_VALUES = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
_OF_ROTARY = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


class _Source(NamedTuple):
    """A tensor that a weight may be: its name in two parts, and if it is a stack, the number in it."""

    base: str
    suffix: str
    number: int | None


def state_of(
    architecture: str, tensors: Tensors, wanted: Mapping[str, torch.Tensor], config: Any, dtype: torch.dtype,
    keep: Callable[[torch.Tensor], torch.Tensor], blocks: int,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return a model's weights from a file, each as `keep` returns it: those of `wanted`, which has their shapes.

    `blocks` are the file's layers, with those that draft. Raises UnsupportedModelError if the file lacks a weight, if a
    shape differs, or if a tensor, or a part of one, is left over.
    """
    state = weights_named(architecture, tensors, wanted, config, dtype, keep)
    left = [name for name in tensors.unused() if name not in _OF_ROTARY and not _is_idle(name, config, blocks)]
    if left:
        raise UnsupportedModelError(
            f"This GGUF file has {len(left)} tensors that are not, or not as a whole, weights of the model that its "
            f"keys say, such as {left[0]}, so its scores could be another model's. Give the model as a transformers "
            "folder or a hub id, and report the tensor."
        )
    return state


def weights_named(
    architecture: str, tensors: Tensors, wanted: Mapping[str, torch.Tensor], config: Any, dtype: torch.dtype,
    keep: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return these weights as `state_of` does, whatever other tensors the file has."""
    row, state = row_of(architecture), {}
    table = {**_known_names(architecture), **TENSORS, **row.tensors}
    for name, like in wanted.items():
        try:
            state[name] = keep(_weight(table, row.changes, tensors, name, like, config, dtype))
        except (RuntimeError, IndexError) as error:  # of torch: the sizes in the keys do not fit the tensor
            raise UnsupportedModelError(
                f"The tensors of the weight {name} do not have the sizes that this GGUF file's keys say "
                f"({told(error)}); download it again, or give the model as a transformers folder or a hub id."
            ) from error
    return state


def _is_idle(tensor: str, config: Any, blocks: int) -> bool:
    """Return whether a tensor takes no part in the text.

    Behind the last layer lie heads that draft (MTP). Layers that take the keys and values of an earlier one (Gemma 3n
    and 4) have their own in the file all the same.
    """
    found = _BLOCK.match(tensor)
    layer, layers = int(found[1]) if found else -1, config.num_hidden_layers
    takes = layers - getattr(config, "num_kv_shared_layers", 0) <= layer < layers  # a field of few families
    return layers <= layer < blocks or (takes and tensor.endswith(_KEYS_AND_VALUES))


def _known_names(architecture: str) -> dict[str, str]:
    """Return the tensors of modules, in a layer or the model, that the package `gguf` knows by their published names.

    Raises UnsupportedModelError if this `gguf` is older than the architecture.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map  # an optional package

    number = next((number for number, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if number is None:
        raise UnsupportedModelError(
            f"This GGUF file is a model of the architecture {architecture!r}, which this version of the package gguf "
            "does not know; update it: pip install -U gguf."
        )
    names = {key: tensor for key, (_, tensor) in get_tensor_name_map(number, 1).mapping.items()}
    in_layer = {found[2]: tensor for key, tensor in names.items() if (found := _LAYER.fullmatch(key))}
    return names | {path: _BLOCK.sub("", tensor) for path, tensor in in_layer.items()}


def _weight(
    table: Mapping[str, str], changes: Mapping[str, str], tensors: Tensors, name: str, like: torch.Tensor, config: Any,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return one weight of the shape of `like`, by a table of modules' tensors and one of their changes."""
    found = _LAYER.fullmatch(name)
    prefix, path = (f"blk.{found[1]}.", found[2]) if found else ("", name)
    for source in _sources(table, path):
        values = _joined(tensors, prefix, source.base, source.suffix, len(like), dtype)
        if values is None and source.base in TIED:
            values = _joined(tensors, prefix, TIED[source.base], source.suffix, len(like), dtype)
        if values is None:
            continue
        change = changes.get(source.base + source.suffix) or changes.get(source.base)
        values = CHANGES[change](values, config) if change else values
        values = values if source.number is None else values[source.number]
        break
    else:
        values = _absent(name, like, config)
    if values.squeeze().shape != like.squeeze().shape:
        raise UnsupportedModelError(
            f"The weight {name} has the shape {tuple(values.shape)} in this GGUF file, but its keys say "
            f"{tuple(like.shape)}; give the model as a transformers folder or a hub id."
        )
    return values.reshape(like.shape).to(dtype).contiguous()


def _absent(name: str, like: torch.Tensor, config: Any) -> torch.Tensor:
    """Return the weight that a file has as a key, or leaves out where it changes nothing.

    UnsupportedModelError for another one.
    """
    value = next((value for end, value in ABSENT.items() if name.endswith(end)), None)
    found = _LAYER.fullmatch(name)
    if found and (numbers := getattr(config, "layer_numbers", {}).get(found[2])):  # set by `families.py`
        value = numbers[int(found[1])]
    if value is None:
        raise UnsupportedModelError(
            f"This GGUF file has no tensor for the weight {name}. Download it again, or give the model as a "
            "transformers folder or a hub id."
        )
    return torch.full(like.shape, value)


def _sources(table: Mapping[str, str], path: str) -> Iterator[_Source]:
    """Yield the tensors that the weight at a module's path may be, in a layer or the model."""
    module, _, kind = path.rpartition(".")
    biased = path.removesuffix("_bias") if path.endswith("_bias") else ""  # the module's, but a weight of its own
    for place, suffixes in ((path, _SUFFIXES), (module, (f".{kind}",)), (biased, (".bias",))):
        indexed = _INDEXED.fullmatch(place)
        index = int(indexed[2]) if place not in table and indexed else None
        names = table.get(place if index is None or indexed is None else indexed[1])
        for name in names.split("|") if names else ():
            for suffix in suffixes:
                yield _Source(name, suffix, index)


def _joined(
    tensors: Tensors, prefix: str, base: str, suffix: str, rows: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return a tensor; or its parts, joined; or its `rows` rows of one that it is a part of; None if there is none."""
    if f"{prefix}{base}{suffix}" in tensors:
        return tensors.read(f"{prefix}{base}{suffix}", dtype)
    parts = [f"{prefix}{part}{suffix}" for part in PARTS.get(base, ())]
    if parts and all(part in tensors for part in parts):
        found = [tensors.read(part, dtype) for part in parts]
        if base == "ssm_conv1d_qkv":  # with dimensions of one
            return torch.cat([part.flatten(0, -2) for part in found])
        if base == "attn_kv_b":  # of each head, its key's rows, which the file has as columns, then its value's
            return torch.cat([found[0].transpose(1, 2), found[1]], dim=1).flatten(0, 1)
        return torch.cat(found, dim=-1 if suffix == ".bias" else -2)
    for whole, names in PARTS.items():
        if base in names and f"{prefix}{whole}{suffix}" in tensors:
            fused, from_end = f"{prefix}{whole}{suffix}", len(names) - names.index(base)
            # keys have as many rows as values
            start = 0 if from_end == len(names) else tensors.shapes[fused][0] - from_end * rows
            return tensors.read(fused, dtype, slice(start, start + rows))
    return None
