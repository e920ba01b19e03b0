"""Untrained drafters in the formats of others, for models of six layers."""

import itertools
import json

import gguf
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

from support import exits
from support.families import LONG, NEW_TOKENS, VOCABULARY, prompt_of

LAYERS, WIDTH = 6, 32
READS = (2, 3, 3)
"""The layers whose states EAGLE-3 reads of six, unless its configuration names others."""
DRAFTED = 40
"""Tokens that a drafter with a vocabulary of its own scores."""
_CONFIGS = {"llama": (LlamaConfig, LlamaModel), "qwen3": (Qwen3Config, Qwen3Model)}


def target_of(family):
    return exits.target_of(family, LAYERS)


def writes_the_plain_text(family, setting, drafter):
    """Whether a drafter's text is that of plain decoding, and of transformers' own where that is greedy."""
    target = target_of(family)
    text, records = exits.written(target, family, setting, drafter)
    assert sum(record.drafted for record in records) > NEW_TOKENS
    if setting != "greedy":
        return text == exits.plain_of(target, family, setting)
    ids = torch.from_numpy(prompt_of(LONG))[None]
    own = target.model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, LONG:].tolist()
    return text == exits.plain_of(target, family, setting) == own


SPAN = 6
"""The window of layers that slide: every other one, from the first on."""


def layer_config(kind, layers=1, width=WIDTH, vocabulary=VOCABULARY, *, slides=False):
    types = (["sliding_attention", "full_attention"] * layers)[:layers]
    sliding = {"layer_types": types, "sliding_window": SPAN, "use_sliding_window": True} if slides else {}
    return _CONFIGS[kind][0](
        vocab_size=vocabulary, hidden_size=width, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=None,
        **sliding,
    )  # fmt: skip


def _layers_of(kind, layers, width, vocabulary):
    """The tensors of plain layers of transformers and their norm, by the names that the formats share."""
    state = _CONFIGS[kind][1](layer_config(kind, layers, width, vocabulary)).state_dict()
    return {name: torch.zeros_like(each) for name, each in state.items() if name.startswith(("layers.", "norm."))}


def _drawn(tensors, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for name, each in tensors.items():
        noise = torch.randn(each.shape, generator=generator)
        tensors[name] = noise * each.shape[-1] ** -0.5 * 2 if each.ndim > 1 else 1 + 0.1 * noise
    return tensors


def _vocabulary():
    """The maps of `DRAFTED` tokens spread over the vocabulary."""
    ids = torch.arange(DRAFTED) * VOCABULARY // DRAFTED
    drafted = torch.zeros(VOCABULARY, dtype=torch.bool)
    drafted[ids] = True
    return {"d2t": ids - torch.arange(DRAFTED), "t2d": drafted}


def eagle3_tensors(
    kind="llama", layers=1, *, reduced=True, embeddings=True, width=WIDTH, vocabulary=VOCABULARY, **flags
):
    tensors = _layers_of(kind, layers, width, vocabulary)
    for name in ("q_proj", "k_proj", "v_proj"):
        own = f"layers.0.self_attn.{name}.weight"
        tensors[own] = torch.zeros(tensors[own].shape[0], 2 * width)
    tensors["layers.0.hidden_norm.weight"] = torch.zeros(width)
    tensors["fc.weight"] = torch.zeros(width, 3 * width)
    tensors["lm_head.weight"] = torch.zeros(DRAFTED if reduced else vocabulary, width)
    if embeddings:
        tensors["embed_tokens.weight"] = torch.zeros(vocabulary, width)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.zeros(3 * width)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{number}.weight": torch.zeros(width) for number in range(3)}
    return _drawn(tensors) | (_vocabulary() if reduced else {})


def eagle3_config(
    kind="llama", layers=1, *, reduced=True, slides=False, verifier=None, width=WIDTH, vocabulary=VOCABULARY, **fields
):
    layer = layer_config(kind, layers, width, vocabulary, slides=slides).to_diff_dict()
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": DRAFTED if reduced else vocabulary, "tie_word_embeddings": False,
        "transformer_layer_config": {**layer, "model_type": kind},
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": verifier or {"name_or_path": None, "architectures": []},
        },
        **fields,
    }  # fmt: skip


