"""Checkpoints with a `quantization_config`: dequantised, here or by transformers, run by a library, or refused.

Does not know how any kind computes.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from foredraft.errors import ForedraftWarning, UsageError, told
from foredraft.model.machine import usable_memory
from foredraft.model.mapped import keeper
from foredraft.model.packed import ROTATIONS, PackedTensors, packed_tensors
from foredraft.model.rounding import dtype_name
from foredraft.model.text_part import empty_model, load_text_model, text_config, text_name

_DECOMPRESSED = "compressed-tensors"  # transformers dequantises it in the first pass, if not before
_DEQUANTISED = (_DECOMPRESSED, "fp8", "mxfp8", "mxfp4")  # on a CPU
_PACKAGES = {"gptq": "optimum and gptqmodel", "hqq": "hqq"}  # where transformers' error does not name all
UNCOMPILED = (
    "This model's weights are quantised, and a library of their kind multiplies by them, so it runs uncompiled; "
    "foredraft compiles the model's GGUF file, or a checkpoint that is not quantised."
)


def packed_weights(location: str, revision: str | None = None) -> PackedTensors | None:
    """Return the tensors of a folder or hub id whose matrices are packed integers; None for another.

    Raises UsageError as `PackedTensors` does.
    """
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    if not (settings := _settings(location, revision)):
        return None
    read = partial(cached_file, location, revision=revision, _raise_exceptions_for_missing_entries=False)
    files = [file for file in [read("model.safetensors")] if file]
    if not files and (index := read("model.safetensors.index.json")):
        files = get_checkpoint_shard_files(location, index, revision=revision)[0]
    return packed_tensors([Path(file) for file in files], settings)


def _settings(location: str, revision: str | None = None) -> Any:
    """Return the `quantization_config` of a folder or hub id, or of its text model; None without."""
    from transformers import PreTrainedConfig

    config = PreTrainedConfig.get_config_dict(location, revision=revision)[0]
    return config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")


def load_packed(
    folder: str, config: Any, tensors: PackedTensors, dtype: torch.dtype | str, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the model of a folder with packed matrices, and transformers' information on the load.

    `config` loses its quantisation. The dtype "auto" is bfloat16, in which the integers of matrices are multiplied, or
    float32 if the checkpoint's is. A ForedraftWarning says what was dequantised.
    """
    settings = config.quantization_config
    del config.quantization_config
    if isinstance(dtype, str):
        dtype = torch.float32 if text_config(config).dtype == torch.float32 else torch.bfloat16
    size = dtype.itemsize * sum(each.numel() for each in empty_model(config).parameters())
    state = tensors.state(dtype, keeper(size))
    given = {"state_dict": state, "dtype": dtype, "ignore_mismatched_sizes": True}  # `_read` refuses them by name
    model, found = load_text_model(None, config, **given, **options)
    # AutoGPTQ wrote biases of zeros for all matrices
    zeros = {text_name(name) for name, each in state.items() if name.endswith(".bias") and not each.any()}
    found["unexpected_keys"] = set(found["unexpected_keys"]) - zeros
    _tell(folder, settings, model)
    return model, found


@torch.no_grad()
def load_quantised(folder: Path, config: Any, device: str, load: Callable[[], Any]) -> Any:
    """Return what `load` does with a quantised checkpoint's configuration, by which its weights are dequantised.

    `load` returns transformers' model and its information on a load. A ForedraftWarning says what was dequantised.
    Raises UsageError for what `load` raises, and for what transformers would leave out.
    """
    settings, cause = config.quantization_config, None
    kind, groups = str(settings.get("quant_method")), list((settings.get("config_groups") or {}).values())
    dequantises = kind in _DEQUANTISED and len(groups) <= 1  # transformers would read all matrices by one group
    if dequantises and (device == "cpu" or kind == _DECOMPRESSED):
        settings["dequantize"] = True
    if not (wrong := _unsupported(config, grows=dequantises and device == "cpu")):
        try:
            model, found = load()
            quantised = getattr(model, "is_quantized", False)
            wrong = _misread(folder, () if quantised else settings.get("weight_block_size") or ())
            if missing := sorted(found["missing_keys"]):
                wrong = f"it finds no weight {missing[0]}"
            if quantised and device == "cpu" and not wrong:
                model(torch.zeros(1, 1, dtype=torch.long))  # a library may lack what its products need
        except Exception as error:  # noqa: BLE001  # each kind has a library of its own
            wrong, cause = told(error).removesuffix("."), error
    if wrong:
        known = isinstance(cause, ImportError) or (cause is not None and kind in _PACKAGES)
        install = f"Install {_PACKAGES.get(kind, 'what it names')}, or take" if known else "Take"
        raise UsageError(
            f"The checkpoint {folder} is quantised (quant_method {kind}), and transformers cannot run it here: {wrong}."
            f" {install} the model's GGUF file, or a checkpoint that is not quantised."
        ) from cause
    if dequantises and not quantised:
        _tell(folder, settings, model)
    return model, found


def _tell(folder: Path | str, settings: Mapping[str, Any], model: Any) -> None:
    """Warn of what the weights of a dequantised model take, and of activations that would be quantised elsewhere."""
    kind, groups = settings.get("quant_method"), (settings.get("config_groups") or {}).values()
    rounds = any(each.get("input_activations") for each in groups) or kind in ("fp8", "mxfp8")
    exact = " Activations are not quantised, as drafted texts would then differ from plain decoding's."
    taken = f"{sum(each.nbytes for each in model.parameters()) / 1e9:.1f} GB"
    warnings.warn(
        f"The weights of {folder} are quantised ({kind}); dequantised to {dtype_name(model)}, they take {taken}."
        + exact * rounds,
        ForedraftWarning,
        stacklevel=2,
    )


def _unsupported(config: Any, *, grows: bool) -> str:
    """Return why a checkpoint is not read at all; "" if it is. If it `grows`, its weights become numbers of 16 bits."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    settings, memory = config.quantization_config, usable_memory()
    known = {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"}
    if settings.get("quant_method") not in known and not settings.get("load_in_8bit"):
        return "it does not know this kind"
    if rotated := [field for field in ROTATIONS if settings.get(field)]:
        return f"it would leave {rotated[0]} out"
    size = 2 * sum(each.numel() for each in empty_model(config).parameters()) if grows else 0
    if size > memory:
        return f"dequantised, its weights take {size / 1e9:.1f} GB, and there are {memory / 1e9:.1f} GB of memory"
    return ""


def _misread(folder: Path, block: tuple[int, ...]) -> str:
    """Return which matrix of a checkpoint transformers 5.24 dequantises by other scales than its own; "" for none."""
    shapes = dict[str, Any]()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118  # no dict
    for name, sizes in shapes.items():
        counts = shapes.get(f"{name}_scale_inv", ())  # of blocks, by which transformers divides the sizes
        if any(count > 1 and size % edge for size, count, edge in zip(sizes, counts, block, strict=False)):
            return f"it reads {name}, {' x '.join(map(str, sizes))} numbers, by other blocks than {block}"
        if ".experts." in name and name.endswith("weight_global_scale"):
            return f"it leaves {name} out"
    return ""


def dequantiser(model: Any) -> Any:
    """Return the quantiser by which transformers reads a checkpoint that it dequantised; None for another model."""
    from transformers.quantizers.auto import AutoHfQuantizer

    settings = _settings(model.config.name_or_path)
    if not settings or getattr(model, "is_quantized", False):
        return None
    quantiser = AutoHfQuantizer.from_config({**settings, "dequantize": True})
    quantiser.validate_environment(device_map=None)  # completes it
    return quantiser
