"""The multi-token-prediction (MTP) layer that a checkpoint holds beside its model: found, loaded and run.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2. A row's inputs are a token's embedding and the last
state of the token before it; its output is the LM head's input and the next state. transformers builds the layer and
reads its weights (`MtpModel`), which the model leaves in its checkpoint; those of a GGUF file are read by the tables of
`gguf/`. One that was trained apart lies in a folder of the `speculators` format. Does not depend on which nodes are
expanded.
"""

import copy
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import logging

from foredraft.cache_folder import cache_folder
from foredraft.errors import ForedraftError, ForedraftWarning, StoreError, UnsupportedModelError, UsageError, told
from foredraft.model.gguf.architectures import ARCHITECTURES
from foredraft.model.gguf.files import parts_of, quantised_file, weights_of
from foredraft.model.gguf.metadata import Keys
from foredraft.model.gguf.reader import opened
from foredraft.model.gguf.weights import weights_named
from foredraft.model.layers import model_parts, shared_copy
from foredraft.model.packed import PackedTensors
from foredraft.model.quantised import dequantiser, packed_weights
from foredraft.model.speculators import Ends
from foredraft.model.state_heads import StateHead, StateLayers, load_state_head

_FILES = ("model.safetensors.index.json", "model.safetensors")
_SHARED = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")  # in a file; transformers takes the model's
# by field of a configuration, its value for the layer where the configuration does not say
_USUAL = {"mtp_layer_types": "full_attention", "mtp_mlp_layer_types": "sparse"}