def raw_config():
    """As the authors of EAGLE-3 write it: the layer's fields at the top level."""
    return {
        **layer_config("llama").to_diff_dict(), "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFTED,
    }  # fmt: skip


def raw_tensors():
    return {name.replace("layers.0.", "midlayer."): each for name, each in eagle3_tensors(embeddings=False).items()}


def save_drafter(folder, config, tensors, *, pickled=False):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return str(folder)


BLOCK, MASK = 5, 96
"""Rows of DFlash's block, and the token of its placeholders."""


def dflash_tensors(layers=2, *, reduced=False, width=WIDTH, vocabulary=VOCABULARY, **_fields):
    tensors = _layers_of("qwen3", layers, width, vocabulary)
    tensors |= {"fc.weight": torch.zeros(width, 3 * width), "hidden_norm.weight": torch.zeros(width)}
    if reduced:
        tensors["lm_head.weight"] = torch.zeros(DRAFTED, width)
    return _drawn(tensors) | (_vocabulary() if reduced else {})


def dflash_config(layers=2, *, reduced=False, slides=False, width=WIDTH, vocabulary=VOCABULARY, **fields):
    config = eagle3_config("qwen3", layers, reduced=reduced, slides=slides, width=width, vocabulary=vocabulary)
    config["speculators_config"]["algorithm"] = "dflash"
    return config | {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [1, 3, 5], "mask_token_id": MASK, **fields,
    }  # fmt: skip


def raw_dflash_config(layers=2, *, slides=False, **own):
    """As the authors of DFlash write it, `own` in its part: their layers are counted by what leaves them."""
    return {
        **layer_config("qwen3", layers, slides=slides).to_diff_dict(), "model_type": "qwen3", "block_size": BLOCK,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"target_layer_ids": [0, 2, 4], "mask_token_id": MASK, **own},
    }  # fmt: skip


RANK, LEVELS = 6, 4
"""Of DSpark's product of low rank, and how many tokens P-EAGLE drafts."""


def dspark_tensors(layers=2, *, reduced=False, gated=False, width=WIDTH, vocabulary=VOCABULARY):
    own = {
        "markov_w1.weight": torch.zeros(vocabulary, RANK),
        "markov_w2.weight": torch.zeros(DRAFTED if reduced else vocabulary, RANK),
    }
    if gated:
        own |= {"gate_proj.weight": torch.zeros(RANK, width + RANK), "gate_proj.bias": torch.zeros(RANK)}
    tensors = dflash_tensors(layers, reduced=reduced, width=width, vocabulary=vocabulary)
    return tensors | _drawn({f"markov_head.{name}": each for name, each in own.items()}, seed=1)


