"""Load a model or a tokenizer by name or path, with clear messages on failure.

Uses transformers' loaders and knows the default model's name. Does not depend on what the model is used for.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from foredraft.errors import ForedraftError, UsageError, told
from foredraft.model.gguf.files import SMOLLM2, gguf_folder, is_gguf, no_progress_bar, smollm2_file, weights_of
from foredraft.model.gguf.reader import load_gguf
from foredraft.model.hub import named_gguf, why_unreachable
from foredraft.model.machine import limit_threads
from foredraft.model.rounded import KINDS, rounded_folder
from foredraft.options import check_known, user_path

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


@dataclass(frozen=True)
class Outline:
    """What is known of a named model without its weights, by the names of transformers' model."""

    config: Any
    generation_config: Any
    name_or_path: str
    dtype: torch.dtype
    vocabulary: int  # number of logits
    parameters: int  # how many numbers its weights are
    device: torch.device


class LoadingOptions(TypedDict, total=False):
    """Further arguments of transformers' `from_pretrained`; see its documentation."""

    device_map: Any
    revision: str
    trust_remote_code: bool
    quantization_config: Any
    attn_implementation: str


_FOR_ALL = ("revision", "trust_remote_code")  # options that configurations and tokenizers accept too
_LAYER = re.compile(r"(.*?)\.(\d+)\.(\w+)")  # of a weight's name: the path of the layers, a number, and a part of it
_DRAFTING = {"eh_proj", "enorm", "hnorm", "mtp_block"}  # parts of a layer that drafts (MTP), and of no other


def load_tokenizer(model: str, **options: Unpack[LoadingOptions]) -> Any:
    """Load the tokenizer of `smollm2`, a GGUF file, a hub id, or a folder; raises UsageError if that fails."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # slow to import; help pages do not need them

    location, given = located(model, options.get("revision")), _chosen(options, _FOR_ALL)
    # for some models, such as Qwen 2, AutoTokenizer takes a class that splits by its own rules, not by the folder's
    loader = PreTrainedTokenizerFast if weights_of(location) else AutoTokenizer
    with usage_errors("tokenizer", model):
        return loader.from_pretrained(location, **given)


def load_ends(model: str) -> list[str]:
    """Return the tokens that end a turn by default: the generation configuration's, else the tokenizer's, if any.

    Of an id that is no token, it is the number. Raises UsageError for a model without a tokenizer, or malformed ids.
    """
    location = located(model)  # once, as it may ask the hub
    config, tokenizer = load_config(location), load_tokenizer(location)
    with usage_errors("end of a turn", model):
        given = _generation_config(location, config).eos_token_id
        ids = tokenizer.eos_token_id if given is None else given
        if ids is None:  # only the answer's length ends one
            return []
        listed = ids if isinstance(ids, list) else [ids]
        tokens = tokenizer.convert_ids_to_tokens(listed)
    return [str(number if token is None else token) for number, token in zip(listed, tokens, strict=True)]


def load_config(model: str, **options: Unpack[LoadingOptions]) -> Any:
    """Read a model's configuration, without its weights; names and errors are those of `load_model`."""
    from transformers import AutoConfig

    from foredraft.model.text_part import text_class

    location, given = located(model, options.get("revision")), _chosen(options, _FOR_ALL)
    with usage_errors("model", model):
        config = AutoConfig.from_pretrained(location, **given)
        text_class(config)  # raises where there is none
    return config


def has_other_parts(config: Any) -> bool:
    """Return whether a configuration is that of a text model together with a vision or audio part."""
    return config.get_text_config() is not config


def load_model(
    model: str, dtype: str | torch.dtype = "auto", device: str | None = None, **options: Unpack[LoadingOptions]
) -> Any:
    """Load a causal language model, `smollm2`, a GGUF file, a hub id, or a folder, in evaluation mode.

    The dtype is torch's or its name; "auto" takes the checkpoint's; "q8_0" and "q4_0" round its matrices to GGUF's
    blocks of 8 or 4 bits. The device is torch's; None is the first GPU or the CPU; "auto" spreads the model over
    devices (accelerate). Options go to transformers; `device_map` replaces `device`. Of a checkpoint with a vision or
    audio part, only the text model is loaded. Raises UsageError if the model cannot be loaded or lacks a weight, or
    dtype or device does not exist, and UnsupportedModelError if transformers has no causal language model for it.
    """
    chosen_dtype = _dtype(dtype)
    given = _chosen(options, LoadingOptions.__annotations__)
    chosen_device = _device(device)
    # what quantises places the model itself
    if chosen_device == "auto" or ("quantization_config" in given and chosen_device != "cpu"):
        given.setdefault("device_map", chosen_device)
    with usage_errors("model", model), no_progress_bar():
        loaded = _read(_source(model, dtype, options), chosen_device, dtype=chosen_dtype, **given)
        if "device_map" not in given and "quantization_config" not in given:
            loaded = loaded.to(chosen_device)
    config = loaded.config.get_text_config()
    # before 5.21, transformers took `sdpa` for Gemma 2 and VaultGemma, which does not cap their scores
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":  # noqa: SLF001  # transformers has no public name for it
        loaded.set_attn_implementation("eager")
    return loaded.eval()


