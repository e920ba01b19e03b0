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


def in_words(codes, bits):
    """Integers [..., K] as words int32[..., K * bits / 32], the first in the lowest bits."""
    places = 1 << (bits * torch.arange(32 // bits))
    words = (codes.long().unflatten(-1, (-1, 32 // bits)) * places).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


PACKED = {
    "gptq": {"bits": 4, "sym": True, "checkpoint_format": "gptq"},
    "gptq_v2": {"bits": 4, "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq with zero points": {"bits": 4, "sym": False},
    "gptq in 8 bits": {"bits": 8, "sym": True, "checkpoint_format": "gptq"},
    "gptq in order of activations": {"bits": 4, "sym": True, "desc_act": True},
    "awq": {"bits": 4, "zero_point": True, "version": "gemm"},
    "auto-round": {"bits": 4, "sym": True, "packing_format": "auto_round:auto_gptq"},
    "compressed-tensors": {"format": "pack-quantized"},
    "compressed-tensors with zero points": {"format": "pack-quantized"},
    "compressed-tensors in 8 bits": {
        "format": "int-quantized",
        "config_groups": {"all": {"input_activations": {"num_bits": 8}}},
    },
}
"""Settings of checkpoints with packed integers; the first word is the `quant_method`."""


def packed(shape, kind, group=32):
    """A random matrix [N, K] as a checkpoint of a kind of `PACKED` holds it, by the ends of names; and what it says."""
    settings, (rows, width) = PACKED[kind], shape
    bits = settings.get("bits", 8 if "8 bits" in kind else 4)
    groups = torch.arange(width) // group
    groups = groups[torch.randperm(width)] if "desc_act" in settings else groups
    codes, scales = torch.randint(2**bits, shape), torch.rand(rows, -(-width // group)).half() * 0.01 + 0.001
    zeros = torch.full(scales.shape, 2 ** (bits - 1))
    if "zero" in kind + str(settings) or not settings.get("sym", True):
        zeros = torch.randint(2**bits, scales.shape)  # 0 too, from which GPTQ's first version borrows
    said = scales.float()[:, groups] * (codes - zeros[:, groups])
    if kind == "awq":
        columns = [0, 2, 4, 6, 1, 3, 5, 7]
        ordered = (each.T.unflatten(1, (-1, 8))[..., columns].flatten(1) for each in (codes, zeros))
        stored = dict(zip(("qweight", "qzeros"), (in_words(each, 4) for each in ordered), strict=True))
    elif kind.startswith("compressed"):
        stored = {"weight_packed": in_words(codes, bits), "weight_shape": torch.tensor(shape)}
        if "8 bits" in kind:
            stored = {"weight": (codes - 128).to(torch.int8)}
        if "zero" in kind:
            stored["weight_zero_point"] = in_words(zeros.T, bits).T
        return stored | {"weight_scale": scales}, said
    else:
        less = 0 if kind == "gptq_v2" else 0x11111111 if bits == 4 else 0x01010101
        words = (in_words(zeros.T, bits).long() - less) % 2**32
        stored = {
            "qweight": in_words(codes, bits).T,
            "qzeros": torch.where(words < 2**31, words, words - 2**32).int(),
        }
        stored |= {} if kind == "auto-round" else {"g_idx": groups.int(), "bias": torch.zeros(rows)}
    return stored | {"scales": scales.T}, said


def pack_checkpoint(folder, kind):
    """Give a saved model random matrices of a kind of `PACKED`, and return the weights that they say."""
    file, (stored, said) = folder / "model.safetensors", ({}, {})
    for name, weight in load_file(file).items():
        if ("_proj." in name or ".experts." in name) and weight.ndim == 2:
            parts, said[name] = packed(weight.shape, kind)
            stored |= {name.removesuffix("weight") + end: part.contiguous() for end, part in parts.items()}
        else:
            stored[name] = said[name] = weight
    save_file(stored, file, {"format": "pt"})
    declare(folder, {"quant_method": kind.partition(" ")[0].removesuffix("_v2"), **PACKED[kind]})
    return said


def same_weights(found, expected):
    """Whether tensors by name are others rounded to their dtypes."""
    return all(torch.equal(found[name], each.to(found[name].dtype)) for name, each in expected.items())


def declare(folder, settings):
    """Write a `quantization_config` into a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
