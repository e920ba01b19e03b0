"""Drafter folders of the `speculators` format, and raw EAGLE-3 and DFlash ones, read and checked against a target.

A folder holds `config.json` and its weights: in the format of Hugging Face's `speculators`, `speculators_model_type`
names the method and `transformer_layer_config` describes the layers; a raw repository describes its layers at the top
level, and is converted. Does not depend on how a drafter runs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from torch import nn

from foredraft.atomic_file import store_file
from foredraft.errors import StoreError, UsageError
from foredraft.graph.layout import Layout
from foredraft.graph.tree import IntArray
from foredraft.model.fingerprint import fingerprint
from foredraft.model.gguf.drafters import read_gguf_drafter
from foredraft.model.gguf.files import is_gguf
from foredraft.model.head_files import damaged_unless_read
from foredraft.model.heads import RankedHead
from foredraft.model.layers import eagle_layers
from foredraft.options import whole_number

CONFIG = "config.json"
TYPE = "speculators_model_type"  # the field that names the method
_SAFE, _PICKLED = "*.safetensors", "pytorch_model.bin"
FILES = (CONFIG, _SAFE, _PICKLED)  # that a drafter is made of, for the hub
_EAGLE, _FLASH = ("llama", "qwen3"), ("qwen3",)
_MTP = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# types of layers that are run
_LAYERS = {
    "eagle3": _EAGLE, "peagle": _EAGLE, "dflash": _FLASH, "dspark": _FLASH, "dflash2": _FLASH, "mtp": _MTP,
}  # fmt: skip
_EMBEDDINGS, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"
# names of tensors that its layers do not have: those of `Ends`, what only training reads, and DSpark's confidence
_NOT_OF_LAYERS = (_EMBEDDINGS, _LM_HEAD, "verifier_", "confidence_head.")
_KIND = "qwen3"  # the format's default type of layers
# how names of tensors begin in files, and in `StateLayers`
_RENAMED = {
    "draft_model.": "", "model.": "", "midlayer.": "layers.0.", "mtp_layers.0.input_proj.": "fc.",
    "mtp_layers.0.final_layernorm.": "norm.", "mtp_layers.0.hidden_layernorm.": "hidden_norm.",
    "mtp_layers.0.token_layernorm.": "token_norm.", "mtp_layers.": "layers.",
}  # fmt: skip
# parts of a raw configuration, of which the last one that has a field decides; they describe no layers
_PARTS = ("eagle_config", "dspark_config", "dflash_config")
FULL, SLIDING = "full_attention", "sliding_attention"  # types of layers
CAUSAL = "causal_layers"  # of a converted configuration of a block: whether its rows see no later ones, by layers' type
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # of a configuration, false by default
_USUAL = {"logit_scale": 1, "use_aux_hidden_state": True}  # fields of raw repositories -> what they must be
_MOST_LEVELS = 1024  # of a block: a mask has its square; chosen, published ones have 16 at most
_TAPPED = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")


@dataclass(frozen=True, slots=True)
class Ends:
    """A drafter's embeddings and its LM head."""

    embeddings: torch.Tensor  # float[V, D]
    lm_head: nn.Module
    ids: IntArray | None  # int32[N], the tokens that it scores; None for all

    def embedded(self, layout: Layout) -> torch.Tensor:
        """Return the embeddings of a layout's rows, float[1, R, D]."""
        ids = torch.from_numpy(layout.token_ids[None]).to(self.embeddings.device)
        return nn.functional.embedding(ids, self.embeddings)