def location_of_files(
    model: str, dtype: str | torch.dtype = "auto", device: str | None = None, **options: Unpack[LoadingOptions]
) -> str | None:
    """Return the folder or hub id whose files alone decide, with the dtype, what `load_model` returns; else None.

    They do on the CPU, if transformers gets no options.
    """
    if _device(device) != "cpu" or _chosen(options, LoadingOptions.__annotations__):
        return None
    _dtype(dtype)
    with usage_errors("model", model), no_progress_bar():
        return _source(model, dtype, options)


def load_outline(location: str, dtype: torch.dtype, vocabulary: int, parameters: int) -> Outline:
    """Return the outline of the model of a folder or hub id, which is loaded in a dtype."""
    from foredraft.model.text_part import text_config

    config = text_config(load_config(location))
    config.dtype = dtype
    with usage_errors("model", location):
        given = _generation_config(location, config)
    return Outline(config, given, location, dtype, vocabulary, parameters, torch.device("cpu"))


def _generation_config(location: str, config: Any) -> Any:
    """Return the generation configuration of a folder or hub id; without one, what its model's says of it."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(location)
    except OSError:  # there is none
        return GenerationConfig.from_model_config(config)


def _source(model: str, dtype: str | torch.dtype, options: LoadingOptions) -> str:
    """Return the folder or hub id to load in a dtype; of one that rounds, it is that of the rounded weights."""
    location = located(model, options.get("revision"))
    limit_threads()
    if dtype not in KINDS:
        return location
    read = partial(_read, location, dtype=torch.bfloat16, **_chosen(options, _FOR_ALL))
    return str(rounded_folder(location, str(dtype), options.get("revision"), read))


def _read(location: str, device: str = "cpu", **options: Any) -> Any:
    """Load a causal language model from a folder or hub id; UsageError for a weight that is missing there."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.hub import cached_file

    from foredraft.model.quantised import load_packed, load_quantised, packed_weights
    from foredraft.model.text_part import load_text_model, text_class

    if parts := weights_of(location):
        return load_gguf(Path(location), parts, **options)
    config = AutoConfig.from_pretrained(location, **{name: options[name] for name in _FOR_ALL if name in options})
    if text_class(config) is AutoModelForCausalLM and not has_other_parts(config):
        read: Any = AutoModelForCausalLM.from_pretrained  # its annotations do not know of two results
        load = partial(read, location, config=config, output_loading_info=True, **options)
    else:
        load = partial(load_text_model, location, config, **options)
    if has_other_parts(config) and (settings := vars(config.get_text_config()).pop("quantization_config", None)):
        config.quantization_config = settings  # where transformers looks for it
    revision, folder = options.get("revision"), ""
    settings = None if "quantization_config" in options else getattr(config, "quantization_config", None)
    if revision or settings:
        folder = str(Path(str(cached_file(location, "config.json", revision=revision))).parent)
    packed = packed_weights(location, revision) if settings and device == "cpu" else None
    if packed is not None:
        chosen = {name: value for name, value in options.items() if name not in _FOR_ALL}
        loaded, found = load_packed(folder, config, packed, **chosen)
        loaded.generation_config = _generation_config(folder, config)
    else:
        loaded, found = load_quantised(Path(folder), config, device, load) if settings else load()
    check_complete(location, found, loaded)
    if revision or packed:  # what is read later, such as an MTP layer, is of the same revision
        loaded.name_or_path = loaded.config.name_or_path = folder
    return loaded


