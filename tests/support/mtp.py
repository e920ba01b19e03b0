"""Tiny checkpoints with an untrained MTP layer, by the names that publishers give its tensors."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from support.causal_types import tiny_configuration
from support.families import tiny_model

LAYOUTS = {
    "qwen3_5_text": "mtp", "qwen3_5_moe_text": "mtp", "qwen3_next": "mtp", "mellum": "mtp", "exaone_moe": "mtp",
    "deepseek_v3": "layer", "glm4_moe": "layer", "glm4_moe_lite": "layer", "mimo_v2_flash": "layer", "hy_v3": "layer",
}  # fmt: skip
"""How each family names the tensors: `mtp.*`, or as a layer after the last one."""
_NAMES = {
    "mtp": {
        "eh_proj.": "fc.", "enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden.", "post_norm.": "norm.",
    },
    "layer": {"post_norm.": "shared_head.norm."},
}  # fmt: skip


def save_checkpoint(folder, family, *, without=""):
    """Save a model and its layer, and return the model as loaded from there, and transformers' layer.

    One tensor may be left out.
    """
    config = tiny_configuration(family)
    config.num_mtp_layers = 1
    for field, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(config, field, None) is not None:
            setattr(config, f"mtp_{field}", getattr(config, f"mtp_{field}", None) or [kind])
    model = tiny_model(config)
    model.save_pretrained(folder)
    layout, layers = LAYOUTS[family], config.num_hidden_layers
    own = {}
    mtp = MtpModel(model, 1).eval()
    drawn = _drawn(mtp.layers[0])
    mtp.layers[0].load_state_dict(drawn)
    for name, each in drawn.items():
        if name.startswith("mtp_block."):
            prefix = "mtp.layers.0." if layout == "mtp" else f"model.layers.{layers}."
            own |= {prefix + name.removeprefix("mtp_block."): each}
        else:
            prefix = "mtp." if layout == "mtp" else f"model.layers.{layers}."
            own |= {prefix + _renamed(name, _NAMES[layout]): each}
    own = {name: each for whole in own.items() for name, each in _by_expert(*whole) if name != without}
    file = folder / "model.safetensors"
    save_file(load_file(file) | own, file, {"format": "pt"})
    if family.startswith("qwen"):  # transformers does not know the fields of their publisher
        _forget(folder / "config.json")
    loaded = AutoModelForCausalLM.from_pretrained(folder, config=AutoConfig.from_pretrained(folder)).eval()
    loaded.generation_config.eos_token_id = []
    return loaded, mtp


def _forget(path):
    config = json.loads(path.read_text())
    for name in [each for each in config if "mtp" in each]:
        del config[name]
    path.write_text(json.dumps(config))


def _renamed(name, names):
    return next((name.replace(old, new) for old, new in names.items() if name.startswith(old)), name)


def _drawn(layer):
    generator = torch.Generator().manual_seed(3)
    state = {}
    for name, each in layer.state_dict().items():
        noise = torch.randn(each.shape, generator=generator)
        state[name] = noise * each.shape[-1] ** -0.5 * 2 if each.ndim > 1 else each + 0.1 * noise
    return state


def _by_expert(name, each):
    """A tensor as it is, but those of all experts apart, as in checkpoints."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return [(name, each.contiguous())]
    prefix, kind = name.rsplit(".", 1)
    parts = each.chunk(2, dim=1) if kind == "gate_up_proj" else [each]
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return [
        (f"{prefix}.{number}.{own}.weight", part[number].contiguous())
        for own, part in zip(kinds, parts, strict=True)
        for number in range(len(each))
    ]
