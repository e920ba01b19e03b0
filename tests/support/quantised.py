"""Tiny quantised checkpoints, written by the formats' own formulas, with the weights that these say."""

import json

import torch
from safetensors.torch import load_file, save_file

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of four bits (OCP Microscaling Formats, 1.0)."""


def in_fp8_blocks(weight, edge):
    """A matrix as DeepSeek-V3's checkpoints hold it: E4M3 numbers, a scale for each block, and what both say."""
    rows, columns = (-(-size // edge) for size in weight.shape)
    scales = torch.rand(rows, columns) * 0.01 + 0.001
    spread = scales.repeat_interleave(edge, 0).repeat_interleave(edge, 1)[: weight.shape[0], : weight.shape[1]]
    stored = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored, scales, stored.float() * spread


def in_mxfp4(experts):
    """Experts' matrices [E, IN, OUT] as gpt-oss's checkpoints hold them: blocks, exponents, and what both say."""
    count, width, height = experts.shape
    rows = experts.transpose(1, 2).reshape(count, height, width // 32, 32)
    exponents = torch.floor(torch.log2(rows.abs().amax(-1))) - 2
    codes = ((rows / exponents.exp2()[..., None])[..., None] - E2M1).abs().argmin(-1)
    said = (E2M1[codes] * exponents.exp2()[..., None]).reshape(count, height, width).transpose(1, 2)
    codes = codes.to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8), said


def quantise_checkpoint(folder, edge=16):
    """Quantise a saved model's matrices, gpt-oss's experts in MXFP4, other models' in FP8; return the weights."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    stored, said = {}, {}
    experts = config["model_type"] == "gpt_oss"
    for name, weight in load_file(file).items():
        wide = weight.float()
        if experts and name.endswith(("gate_up_proj", "down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"], said[name] = in_mxfp4(wide)
        elif not experts and name.endswith("_proj.weight"):
            stored[name], stored[f"{name}_scale_inv"], said[name] = in_fp8_blocks(wide, edge)
        else:
            stored[name] = said[name] = weight
    save_file({name: each.contiguous() for name, each in stored.items()}, file, {"format": "pt"})
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [edge, edge]}
    declare(folder, {"quant_method": "mxfp4"} if experts else fp8)
    return said


def same_weights(found, expected):
    """Whether tensors by name are others rounded to their dtypes."""
    return all(torch.equal(found[name], each.to(found[name].dtype)) for name, each in expected.items())


def declare(folder, settings):
    """Write a `quantization_config` into a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
