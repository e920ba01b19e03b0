"""Latent attention that attends to latents: the scores of the model's own attention, and what a text keeps of it."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoConfig

import naive.compiled
from foredraft.errors import UsageError
from foredraft.graph.layout import lay_out
from foredraft.model.compiled.attention import compiled_attention
from foredraft.model.compiled.export import FunctionalForward, Subject, row_arguments
from foredraft.model.compiled.latents import attended_latents, real_rotations
from foredraft.model.target import TorchTarget
from support.causal_types import tiny_configuration
from support.families import each_of, prompt_of, random_tree, tiny_model

LATENT, ROTATED = 32, 16
SIZES = {
    "hidden_size": 64, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROTATED, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "qk_head_dim": 32 + ROTATED, "head_dim": ROTATED, "moe_intermediate_size": 32, "max_position_embeddings": 1024,
}  # fmt: skip
LLAMA = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 97}
FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu", "axk1", "longcat_flash")


def model_of(family, **others):
    config = tiny_configuration(family)
    for name, value in (SIZES | others).items():
        setattr(config, name, value)
    return tiny_model(config)


def prefilled(target, ids):
    cache = target.new_cache()
    target.prefill(ids, cache)
    return cache


@each_of(FAMILIES, quick=("deepseek_v2",))
def test_rows_that_attend_to_latents_score_as_those_that_attend_to_keys(family, monkeypatch):
    model, ids = model_of(family), prompt_of(12)
    target, rng = TorchTarget(model), np.random.default_rng(4)
    cache = prefilled(target, ids[:-1])
    layout = lay_out(int(ids[-1]), *random_tree(rng, 9), len(ids) - 1)
    expected = target.forward(layout, prefilled(target, ids[:-1])).logits
    Subject(model)  # there is a kernel for its attention
    functional, buffers = FunctionalForward(model), cache.reserved_buffers(layout.rows)
    arguments = row_arguments([layout], {None: [(0, len(ids) - 1)]}, np.arange(layout.rows), target.dtype)
    half = len(buffers) // 2
    monkeypatch.setattr(torch.ops.foredraft, "multiply_experts", naive.compiled.multiply_experts)
    with (
        real_rotations(model),
        attended_latents(model),
        torch.inference_mode(),
        compiled_attention(functional, naive.compiled.attend),
    ):
        scores, _ = functional(*arguments, buffers[:half], buffers[half:], [])
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(target.forward(layout, prefilled(target, ids[:-1])).logits, expected), "the model is as it was"


def test_a_text_keeps_latents_and_one_rotated_key_of_each_token():
    target = TorchTarget(model_of("deepseek_v3"))
    for layer in prefilled(target, prompt_of(12)).layers:
        assert layer.keys.shape[1::2] == (1, LATENT + ROTATED)
        assert layer.values.numel() == 0


def test_an_expansion_of_another_form_is_not_taken_for_transformers_own():
    model = copy.deepcopy(model_of("deepseek_v3"))
    projection = model.model.layers[1].self_attn.kv_b_proj
    projection.bias = torch.nn.Parameter(torch.ones(projection.out_features))
    with pytest.raises(UsageError, match="way of its own"), attended_latents(model):
        pass


def test_latents_as_large_as_the_rotated_keys_are_not_compiled():
    model = model_of("deepseek_v3", kv_lora_rank=ROTATED)
    with pytest.raises(UsageError, match="both have 16 numbers; it is not compiled"), attended_latents(model):
        pass


def test_rotations_by_real_numbers_are_those_by_complex_ones_and_leave_other_models_alone():
    model, other = model_of("deepseek_v2"), model_of("deepseek_v2")
    ids = torch.from_numpy(prompt_of(12))[None]
    with torch.inference_mode():
        expected = model(ids).logits
        with real_rotations(model):
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
            assert torch.equal(other(ids).logits, expected)
        assert torch.equal(model(ids).logits, expected)


def test_rotations_that_change_beyond_the_window_are_traced_as_they_are_within_it():
    parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0}
    model = tiny_model(AutoConfig.for_model("llama", **LLAMA, rope_parameters=parameters))
    rotary, given = model.model.rotary_emb, (torch.zeros(1), torch.arange(7)[None])
    with real_rotations(model):
        program = torch.export.export(rotary, given, strict=False)
    torch.testing.assert_close(program.module()(*given), rotary(*given))
    assert rotary.rope_type == "dynamic"
