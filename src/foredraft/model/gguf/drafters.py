"""GGUF files of drafters: EAGLE-3, DFlash and DSpark in the `speculators` format, and Gemma 4's assistants.

llama.cpp converts published drafters to them, with the tokenizer of their target. Does not know how a drafter runs, nor
check it against a target.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foredraft.errors import UnsupportedModelError, UsageError
from foredraft.model.gguf.architectures import DRAFTERS
from foredraft.model.gguf.configuration import configuration
from foredraft.model.gguf.files import parts_of
from foredraft.model.gguf.metadata import Keys
from foredraft.model.gguf.reader import opened
from foredraft.model.gguf.rearranged import CHANGES
from foredraft.model.gguf.weights import state_of

_NAMES = {
    "token_embd": "embed_tokens", "output": "lm_head", "output_norm": "norm", "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2", "conf_proj": "confidence_head.proj",
    "selector_predecessor": "candidate_selector.predecessor_codebook",
    "selector_successor": "candidate_selector.successor_codebook",
    "selector_hidden": "candidate_selector.hidden_projection", "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection", "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}  # fmt: skip
"""A file's tensor, in a layer or not, without its suffix -> the format's."""
_STATES = {"eagle3": "input_norm", "dflash": "hidden_norm"}
"""Kinds of files -> the format's name of `enc.output_norm`, before the map of the target's states or behind it."""
_FIELDS = {
    "target_layers": "aux_hidden_state_layer_ids", "embedding_scale": "input_embedding_scale",
    "logit_scale": "output_multiplier", "attention.causal": "is_causal",
}  # fmt: skip
"""A file's key -> the field of the format, or of the drafter's authors, where it has another name."""
_ASSISTANT = "gemma4-assistant"
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(.+?)(\.weight|\.bias)?")


def read_gguf_drafter(file: Path, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the configuration and the tensors of a drafter's file, matrices in `dtype`.

    Raises UsageError for a damaged file or one of a model, and UnsupportedModelError for what the file says and no
    table knows.
    """
    metadata, tensors = opened(parts_of(file))
    kind, keys = metadata.architecture, Keys(metadata)
    if kind not in _STATES:
        raise UsageError(f"{file} is a file of the kind {kind}; those of heads are of {' or '.join(_STATES)}.")
    vocabulary = len(metadata.get("tokenizer.ggml.tokens", ()))
    layer = configuration(metadata, {"token_embd.weight": (vocabulary,), **tensors.shapes}, tensors.sample)
    weights, row = {}, DRAFTERS[kind]
    for name in set(tensors) - {"d2t", "rope_freqs.weight"}:
        block, base, suffix = _TENSOR.fullmatch(name).groups()  # type: ignore[union-attr]  # it matches any name
        values = tensors.read(name, dtype)
        values = CHANGES[row.changes[base]](values, layer) if base in row.changes else values
        path = _STATES[kind] if base == "enc.output_norm" else _NAMES.get(base, base)
        suffix = "" if path.endswith("_codebook") else suffix or ""
        weights[("" if block is None else f"layers.{block}.") + path + suffix] = values
    if "d2t" in tensors:
        ids = tensors.stored("d2t")[0].view(np.int64).flatten()
        weights["d2t"] = torch.from_numpy(ids - np.arange(len(ids)))
    markov = weights.get("markov_head.markov_w1.weight")
    if kind == "dflash":
        kind = "dspark" if markov is not None else "dflash2" if "selector_hidden.weight" in tensors else kind
    if keys.get("target_layers") is None:
        raise UnsupportedModelError(f"{file} does not say which of the target's layers it reads (target_layers).")
    named = {_FIELDS.get(key, key): keys.get(key) for key in row.keys}
    config = {
        "speculators_model_type": kind,
        "transformer_layer_config": {**layer.to_diff_dict(), "model_type": layer.model_type},
        "draft_vocab_size": len(weights["d2t"]) if "d2t" in weights else vocabulary,
        "markov_rank": 0 if markov is None else markov.shape[1],
        "mask_token_id": metadata.get("tokenizer.ggml.mask_token_id"),
        **{name: value for name, value in named.items() if value is not None},
    }
    return config, weights


def read_gguf_assistant(file: Path, dtype: torch.dtype) -> Any:
    """Return the assistant in a file as transformers' model, in `dtype`; raises as `read_gguf_drafter` does."""
    from transformers import AutoModelForCausalLM, Gemma4AssistantConfig

    metadata, tensors = opened(parts_of(file))
    if metadata.architecture != _ASSISTANT:
        raise UsageError(f"{file} is a file of the kind {metadata.architecture}; an assistant's is {_ASSISTANT}.")
    text = configuration(metadata, tensors.shapes, tensors.sample)
    text.vocab_size_per_layer_input = 0  # as transformers asks of an assistant
    width = Keys(metadata).get("embedding_length_out")
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=width)
    with torch.device("meta"):
        wanted = AutoModelForCausalLM.from_config(config)
    names = dict(wanted.state_dict())
    del names["lm_head.weight"]  # the embeddings
    state = state_of("gemma4", tensors, names, text, dtype, lambda weight: weight, text.num_hidden_layers)
    return type(wanted).from_pretrained(None, config=config, state_dict=state, dtype=dtype)
