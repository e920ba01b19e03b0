"""Drafters in others' formats: scored as the library `speculators` scores them, and which are refused."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from foredraft.contracts import SequenceView
from foredraft.drafters import Resources, make_drafter
from foredraft.errors import StoreError, UnsupportedModelError, UsageError
from foredraft.model.dflash import DFlashBlock, load_dflash
from foredraft.model.eagle3 import PEagleBlock, load_eagle3
from foredraft.model.mtp import load_trained_mtp
from foredraft.model.speculators import read_speculator
from foredraft.model.state_heads import HeadModel
from foredraft.model.state_rollout import BlockRollout, StateRollout
from support.families import VOCABULARY, prompt_of
from support.speculators import (
    CASES,
    DFLASH2,
    DRAFTED,
    LENGTH,
    MASK,
    READS,
    ROOTS,
    dflash2_tensors,
    drafter_files,
    eagle3_config,
    eagle3_tensors,
    peagle_config,
    peagle_tensors,
    raw_config,
    raw_dflash_config,
    raw_tensors,
    save_drafter,
    save_gguf,
    states_of,
    target_of,
)

SCORES = json.loads((Path(__file__).parent / "data" / "speculators.json").read_text())
"""Of version 0.9.0, by scripts/speculators_logits.py."""


def rollout_of(method, folder, target):
    """Return a rollout, and how many levels it is to draft."""
    if method in ("eagle3", "mtp"):
        head = (load_eagle3 if method == "eagle3" else load_trained_mtp)(folder, target.model)
        return StateRollout(head, target.with_model(HeadModel(head)), 4), 3
    head = (load_eagle3 if method == "peagle" else load_dflash)(folder, target.model, method)
    block = PEagleBlock(head, target.with_model(HeadModel(head))) if method == "peagle" else DFlashBlock(head)
    return BlockRollout(head, block, 4), block.levels


def assert_scored_as_by_the_library(method, case, folder):
    ids, states, found = prompt_of(LENGTH), states_of(1 if method == "mtp" else 3), []
    rollout, levels = rollout_of(method, folder, target_of("llama"))
    for root in ROOTS:
        found += rollout.start(SequenceView(ids[: root + 1], root + 1, states[:root]))
        for row in range(levels - 1):
            found += rollout.expand(ids[root + row + 1][None].astype(np.int32), np.array([row - 1], np.int32))
    torch.testing.assert_close(torch.stack(found).clamp(-1e9), torch.tensor(SCORES[case]), atol=1e-4, rtol=0)


AS_GGUF = [("eagle3", "norm before the residual"), ("dflash", "block"), ("dspark", "block and token")]


@pytest.mark.parametrize(
    ("method", "case", "is_gguf"),
    [
        *((method, case, False) for method in CASES for case in CASES[method]),
        *((method, case, True) for method, case in AS_GGUF),
    ],
)
def test_drafts_are_scored_as_by_the_library_of_the_format(method, case, is_gguf, tmp_path):
    made = drafter_files(method, case, tmp_path)
    folder = save_gguf(tmp_path / "it.gguf", method, *made) if is_gguf else tmp_path
    assert_scored_as_by_the_library(method, case, folder)


def test_a_gguf_file_says_what_its_folder_says(tmp_path):
    config, tensors = raw_dflash_config(slides=True, **DFLASH2), dflash2_tensors()
    save_drafter(tmp_path, config, tensors)
    folder, file = (
        read_speculator(place, "dflash2", target_of("llama").model)
        for place in (tmp_path, save_gguf(tmp_path / "it.gguf", "dflash2", config, tensors))
    )
    assert (folder.layers, folder.ids, set(folder.weights)) == (file.layers, file.ids, set(file.weights))
    assert all(torch.equal(each, file.weights[name]) for name, each in folder.weights.items())
    differing = ("tie_word_embeddings", "block_size")  # which say nothing of the layers
    ours, theirs = (
        {name: value for name, value in each.layer_config.to_dict().items() if name not in differing}
        for each in (file, folder)
    )
    assert ours == theirs
    assert all(folder.config[name] == file.config[name] for name in (*DFLASH2, "block_size", "causal_layers"))


def test_a_gguf_file_that_says_what_its_kind_of_head_does_not_do_is_refused(tmp_path):
    made = drafter_files("eagle3", "llama", tmp_path)
    file = save_gguf(tmp_path / "it.gguf", "eagle3", *made, final_logit_softcapping=30.0)
    with pytest.raises(UnsupportedModelError, match=r"final_logit_softcapping = 30.0"):
        read_speculator(file, "eagle3", target_of("llama").model)


def test_a_raw_drafter_is_scored_as_the_same_one_in_the_format(tmp_path):
    """With names as in a larger model, the target's number of layers, flags in a part, and layers counted from 1."""
    part = {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 2]}
    tensors = {f"draft_model.model.{name}": each for name, each in eagle3_tensors().items()}
    tensors["draft_model.model.d2t"] = tensors["draft_model.model.d2t"].int()
    save_drafter(tmp_path, raw_config() | {"num_hidden_layers": 40, "eagle_config": part}, tensors)
    assert load_eagle3(tmp_path, target_of("llama").model).reads == READS
    assert_scored_as_by_the_library("eagle3", "norm before the residual", tmp_path)