def dspark_config(layers=2, *, gated=False, **fields):
    return dflash_config(layers, **fields) | {
        "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "markov_rank": RANK,
        "markov_head_type": "gated" if gated else "vanilla", "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }  # fmt: skip


TAPS, GROUP = 2, 4
"""Of DFlash 2's convolutions, and how many numbers share a tap."""
DFLASH2 = {"conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": 8}


def dflash2_tensors(layers=2, *, width=WIDTH, vocabulary=VOCABULARY, **_fields):
    own = {
        f"candidate_selector.{name}_codebook": torch.zeros(vocabulary, RANK) for name in ("predecessor", "successor")
    }
    own["candidate_selector.hidden_projection.weight"] = torch.zeros(RANK, width)
    for layer, part in itertools.product(range(layers), ("attention_conv", "mlp_conv")):
        own[f"layers.{layer}.{part}.base_kernel"] = torch.zeros(2, TAPS, width)
        own[f"layers.{layer}.{part}.kernel_projection.weight"] = torch.zeros(2 * TAPS * width // GROUP, width)
    return dflash_tensors(layers, width=width, vocabulary=vocabulary) | _drawn(own, seed=1)


def dflash2_config(layers=2, **fields):
    return dflash_config(layers, **fields) | {
        "architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2", **DFLASH2,
    }  # fmt: skip


def peagle_tensors(*, width=WIDTH, **fields):
    masks = _drawn({"mask_hidden": torch.zeros(1, 1, 3 * width)}, seed=1)
    return eagle3_tensors(width=width, **fields) | masks


def peagle_config(**fields):
    config = eagle3_config(**fields)
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = LEVELS
    return config | {
        "architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle",
        "mask_token_id": fields.get("mask_token_id", MASK),
    }  # fmt: skip


_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
"""Further fields of the configuration of a hybrid model with experts."""


def mtp_config(kind="qwen3", **fields):
    config = eagle3_config(reduced=False, **fields)
    del config["draft_vocab_size"]  # the format has none
    own = layer_config("qwen3", 1 if kind == "qwen3" else 2).to_diff_dict() | {"model_type": kind}
    config["transformer_layer_config"] = own | ({} if kind == "qwen3" else _HYBRID)
    return config | {
        "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "num_nextn_predict_layers": 1,
    }  # fmt: skip


def mtp_tensors(kind="qwen3"):
    given = {**mtp_config(kind)["transformer_layer_config"], "vocab_size": 1}
    with torch.device("meta"):
        layer = AutoModel.from_config(AutoConfig.for_model(given.pop("model_type"), **given)).layers[-1]
    tensors = {name: torch.zeros(each.shape) for name, each in layer.state_dict().items()}
    norms = ("hidden_layernorm", "token_layernorm", "final_layernorm")
    tensors |= {"input_proj.weight": torch.zeros(WIDTH, 2 * WIDTH)} | {
        f"{each}.weight": torch.zeros(WIDTH) for each in norms
    }
    return _drawn({f"mtp_layers.0.{name}": each for name, each in tensors.items()})


_OF_GGUF = {
    "embed_tokens": "token_embd", "lm_head": "output", "norm": "output_norm", "input_norm": "enc.output_norm",
    "hidden_norm": "enc.output_norm", "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2",
    "input_layernorm": "attn_norm", "layers.hidden_norm": "attn_norm_2", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "fc": "fc",
    "attention_conv.base_kernel": "attn_conv_base", "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base", "mlp_conv.kernel_projection": "ffn_conv_proj",
    "candidate_selector.predecessor_codebook": "selector_predecessor",
    "candidate_selector.successor_codebook": "selector_successor",
    "candidate_selector.hidden_projection": "selector_hidden",
}  # fmt: skip
"""The format's tensors -> those of llama.cpp's conversion (b10731)."""


def save_gguf(file, method, config, tensors, **numbers):
    """Save a drafter as llama.cpp converts it, with further keys."""
    kind, layer = ("eagle3" if method == "eagle3" else "dflash"), config.get("transformer_layer_config", config)
    own = config | config.get("dflash_config", {})
    writer = gguf.GGUFWriter(file, kind)
    writer.add_tokenizer_model("none")
    writer.add_token_list([str(number) for number in range(layer["vocab_size"])])
    for key, value in {
        "block_count": layer["num_hidden_layers"], "context_length": layer["max_position_embeddings"],
        "embedding_length": layer["hidden_size"], "feed_forward_length": layer["intermediate_size"],
        "attention.head_count": layer["num_attention_heads"], "target_hidden_size": WIDTH,
        "attention.head_count_kv": layer["num_key_value_heads"], "attention.key_length": layer["head_dim"],
    }.items():  # fmt: skip
        writer.add_uint32(f"{kind}.{key}", value)
    writer.add_float32(f"{kind}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{kind}.rope.freq_base", 10000.0)
    for key, value in numbers.items():
        writer.add_float32(f"{kind}.{key}", value)
    raw = [number + 1 for number in own.get("target_layer_ids", ())]
    writer.add_array(f"{kind}.target_layers", raw or list(own.get("aux_hidden_state_layer_ids", READS)))
    if kind == "eagle3":
        writer.add_bool(f"{kind}.norm_before_residual", config.get("norm_before_residual", False))
    else:
        for name in ("block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            if name in own:
                writer.add_uint32(f"{kind}.{name}", own[name])
        writer.add_uint32("tokenizer.ggml.mask_token_id", own["mask_token_id"])
        if layer.get("use_sliding_window"):
            writer.add_uint32(f"{kind}.attention.sliding_window", layer["sliding_window"])
            slides = [each == "sliding_attention" for each in layer["layer_types"]]
            writer.add_array(f"{kind}.attention.sliding_window_pattern", slides)
    for name, each in tensors.items():
        if name == "d2t":
            writer.add_tensor(name, (each + torch.arange(len(each))).numpy())
        elif name != "t2d":
            block, path = name.split(".", 2)[1:] if name.startswith("layers.") else (None, name)
            path = path.removesuffix(".weight")
            base = _OF_GGUF["layers.hidden_norm" if block is not None and path == "hidden_norm" else path]
            turned = kind == "eagle3" and base in ("attn_q", "attn_k")  # pairs of rotary numbers beside each other
            pairs = each.unflatten(0, (-1, 2, layer["head_dim"] // 2)).transpose(1, 2) if turned else each
            prefix = "" if block is None else f"blk.{block}."
            suffix = "" if path.endswith("base_kernel") else ".weight"
            writer.add_tensor(f"{prefix}{base}{suffix}", pairs.reshape(each.shape).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


LENGTH, ROOTS = 30, (4, 11, 24)
"""Of a text whose drafts were scored by the library `speculators`, and the positions of its roots."""
CASES = {
    "eagle3": {
        "llama": {}, "qwen3": {"kind": "qwen3"}, "all tokens": {"reduced": False},
        "norm before the residual": {"norm_before_residual": True}, "norm before the map": {"norm_before_fc": True},
        "norm of each state": {"fc_norm": True, "norm_output": True}, "window": {"layers": 2, "slides": True},
    },
    "peagle": {
        "in parallel": {}, "in parallel, all tokens": {"reduced": False, "norm_before_residual": True},
        "in parallel, window": {"kind": "qwen3", "layers": 2, "slides": True},
    },
    "dflash": {
        "block": {"reduced": True}, "block, all tokens": {"reduced": False},
        "block, window": {"reduced": True, "slides": True},
        "block, window, all rows": {"reduced": True, "slides": True, "sliding_window_non_causal": True},
    },
    "dspark": {"block and token": {"reduced": True}, "block and token, gated": {"gated": True}},
    "mtp": {"layer of Qwen 3": {}, "layer of Qwen 3.5": {"kind": "qwen3_5_moe_text"}},
    "dflash2": {"block and candidates": {"slides": True}},
}  # fmt: skip
"""Drafters by method whose scores are in tests/data/speculators.json."""
MADE = {
    "eagle3": (eagle3_config, eagle3_tensors), "peagle": (peagle_config, peagle_tensors),
    "dflash": (dflash_config, dflash_tensors), "dspark": (dspark_config, dspark_tensors),
    "mtp": (mtp_config, mtp_tensors),
    "dflash2": (dflash2_config, dflash2_tensors),
}  # fmt: skip
"""What makes a method's configuration and tensors."""


def drafter_files(method, case, folder):
    """Save a drafter; return its configuration and tensors."""
    found = tuple(make(**CASES[method][case]) for make in MADE[method])
    save_drafter(folder, *found)
    return found


def states_of(layers):
    return torch.randn(LENGTH, layers * WIDTH, generator=torch.Generator().manual_seed(5))