@dataclass(frozen=True, slots=True)
class Speculator:
    """A drafter's configuration and weights."""

    location: str  # its folder
    config: Mapping[str, Any]  # in the format of `speculators`
    layer_config: Any  # transformers' configuration of its layers
    layers: tuple[int, ...]  # of the target, whose states it reads, as `Needs.hidden` names them
    ids: torch.Tensor | None  # int64[N], the token of each of its logits; None if they are 0, 1, ...
    weights: dict[str, torch.Tensor]  # by their names in the format, without the maps of the vocabulary

    def ends(self, model: Any) -> Ends:
        """Return its embeddings and LM head in the model's dtype: its own, or the target's where it has none."""
        own = model.get_input_embeddings().weight
        embeddings, rows = self.weights.get(_EMBEDDINGS, own), self.weights.get(_LM_HEAD)
        lm_head: nn.Module
        if rows is not None:
            lm_head = nn.Linear(rows.shape[1], len(rows), bias=False, device="meta", dtype=own.dtype)
            lm_head.weight = nn.Parameter(rows.to(own.device, own.dtype), requires_grad=False)
        else:
            lm_head = model.get_output_embeddings() if self.ids is None else RankedHead(model, self.ids)
        ids = None if self.ids is None else self.ids.int().numpy()
        return Ends(embeddings.to(own.device, own.dtype), lm_head, ids)

    @property
    def _embedded(self) -> int:
        """The number of tokens with an embedding; the target has one for each of the vocabulary at least."""
        return len(self.weights[_EMBEDDINGS]) if _EMBEDDINGS in self.weights else int(self.layer_config.vocab_size)

    def check_block(self, fewest: int = 1, **sizes: Any) -> None:
        """Raise StoreError unless the configuration names a placeholder's token, and these sizes, `fewest` or more."""
        given = {"mask_token_id": self.config.get("mask_token_id"), **sizes}
        for name, number in given.items():
            least, most = (fewest, _MOST_LEVELS) if name in sizes else (0, self._embedded - 1)
            if whole_number(number) is None or not least <= number <= most:
                raise StoreError(
                    f"The drafter in {self.location} has {number!r} as {name}; it must be a whole number from {least} "
                    f"to {most}. Copy or download it again."
                )

    def _shapes_of_ends(self) -> dict[str, list[int]]:
        """Return the shapes that the embeddings and the LM head of the file must have; of these, those that it has."""
        width, rows = self.layer_config.hidden_size, self.layer_config.vocab_size if self.ids is None else len(self.ids)
        # tokens without an embedding are not drafted, and end a draft
        shapes = {_EMBEDDINGS: [self._embedded, width], _LM_HEAD: [rows, width]}
        return {name: shape for name, shape in shapes.items() if name in self.weights}

    def fill(self, module: nn.Module, like: torch.Tensor) -> None:
        """Load the weights into a module, with the dtype and on the device of `like`.

        StoreError if one is missing, and UsageError for one that the module does not have.
        """
        own = module.state_dict()
        others = (name for name in self.weights if name not in own and not name.endswith("rotary_emb.inv_freq"))
        if unknown := next((name for name in others if not name.startswith(_NOT_OF_LAYERS)), None):
            raise UsageError(
                f"The drafter in {self.location} has the tensor {unknown}, which foredraft does not know; give another."
            )
        needed = {name: list(each.shape) for name, each in own.items()} | self._shapes_of_ends()
        for name, shape in needed.items():
            found = self.weights.get(name)
            if found is None or list(found.shape) != shape:
                what = "has no tensor" if found is None else f"has a tensor of shape {list(found.shape)} as"
                raise StoreError(
                    f"The drafter in {self.location} {what} {name}, where {shape} is needed; copy or download it again."
                )
            if not torch.isfinite(found).all():
                raise StoreError(f"The drafter in {self.location} is damaged: {name} holds NaN or infinity.")
        # not `module.to`, which would also round the rotary frequencies
        weights = {name: self.weights[name].to(like.device, like.dtype) for name in own}
        module.load_state_dict(weights, assign=True)
        module.eval().requires_grad_(requires_grad=False)


def read_speculator(folder: Path, method: str, model: Any) -> Speculator:
    """Read the drafter in a folder, of a method and for a target model.

    Raises UsageError if there is none, or it is of another method or another target, or is quantised, and StoreError if
    its files are damaged.
    """
    named = str(folder)
    with damaged_unless_read("drafter", folder):
        given, weights = _contents(folder, model.dtype)
        config = given if TYPE in given else _converted(given, weights, model)
        _refuse_kind(named, config, method, given, weights)
        layer_config = _layer_config(config)
        vocabulary = int(layer_config.vocab_size)
        ids = _ids(named, weights, int(config.get("draft_vocab_size") or vocabulary), vocabulary)
        usual = eagle_layers(int(model.config.get_text_config().num_hidden_layers))
        layers: tuple[int, ...] = next((tuple(map(int, config[name])) for name in _TAPPED if config.get(name)), usual)
        _check_target(named, config, layer_config, layers, model)
    other_width = layer_config.hidden_size != model.get_input_embeddings().weight.shape[1]
    if lacking := next((name for name in (_EMBEDDINGS, _LM_HEAD) if other_width and name not in weights), None):
        raise StoreError(f"The drafter in {named} has no tensor {lacking}, and the target's have another width.")
    return Speculator(named, config, layer_config, layers, ids, weights)