class MtpLayers(nn.Module):
    """The first layer of transformers' `MtpModel`, which drafts all levels of a tree.

    A checkpoint with several, one for each level, drafts with the first alone. `norm` is the target's last one.
    """

    def __init__(self, model: Any, norm: nn.Module) -> None:
        super().__init__()
        self.config, self.layers, self.norm = model.config, model.layers[:1], norm
        self.rotary_embedding = model.rotary_emb
        kinds = getattr(model.config, "layer_types", None)
        self._kind = (kinds[0],) if kinds and model.has_per_layer_rope else ()

    def rotary(self, like: torch.Tensor, positions: torch.Tensor) -> Any:
        """Return what the layer is given of the rows' positions."""
        return self.rotary_embedding(like, positions, *self._kind)

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        """Return one state, float[..., D], for the target's states, float[..., D]."""
        return self.norm(states)  # type: ignore[no-any-return]  # a module's output is Any

    def forward(
        self, embedded: torch.Tensor, states: torch.Tensor, arguments: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows, float[B, R, D] embeddings and states; return the LM head's inputs, which are the next states."""
        hidden = self.layers[0](embedded, states, **arguments)
        return hidden, hidden


class TrainedMtpLayers(StateLayers):
    """The layer of a folder in the `speculators` format; `last_norm` is the target's last norm."""

    def __init__(self, layer_config: Any, last_norm: nn.Module) -> None:
        layer_config.num_hidden_layers = 1
        if getattr(layer_config, "layer_types", None):
            layer_config.layer_types = ["full_attention"]  # in hybrid models too
        width = layer_config.hidden_size
        super().__init__(layer_config, 2 * width)
        self.hidden_norm, self.token_norm = self.normed(width), self.normed(width)
        self._last = (last_norm,)  # in a tuple, as it is no part of the folder's weights

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        """Return one state, float[..., D], for the target's states, float[..., D]."""
        return self._last[0](states)  # type: ignore[no-any-return]  # a module's output is Any

    def forward(
        self, embedded: torch.Tensor, states: torch.Tensor, arguments: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows as `MtpLayers` does."""
        rows = self.fc(torch.cat([self.token_norm(embedded), self.hidden_norm(states)], dim=-1))
        hidden = self.norm(self.layers[0](rows, **arguments))
        return hidden, hidden


def load_trained_mtp(folder: Path, model: Any) -> StateHead[TrainedMtpLayers]:
    """Load the layer in a folder of the `speculators` format; raises what `load_state_head` does."""
    parts = model_parts(model)
    norm = model.get_submodule(parts.norm)
    head = load_state_head(folder, "mtp", model, lambda found, _width: TrainedMtpLayers(found.layer_config, norm))
    return replace(head, reads=(parts.count,))


def mtp_tensors(config: Any) -> list[str]:
    """Return the names of the MTP layer's tensors in the checkpoint that a model's configuration is from, if any.

    Raises StoreError if the checkpoint cannot be read.
    """
    if files := weights_of(str(config.name_or_path)):
        names = [name for name in opened(files)[1] if name.startswith(_block(config))]
        return names if f"{_block(config)}nextn.eh_proj.weight" in names else []
    return [name for name in _files(str(config.name_or_path)) if name.startswith(_prefixes(config))]


def load_mtp(model: Any, file: Path | None = None) -> StateHead[MtpLayers]:
    """Load the MTP layer of the checkpoint that a model was loaded from, in its dtype and on its device.

    `file` is another GGUF file that holds the layer. Raises UsageError if there is none or transformers cannot run it,
    and StoreError if tensors are missing.
    """
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise UsageError("Method 'mtp' needs transformers 5.23 or newer; update transformers.") from error
    files = weights_of(str(model.config.name_or_path)) if file is None else parts_of(file)
    if not files and quantised_file(model) is not None:
        raise UsageError(
            "The weights of this model are rounded (dtype q8_0 or q4_0), which leaves its MTP layer out. Leave the "
            "dtype out, or choose another method."
        )
    if file is None and not mtp_tensors(model.config):
        raise UsageError(
            f"The checkpoint of {model.config.name_or_path or 'this model'} holds no MTP layer (tensors "
            f"{' or '.join(_prefixes(model.config))}, in a GGUF file nextn.*); conversions often drop it. Load the "
            "publisher's own checkpoint, or choose another method."
        )
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would report the tensors that belong to the model
    try:
        if files:
            loaded = _of_file(model, MtpModel, files).eval()
        else:
            named = _declared(model)
            packed = packed_weights(model.config.name_or_path)
            if (
                packed is None and (quantised := dequantiser(model)) is not None
            ):  # by these transformers reads the layer's scales
                conversions = quantised.update_weight_conversions(get_model_conversion_mapping(named), named)
                named._weight_conversions = conversions  # noqa: SLF001  # transformers' has no other way
            loaded = _of_checkpoint(named, MtpModel, packed).eval()
    except ForedraftError:
        raise
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise UsageError(
            f"transformers cannot run the MTP layer of a {model.config.model_type} model ({told(error)}); choose "
            "another method."
        ) from error
    except RuntimeError as error:
        raise StoreError(
            f"The MTP layer in {model.config.name_or_path} is damaged ({told(error)}). Copy or download it again."
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    loaded.requires_grad_(requires_grad=False)
    if file is None:
        _warn_of_other_weights(model)
    ends = Ends(model.get_input_embeddings().weight, model.get_output_embeddings(), None)
    parts = model_parts(model)
    return StateHead(MtpLayers(loaded, model.get_submodule(parts.norm)), ends, (parts.count,), loaded.config)


def _of_checkpoint(model: Any, kind: type[Any], packed: PackedTensors | None) -> Any:
    """Return transformers' `MtpModel`, which is `kind`, of a folder or hub id; packed integers are dequantised."""
    prefixes = _prefixes(model.config)
    if packed is None or not any(packed.is_packed(name) for name in packed if name.startswith(prefixes)):
        return kind.from_pretrained(model, device_map={"": model.device})
    with TemporaryDirectory(dir=cache_folder()) as folder:  # as transformers reads only files
        state = packed.state(model.dtype, lambda weight: weight, prefixes)
        save_file({name: each.contiguous() for name, each in state.items()}, Path(folder, _FILES[1]))
        model.config.name_or_path = folder
        return kind.from_pretrained(model, device_map={"": model.device})


def _of_file(model: Any, kind: type[Any], files: Sequence[Path]) -> Any:
    """Return transformers' `MtpModel`, which is `kind`, with the layer that lies behind the last one in a GGUF file.

    Raises UsageError for a file of another family, and UnsupportedModelError if the layer has another tensor, or lacks
    one.
    """
    metadata, tensors = opened(files)
    row = ARCHITECTURES.get(metadata.architecture)
    if row is None or row.family_of(Keys(metadata)) != model.config.model_type:
        raise UsageError(
            f"{files[0]} is of another target, a {metadata.architecture} model, and this one is a "
            f"{model.config.model_type} model; give one of this model."
        )
    with torch.device("meta"):
        loaded = kind(_declared(model), 1)
    layer, prefix = loaded.layers[0], _prefixes(model.config)[-1]
    named = {name: prefix + name.removeprefix("mtp_block.") for name in layer.state_dict()}  # as of one more layer
    wanted = {named[name]: like for name, like in layer.state_dict().items()}
    state = weights_named(metadata.architecture, tensors, wanted, model.config, model.dtype)
    own = [name for name in tensors.unused() if name.startswith(_block(model.config))]
    if left := [name for name in own if not name.endswith(_SHARED)]:
        raise UnsupportedModelError(
            f"The MTP layer in {files[0]} has the tensor {left[0]}, which transformers does not know; choose another "
            "method, and report the tensor."
        )
    layer.load_state_dict({name: state[path] for name, path in named.items()}, assign=True)
    layer.to(model.device)
    return loaded


def _block(config: Any) -> str:
    """Return how names of the layer's tensors begin in a GGUF file: it lies behind the last layer."""
    return f"blk.{config.num_hidden_layers}."


def _prefixes(config: Any) -> tuple[str, ...]:
    return "mtp.", "model.mtp.", f"model.layers.{config.num_hidden_layers}."


def _declared(model: Any) -> Any:
    """Return a model with the same weights, whose configuration and class name one MTP layer, as `MtpModel` asks."""
    named = shared_copy(model)
    config = named.config = copy.deepcopy(model.config)
    config.num_mtp_layers, config.dtype = 1, model.dtype
    for field, usual in _USUAL.items():
        if getattr(config, field.removeprefix("mtp_"), None) is not None:
            setattr(config, field, (getattr(config, field, None) or [usual])[:1])
    patterns = [f"^{re.escape(each)}" for each in _prefixes(model.config)]
    named._keys_to_ignore_on_load_unexpected = patterns  # noqa: SLF001  # how MtpModel knows its tensors
    return named


def _files(location: str) -> dict[str, Path]:
    """Return the tensors of a checkpoint's safetensors, in a folder or downloaded, and their files; none without."""
    for name in _FILES if location else ():
        file: Any = Path(location, name)
        if not Path(location).is_dir():
            with suppress(HFValidationError):  # a model of another origin, such as a GGUF file
                file = try_to_load_from_cache(location, name)
        if not isinstance(file, str | Path) or not (path := Path(file)).exists():
            continue
        try:
            if name.endswith(".json"):
                return {own: path.with_name(each) for own, each in json.loads(path.read_text())["weight_map"].items()}
            with safe_open(file, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), path)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise StoreError(f"{file} is damaged ({told(error)}). Copy or download it again.") from error
    return {}


def _warn_of_other_weights(model: Any) -> None:
    """Warn if the last norm is not that of the checkpoint: transformers does not keep a model's revision."""
    location, name = str(model.config.name_or_path), f"{model_parts(model).norm}.weight"
    if Path(location).is_dir() or (file := _files(location).get(name)) is None:
        return
    with safe_open(file, framework="pt") as opened:
        stored, own = opened.get_tensor(name), model.state_dict()[name]
    if not torch.equal(stored.to(own), own):
        warnings.warn(
            f"This model has other weights than the main revision of {location}, whose MTP layer drafts for it. If it "
            "is of another revision, load it with foredraft.load(name, revision=...), or its drafts will be poor.",
            ForedraftWarning,
            stacklevel=2,
        )
