"""Models of the toy target's vocabulary, and heads for them."""

import functools
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.model.head_files import card_for, save_head
from foredraft.model.heads import ExitHead, MedusaHeads
from foredraft.model.target import TorchTarget
from foredraft.testing import VOCABULARY
from support.speculators import MADE, save_drafter


@functools.cache
def tiny_llama(seed, width, layers):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2,
        max_position_embeddings=512, initializer_range=1.0,
    )  # fmt: skip
    return TorchTarget(LlamaForCausalLM(config).eval())


def tiny_draft_model():
    return tiny_llama(seed=0, width=16, layers=1)


def tiny_target():
    """As wide as the toy target's states are, so that heads for the one can draft for the other."""
    return tiny_llama(seed=1, width=8, layers=3)


@functools.cache
def tiny_heads():
    folder, model = Path(tempfile.mkdtemp()), tiny_target().model
    save_head(folder / "eesd", card_for(model, "eesd", "tiny", layers=1, dtype="float32"), ExitHead(model).state_dict())
    heads = MedusaHeads(8, 3)
    heads.accuracies.fill_(0.3)
    save_head(folder / "medusa", card_for(model, "medusa", "tiny", dtype="float32", count=3), heads.state_dict())
    shape, blocks = {"width": 8, "vocabulary": VOCABULARY}, {"aux_hidden_state_layer_ids": [0, 1, 2]}
    eagles = {"eagle3": {"reduced": False}, "peagle": {"reduced": False}}
    speculators = {**eagles, "dflash": {}, "dspark": {}, "dflash2": {}}
    for method, others in speculators.items():
        config, tensors = MADE[method]
        fields = {"mask_token_id": 0, **({} if method in eagles else blocks)}
        save_drafter(folder / method, config(**others, **shape, **fields), tensors(**others, **shape))
    return {method: str(folder / method) for method in ("eesd", "medusa", *speculators)}


@functools.cache
def tiny_checkpoint():
    """The tiny target, from a checkpoint that holds a multi-token-prediction layer."""
    folder, model = Path(tempfile.mkdtemp()), tiny_target().model
    weights, after = model.state_dict(), "model.layers.3."
    layer = {name.removeprefix("model.layers.0."): each for name, each in weights.items() if ".layers.0." in name}
    layer |= {f"{name}.weight": torch.ones(8) for name in ("enorm", "hnorm", "shared_head.norm")}
    layer["eh_proj.weight"] = torch.randn(8, 16, generator=torch.Generator().manual_seed(4))
    model.save_pretrained(folder)
    save_file(weights | {after + name: each.clone() for name, each in layer.items()}, folder / "model.safetensors")
    return TorchTarget(LlamaForCausalLM.from_pretrained(folder).eval())
