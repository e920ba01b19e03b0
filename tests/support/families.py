"""Tiny random models of every supported family, prompts for them, and what they write plainly."""

import functools

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foredraft.contracts import DraftContext
from foredraft.control import FixedControl
from foredraft.drafters import Resources, make_drafter
from foredraft.engine.batch import steps
from foredraft.engine.run import Run
from foredraft.engine.state import SequenceState
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions

VOCABULARY, WINDOW, NEW_TOKENS = 97, 16, 32
SHORT, LONG = 8, 40
GREEDY = SamplingOptions()
SETTINGS = {
    "greedy": GREEDY,
    "T=0.7 top_p=0.9": SamplingOptions(do_sample=True, temperature=0.7, top_p=0.9, seed=11),
    "T=1": SamplingOptions(do_sample=True, seed=12),
}
_USUAL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_SLIDING = {"sliding_window": WINDOW}
_MIXED = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
_UNTIED = {"tie_word_embeddings": False}  # random tied embeddings say every token again
FAMILIES = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "num_hidden_layers": 4, "max_window_layers": 2, **_SLIDING},
    "qwen3": {},
    "mistral": _SLIDING,
    "gemma": _UNTIED,
    "gemma2": {**_SLIDING, **_UNTIED},
    "gemma3_text": {**_MIXED, **_UNTIED},
    "gpt2": {**_GPT, **_UNTIED},
    "gpt_neox": {"num_key_value_heads": None, "head_dim": None},
    "gptj": {**_GPT, "rotary_dim": 4},
    "opt": {"num_key_value_heads": None, "head_dim": None, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": _SLIDING,
    "falcon": {"alibi": False, "num_key_value_heads": None, "head_dim": None},
    "olmo2": {},
    "stablelm": {},
    "granite": {},
    "mixtral": _SLIDING,
    "gpt_oss": {**_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {},
    "cohere2": _MIXED,
}
"""What differs from the usual tiny configuration; None leaves a key out."""


QUICK = ("llama", "gpt2")


def each_of(families, quick=QUICK):
    """Parametrise a test over families; those that are not quick ones are slow tests."""
    return of_families("family", [(family,) for family in families], quick)


def of_families(names, rows, quick=QUICK, ids=None):
    """Parametrise a test over rows that begin with a family; those of families that are not quick are slow tests."""
    cases = [pytest.param(*row, marks=[] if row[0] in quick else [pytest.mark.slow]) for row in rows]
    return pytest.mark.parametrize(names, cases, ids=ids)


def configuration(family):
    own = FAMILIES[family]
    keys = {} if "n_embd" in own else dict(_USUAL)
    keys.update(own)
    keys = {name: value for name, value in keys.items() if value is not None}
    return AutoConfig.for_model(
        family, vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=0, eos_token_id=None, **keys
    )


def tiny_model(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = []
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:  # as spread as trained weights are; norms stay as they are
                spread = 0.1 if "embed" in name or "wte" in name else weight.shape[-1] ** -0.5 * 2
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
            elif not weight.any():  # biases; some families choose by them, and equal ones would be a draw
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model


@functools.cache
def target_of(family):
    return TorchTarget(tiny_model(configuration(family)))


def prompt_of(length):
    return np.random.default_rng(length).integers(1, VOCABULARY, length).astype(np.int64)


def written(target, prompt, sampling, drafter, nodes=10, new_tokens=NEW_TOKENS):
    seq = SequenceState(prompt, sampling, max_new_tokens=new_tokens, window=target.window)
    records = list(steps(Run(seq, drafter, FixedControl(nodes), DraftContext(target.vocabulary, seed=3), target)))
    return seq.emitted.tolist(), records


@functools.cache
def plain(family, length, setting):
    nothing = make_drafter("none", {}, Resources(VOCABULARY))
    text, records = written(target_of(family), prompt_of(length), SETTINGS[setting], nothing)
    assert len(text) == len(records) == NEW_TOKENS
    return text


def random_tree(rng, nodes):
    parents = np.array([rng.integers(-1, node) for node in range(nodes)], np.int32)
    return rng.permutation(VOCABULARY)[:nodes].astype(np.int32), parents