def test_a_raw_drafter_in_parallel_is_scored_as_the_same_one_in_the_format(tmp_path):
    tensors = peagle_tensors()
    tensors["mask_hidden"] = tensors["mask_hidden"][0]
    levels = peagle_config()["speculators_config"]
    save_drafter(tmp_path, raw_config() | {"pard_token": MASK, "speculators_config": levels}, tensors)
    assert_scored_as_by_the_library("peagle", "in parallel", tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_a_raw_drafter_without_an_lm_head_has_its_embeddings_or_the_targets(tied, tmp_path):
    tensors = {name: each for name, each in eagle3_tensors(reduced=False).items() if name != "lm_head.weight"}
    save_drafter(tmp_path, raw_config() | {"tie_word_embeddings": tied, "draft_vocab_size": None}, tensors)
    model = target_of("llama").model
    expected = tensors["embed_tokens.weight"] if tied else model.get_output_embeddings().weight
    assert torch.equal(load_eagle3(tmp_path, model).ends.lm_head.weight, expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 4}, {"layer_types": ["sliding_attention"]},
        {"rope_parameters": {"type": "mrope", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}},
    ],
)  # fmt: skip
def test_windows_of_no_layer_and_sections_of_positions_change_nothing(fields, tmp_path):
    save_drafter(tmp_path, eagle3_config(**layer(**fields)), eagle3_tensors())
    assert_scored_as_by_the_library("eagle3", "llama", tmp_path)


def made(folder, config, tensors, family="llama", method="eagle3", **saving):
    save_drafter(folder, config, tensors, **saving)
    return make_drafter(method, {"model": str(folder)}, Resources(VOCABULARY, target=target_of(family)))


def without(name):
    return {own: each for own, each in eagle3_tensors().items() if own != name}


OTHER = {"name_or_path": "meta-llama/Llama-3.1-8B", "architectures": ["LlamaForCausalLM"]}


def layer(**fields):
    return {"transformer_layer_config": {**eagle3_config()["transformer_layer_config"], **fields}}


DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (eagle3_config(verifier=OTHER), "target, meta-llama/Llama-3.1-8B: a Llama model.* this one is a Qwen3"),
        (eagle3_config(target_hidden_size=64), "hidden states of 64 numbers, and this one's have 32"),
        (eagle3_config(**layer(vocab_size=128)), "a vocabulary of 128 tokens, and this model has 97"),
        (eagle3_config(eagle_aux_hidden_state_layer_ids=[2, 3, 9]), "states before layer 9 .* layers 0 to 5"),
        (eagle3_config(speculators_model_type="mlp"), "is for mlp, not for eagle3; methods are eagle3, peagle, dflash"),
        (eagle3_config(speculators_model_type="dflash"), "is for dflash, not for eagle3; give method 'dflash'"),
        (eagle3_config(**layer(model_type="deepseek_v3")), "layers of type deepseek_v3.* those of llama and qwen3"),
        (raw_config() | {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False, which"),
        (eagle3_config(**layer(quantization_config={"quant_method": "fp8"})), r"is quantised \(config.json\)"),
    ],
)  # fmt: skip
def test_a_drafter_of_another_kind_or_target_is_refused(config, sentence, tmp_path):
    with pytest.raises(UsageError, match=sentence):
        made(tmp_path, config, eagle3_tensors(), family="qwen3")


def test_a_quantised_drafter_is_refused(tmp_path):
    tensors = eagle3_tensors()
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)
    with pytest.raises(UsageError, match=r"is quantised \(fc.weight is of type int8\).*give one in bfloat16"):
        made(tmp_path, eagle3_config(), tensors)


@pytest.mark.parametrize("name", ["layers.0.self_attn.q_proj.bias", "layers.1.mlp.up_proj.weight", "lm_head.bias"])
def test_a_tensor_that_would_not_be_used_is_refused(name, tmp_path):
    with pytest.raises(UsageError, match=f"has the tensor {name}, which foredraft does not know"):
        made(tmp_path, eagle3_config(), eagle3_tensors() | {name: torch.ones(32)})


def test_tensors_that_only_training_or_other_programs_read_are_left_alone(tmp_path):
    names = ("verifier_norm.weight", "verifier_lm_head.weight", "midlayer.self_attn.rotary_emb.inv_freq")
    assert made(tmp_path, eagle3_config(), eagle3_tensors() | {name: torch.ones(32) for name in names})


def test_rotary_frequencies_are_those_of_the_configuration_in_any_dtype(tmp_path):
    save_drafter(tmp_path, eagle3_config(), eagle3_tensors())
    heads = [load_eagle3(tmp_path, copy.deepcopy(target_of("llama").model).to(dtype)) for dtype in DTYPES]
    exact, rounded = (head.layers.rotary.inv_freq for head in heads)
    assert torch.equal(exact, rounded)
    assert {head.layers.fc.weight.dtype for head in heads} == set(DTYPES)