def check_complete(location: str, found: Mapping[str, Any], model: Any) -> None:
    """Raise UsageError if transformers' information on a load says that a checkpoint lacks weights, or its layers more.

    Behind the last layer of `model` may be one that drafts (MTP). Quantised checkpoints may have biases of zeros.
    """
    if missing := sorted(found["missing_keys"]):
        others = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise UsageError(
            f"The checkpoint {location} has no weight {missing[0]}{others}, which transformers would fill with random "
            "numbers; copy or download it again, or give another."
        )
    if wrong := sorted(found.get("mismatched_keys", ())):
        name, stored, sizes = wrong[0]
        raise UsageError(
            f"The weight {name} of the checkpoint {location} is {tuple(stored)}, and by its config.json "
            f"{tuple(sizes)}; copy or download it again, or give another."
        )
    # the body alone has shorter names
    own = {each for name in model.state_dict() for each in (name, name.partition(".")[2])}
    quantised = getattr(model, "is_quantized", False)
    paths = {layer[1] for layer in map(_LAYER.match, own) if layer}
    count, further = model.config.get_text_config().num_hidden_layers, dict[int, set[str]]()
    unexpected = map(_LAYER.match, sorted(found["unexpected_keys"]))
    for layer in (each for each in unexpected if each and each[1] in paths):
        name = layer.string
        if int(layer[2]) >= count:
            further.setdefault(int(layer[2]), set()).add(layer[3])
        # such as `weight_scale`; GPT-2's masks are called `bias` too
        elif not quantised and (".weight" in name or name.removesuffix("bias") + "weight" in own):
            raise UsageError(
                f"The checkpoint {location} has a weight {name} that a {model.config.model_type} model of its "
                "config.json does not have, so its scores would be another model's; correct config.json, or give "
                "another."
            )
    if unused := [number for number, has in sorted(further.items()) if not has & _DRAFTING]:
        raise UsageError(
            f"The checkpoint {location} has a layer {unused[0]}, counted from 0, and its config.json says that there "
            f"are {count} (num_hidden_layers), so its scores would be another model's; copy or download it again, or "
            "mend the number."
        )


def located(model: str, revision: str | None = None) -> str:
    """Return the folder or hub id to pass to transformers; raises UsageError, or what `gguf_folder` does."""
    path = smollm2_file() if model == SMOLLM2 else named_gguf(model, revision) or user_path(model)
    if is_gguf(path):
        return str(gguf_folder(path))
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1
    if looks_local and not path.exists():
        raise UsageError(f"There is no folder {model}. Give a folder, a GGUF file, a hub id, or {SMOLLM2}.")
    if path.is_dir() and not (path / "config.json").exists():
        raise UsageError(f"The folder {path} has no config.json, so it holds no transformers model.")
    if path.exists():
        return str(path)
    _check_hub(model)
    return model


def _check_hub(model: str) -> None:
    """Raise UsageError if a model must come from a hub that cannot be reached."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError:  # not a valid model name; transformers explains why
        return
    if not cached and not constants.HF_HUB_OFFLINE and (reason := why_unreachable()):
        raise UsageError(
            f"There is no folder {model!r}, and the hub {constants.ENDPOINT} cannot be reached ({reason}). Give a "
            f"folder, a GGUF file, or {SMOLLM2}; or connect this machine."
        )


def _chosen(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the options among `names` that are set; raises UsageError for one that `LoadingOptions` does not have."""
    for name in options:
        check_known(name, LoadingOptions.__annotations__, "foredraft.load has no option", "It passes to transformers")
    return {name: options[name] for name in names if options.get(name) is not None}


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if name in ("auto", *KINDS):  # rounded weights say what they are
        return "auto"
    if name not in DTYPES:
        raise UsageError(f"dtype is {name!r}; choose auto, {', '.join((*DTYPES, *KINDS))}.")
    return DTYPES[name]


def _device(device: str | None) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "auto":
        return device
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device is {device!r}, which torch does not know; try cpu, cuda or cuda:1.") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= count:
        raise UsageError(f"device is {device!r}, and torch sees {count} CUDA devices here; use one of them, or cpu.")
    return device


@contextmanager
def usage_errors(what: str, model: str) -> Iterator[None]:
    """Raise UsageError for what loading `what` of a model makes transformers raise in the block."""
    from huggingface_hub.errors import StrictDataclassError  # a configuration's field is invalid, or of a newer release

    try:
        yield
    except ForedraftError:
        raise
    except Exception as error:  # there is no list of what readers of files and configurations raise
        cause = error.__cause__ if isinstance(error, StrictDataclassError) else None
        raise UsageError(
            f"No {what} could be loaded from {model!r}: {told(cause or error).removesuffix('.')}. Give a folder, a hub "
            f"id that is reachable from here, a GGUF file, or {SMOLLM2}."
        ) from error