def save_eagle3(
    folder: Path, model: Any, base_model: str, layers: Any, reads: tuple[int, ...],
    ids: torch.Tensor | None, dtype: torch.dtype, *, lm_head: bool,
) -> None:  # fmt: skip
    """Write a head of `model`, which was loaded under the name `base_model`, in the format of `speculators`.

    Without `lm_head`, the file has no LM head, and foredraft takes the target's rows for `ids`, int64[N]; other
    programs need it. StoreError if the folder cannot be written.
    """
    whole = model.get_output_embeddings().weight.detach()
    tensors = {name: each.detach().to(dtype) for name, each in layers.state_dict().items()}
    if ids is not None:
        ids = ids.sort().values.cpu()  # the format's other map, of the tokens that are drafted, has their order
        drafted = torch.zeros(len(whole), dtype=torch.bool)
        drafted[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": drafted}
    if lm_head:
        tensors["lm_head.weight"] = (whole if ids is None else whole[ids]).to(dtype)
    layer = {**layers.config.to_diff_dict(), "vocab_size": len(whole), "model_type": layers.config.model_type}
    config = {
        TYPE: "eagle3", "architectures": ["Eagle3Speculator"], "speculators_version": "0.9.0",
        "draft_vocab_size": len(whole) if ids is None else len(ids), "transformer_layer_config": layer,
        _TAPPED[0]: reads, "norm_before_residual": False, "tie_word_embeddings": False,
        "fingerprint": fingerprint(model),
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": base_model, "architectures": [type(model).__name__]},
        },
    }  # fmt: skip
    own = {name: each.cpu().contiguous() for name, each in tensors.items()}
    store_file(folder / "model.safetensors", save_tensors(own, {"format": "pt"}))
    store_file(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def _contents(folder: Path, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the configuration and the tensors of a folder, or a GGUF file, by their names in the drafter's module."""
    if is_gguf(folder):
        config, weights = read_gguf_drafter(folder, dtype)
        return config | {CAUSAL: _causal_layers(config.get("is_causal"))}, weights
    config, files = json.loads((folder / CONFIG).read_text()), sorted(folder.glob(_SAFE))
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(file)
    if not files:  # weights_only: a stranger's file cannot run code
        found = torch.load(folder / _PICKLED, map_location="cpu", weights_only=True)
    for begins, ours in _RENAMED.items():
        own = {name: ours + name.removeprefix(begins) for name in found if name.startswith(begins)}
        found = {own.get(name, name): each for name, each in found.items()}
    return config, found


def _converted(raw: Mapping[str, Any], weights: dict[str, torch.Tensor], model: Any) -> dict[str, Any]:
    """Return a raw repository's configuration in the format of `speculators`.

    ValueError if it is of no known method.
    """
    own = {name: value for part in (raw, *map(raw.get, _PARTS)) for name, value in (part or {}).items()}
    own = {name: value for name, value in own.items() if value is not None}
    layer = {name: value for name, value in raw.items() if name not in ("architectures", "auto_map", *_PARTS)}
    modules = {name.partition(".")[0] for name in weights}
    if "target_layer_ids" in own:  # DFlash and DSpark
        dspark = "markov_head" in modules or "DSpark" in str(own.get("architectures"))
        return {
            "sample_from_anchor": own.get("shift_label", dspark), **own,
            TYPE: "dflash2" if "candidate_selector" in modules else "dspark" if dspark else "dflash",
            "transformer_layer_config": layer,
            # they count the layers that states leave, and `speculators` those that they enter
            _TAPPED[1]: [number + 1 for number in own["target_layer_ids"]],
            CAUSAL: _causal_layers(own.get("is_causal", own.get("causal"))),
        }  # fmt: skip
    if "fc.weight" not in weights or "layers.0.hidden_norm.weight" not in weights:
        raise ValueError(f"it has neither {TYPE} nor the tensors of EAGLE-3")
    text, nested = model.config.get_text_config(), (raw.get("eagle_config") or {}).get(_TAPPED[0])
    layer["vocab_size"] = len(weights["t2d"]) if "t2d" in weights else text.vocab_size
    # some say how many layers the target has
    layer["num_hidden_layers"] = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
    if own.get("tie_word_embeddings") and _EMBEDDINGS in weights:
        weights.setdefault(_LM_HEAD, weights[_EMBEDDINGS])
    if nested and nested[0] == 1 and text.model_type != "gpt_oss":
        own[_TAPPED[0]] = [number + 1 for number in nested]  # they count as DFlash's do, as SGLang reads them
    if in_parallel := "mask_hidden" in weights:  # P-EAGLE
        weights["mask_hidden"] = weights["mask_hidden"].reshape(1, 1, -1)
        own.setdefault("mask_token_id", own.get("pard_token", own.get("ptd_token_id")))
    own[TYPE], own["transformer_layer_config"] = "peagle" if in_parallel else "eagle3", layer
    drafted = len(weights[_LM_HEAD]) if _LM_HEAD in weights else own.get("draft_vocab_size", layer["vocab_size"])
    return {**own, "draft_vocab_size": drafted}


def _causal_layers(causal: Any) -> dict[str, bool]:
    """Return `CAUSAL` of z-lab's drafters, which may say one value for all layers."""
    return {FULL: bool(causal), SLIDING: causal is None or bool(causal)}


def _layer_config(config: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    given = {"model_type": _KIND, **config["transformer_layer_config"]}
    for name in ("rope_scaling", "rope_parameters"):  # a text's positions are alike in all of mrope's sections
        if (rope := given.get(name)) and "mrope" in (rope.get("type"), rope.get("rope_type")):
            given[name] = {**rope, "type": "default", "rope_type": "default"}
    return AutoConfig.for_model(given.pop("model_type"), **given)


def _ids(named: str, weights: dict[str, torch.Tensor], drafted: int, vocabulary: int) -> torch.Tensor | None:
    """Take the vocabulary's maps out of the weights; return the token of each logit, int64[N], None if they are all."""
    offsets, _ = weights.pop("d2t", None), weights.pop("t2d", None)
    if drafted == vocabulary:
        return None
    ids = torch.empty(0) if offsets is None else torch.arange(len(offsets)) + offsets.long()
    if len(ids) != drafted or len(ids.unique()) != drafted or not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise StoreError(
            f"The drafter in {named} scores {drafted:,} tokens, and its tensor d2t does not name as many different "
            f"ones below {vocabulary:,}; copy or download it again."
        )
    return ids


def _refuse_kind(
    named: str, config: Mapping[str, Any], method: str, given: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> None:
    """Raise UsageError for a drafter of another method, or of a kind that is not run."""
    layer = config["transformer_layer_config"]
    usual = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    packed = [name for name, each in weights.items() if each.dtype not in usual and name not in ("d2t", "t2d")]
    wrong = ""
    if config[TYPE] != method:
        known = f"give method {config[TYPE]!r}" if config[TYPE] in _LAYERS else f"methods are {', '.join(_LAYERS)}"
        wrong = f"is for {config[TYPE]}, not for {method}; {known}"
    elif (kind := layer.get("model_type", _KIND)) not in _LAYERS[method]:
        wrong = f"has layers of type {kind}, and {method} runs those of {' and '.join(_LAYERS[method])}; give another"
    elif packed or given.get("quantization_config") or layer.get("quantization_config"):
        how = f"{packed[0]} is of type {str(weights[packed[0]].dtype).removeprefix('torch.')}" if packed else CONFIG
        wrong = f"is quantised ({how}), which is not supported; give one in bfloat16 or float32"
    elif odd := [name for name, usual in _USUAL.items() if config.get(name) not in (None, usual)]:
        wrong = f"says {odd[0]} = {config[odd[0]]}, which is not supported; give another"
    if wrong:
        raise UsageError(f"The drafter in {named} {wrong}.")


def _check_target(
    named: str, config: Mapping[str, Any], layer_config: Any, layers: tuple[int, ...], model: Any
) -> None:
    text = model.config.get_text_config()
    count, (vocabulary, width) = int(text.num_hidden_layers), model.get_input_embeddings().weight.shape
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    of = f", {verifier['name_or_path']}" if verifier.get("name_or_path") else ""
    theirs, ours = (verifier.get("architectures") or [""])[0].split("For")[0], type(model).__name__.split("For")[0]
    wrong = ""
    if not (ours.startswith(theirs) or theirs.startswith(ours)):
        wrong = f"a {theirs} model, and this one is a {ours}"
    elif (wide := int(config.get("target_hidden_size") or layer_config.hidden_size)) != width:
        wrong = f"a model with hidden states of {wide} numbers, and this one's have {width}"
    elif int(layer_config.vocab_size) > vocabulary:
        wrong = f"a vocabulary of {layer_config.vocab_size:,} tokens, and this model has {vocabulary:,}"
    elif outside := [number for number in layers if not 0 <= number <= count]:
        wrong = f"a model whose states before layer {outside[0]} it reads, and this one has layers 0 to {count - 1}"
    if wrong:
        raise UsageError(f"The drafter in {named} is of another target{of}: {wrong}. Give one that is trained for it.")