def test_damaged_drafters_are_refused(tmp_path):
    with pytest.raises(StoreError, match=r"has no tensor fc\.weight"):
        made(tmp_path / "one", eagle3_config(), without("fc.weight"))
    with pytest.raises(StoreError, match=r"has a tensor of shape \[3, 3\] as norm.weight"):
        made(tmp_path / "two", eagle3_config(), without("norm.weight") | {"norm.weight": torch.zeros(3, 3)})
    with pytest.raises(StoreError, match=r"norm.weight holds NaN"):
        made(tmp_path / "three", eagle3_config(), without("norm.weight") | {"norm.weight": torch.full((32,), np.nan)})
    with pytest.raises(StoreError, match="neither speculators_model_type nor the tensors of EAGLE-3"):
        made(tmp_path / "four", raw_config(), without("fc.weight"))
    with pytest.raises(StoreError, match="scores 40 tokens, and its tensor d2t does not name as many"):
        made(tmp_path / "six", eagle3_config(), without("d2t"))
    with pytest.raises(StoreError, match="does not name as many different ones below 97"):
        made(tmp_path / "seven", eagle3_config(), eagle3_tensors() | {"d2t": torch.full((DRAFTED,), 90)})
    wide = eagle3_config(target_hidden_size=32, width=16), eagle3_tensors(width=16, embeddings=False)
    with pytest.raises(StoreError, match=r"has no tensor embed_tokens\.weight, and the target's have another width"):
        made(tmp_path / "eight", *wide)
    (tmp_path / "five").mkdir()
    with pytest.raises(UsageError, match=r"holds no drafter: config.json is missing"):
        make_drafter("eagle3", {"model": str(tmp_path / "five")}, Resources(VOCABULARY, target=target_of("llama")))
    (tmp_path / "seven" / "model.safetensors").unlink()
    (tmp_path / "seven" / "model.safetensors").symlink_to(tmp_path / "nothing")  # safetensors' error names no file
    with pytest.raises(UsageError, match=r"holds no drafter: .*nothing|holds no drafter: .*model\.safetensors"):
        make_drafter("eagle3", {"model": str(tmp_path / "seven")}, Resources(VOCABULARY, target=target_of("llama")))
    (tmp_path / "one" / "config.json").write_text("{")
    with pytest.raises(StoreError, match="is damaged"):
        make_drafter("eagle3", {"model": str(tmp_path / "one")}, Resources(VOCABULARY, target=target_of("llama")))


@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight"])
@pytest.mark.parametrize("shape", [(DRAFTED + 1, 33), (40,)])
def test_ends_of_another_shape_are_refused_before_they_draft(name, shape, tmp_path):
    with pytest.raises(StoreError, match=rf"has a tensor of shape \[{shape[0]}.* as {name}, where .* 32\] is needed"):
        made(tmp_path, eagle3_config(), eagle3_tensors() | {name: torch.ones(shape)})


@pytest.mark.parametrize(
    "config",
    [
        eagle3_config(eagle_aux_hidden_state_layer_ids=["a"]),
        eagle3_config(speculators_config={"verifier": "x"}),
        eagle3_config(**layer(layer_types=["sliding_attention"], sliding_window="x")),
        *(eagle3_config(**layer(**{name: value})) for name, value in {
            "num_attention_heads": 5, "rms_norm_eps": None, "num_hidden_layers": 0, "hidden_act": "nope",
            "rope_scaling": {"rope_type": "bogus"},
        }.items()),
    ],
)  # fmt: skip
def test_a_configuration_that_transformers_cannot_build_is_damaged(config, tmp_path):
    with pytest.raises(StoreError, match="is damaged"):
        made(tmp_path, config, eagle3_tensors())


def test_a_cut_pickled_drafter_is_damaged(tmp_path):
    save_drafter(tmp_path, raw_config(), raw_tensors(), pickled=True)
    (tmp_path / "pytorch_model.bin").write_bytes(b"junk")
    with pytest.raises(StoreError, match="is damaged"):
        make_drafter("eagle3", {"model": str(tmp_path)}, Resources(VOCABULARY, target=target_of("llama")))


def test_a_drafter_is_needed_and_a_model(tmp_path):
    with pytest.raises(UsageError, match=r'train them with `foredraft train eagle3`.*\{"model": "FOLDER"\}'):
        make_drafter("eagle3", {}, Resources(VOCABULARY, target=target_of("llama")))
    with pytest.raises(UsageError, match="no model is loaded here"):
        make_drafter("eagle3", {"model": str(tmp_path)}, Resources(VOCABULARY))


def test_a_raw_drafter_reads_the_layers_that_it_names(tmp_path):
    assert made(tmp_path / "one", raw_config(), raw_tensors(), pickled=True).needs.hidden == READS
    for ids, read in (([2, 3, 6], (2, 3, 6)), ([1, 3, 5], (2, 4, 6))):  # the second as SGLang counts them
        named = raw_config() | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
        assert made(tmp_path / str(read), named, raw_tensors()).needs.hidden == read
