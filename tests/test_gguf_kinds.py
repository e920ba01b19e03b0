"""GGUF files of every kind score as llama.cpp scores them; what a file says and foredraft does not use is refused.

`scripts/gguf_referee.py --record` has llama.cpp (llama-cpp-python 0.3.36) score the same tiny files, and keeps the
scores of some ids at some positions in data/gguf_scores.npz.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import gguf_files
import gguf_referee
from foredraft import ForedraftError, UnsupportedModelError, UsageError
from foredraft.model.gguf.architectures import ARCHITECTURES
from foredraft.model.gguf.configuration import row_of
from foredraft.model.gguf.files import parts_of
from foredraft.model.gguf.metadata import Keys, Metadata
from foredraft.model.gguf.reader import load_gguf, write_folder

CASES = {case.name: case for case in gguf_files.CASES}


@pytest.fixture(scope="module")
def recorded():
    with np.load(gguf_referee.RECORDED) as found:
        return dict(found)


def scores(case, folder, **options):
    """Return the scores that are recorded too, by the model that foredraft makes of a case's file."""
    file = gguf_files.write(case, folder / "tiny.gguf", **options)
    parts, place = parts_of(file), folder / "folder"
    write_folder(parts, place)
    model = load_gguf(place, parts, torch.float32).eval()
    with torch.inference_mode():
        found = model(torch.from_numpy(gguf_referee.token_ids())[None]).logits[0].numpy()
    return found[list(gguf_referee.POSITIONS), gguf_referee.COLUMNS]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__")
@pytest.mark.parametrize("name", CASES)
def test_a_file_scores_as_in_llama_cpp(name, recorded, tmp_path):
    found = scores(CASES[name], tmp_path)
    assert gguf_referee.apart(found, recorded[name]) <= CASES[name].limit


def test_every_architecture_has_a_file_that_llama_cpp_scored(recorded):
    assert {case.architecture for case in CASES.values()} == ARCHITECTURES.keys()
    assert recorded.keys() == CASES.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("llama yarn", {".rope.scaling.factor": 2.0}),
        ("gemma3 linear", {".rope.scaling.factor": 2.0}),
        ("phi4-mini", {".rope.scaling.attn_factor": 1.3}),
        ("stablelm", {".rope.freq_base": 30000.0}),
        ("falcon 7B", {".attention.layer_norm_epsilon": 0.3}),
        ("granite", {".residual_scale": 0.5}),
        ("olmo3", {".attention.sliding_window": 16}),
        ("glm4moe", {".expert_weights_scale": 1.0}),
    ],
)
def test_a_file_with_another_number_scores_differently(name, changed, recorded, tmp_path):
    found = scores(CASES[name], tmp_path, changed=changed)
    assert gguf_referee.apart(found, recorded[name]) > 4 * CASES[name].limit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("llama", {".rope.scaling.type": "yarn"}),
        ("llama linear", {".rope.scaling.type": "longrope"}),
        ("stablelm", {".use_parallel_residual": True}),  # so conversions of the first StableLMs have it
    ],
)
def test_a_key_that_changes_nothing_in_llama_cpp_changes_nothing(name, changed, recorded, tmp_path):
    found = scores(CASES[name], tmp_path, changed=changed)
    assert gguf_referee.apart(found, recorded[name]) <= CASES[name].limit


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exaone-moe", "nemotron_h_moe"])
def test_keys_of_experts_that_are_left_out_have_llama_cpps_defaults(name, tmp_path):
    defaults = {".expert_weights_norm": False, ".expert_weights_scale": 1.0}
    (tmp_path / "without").mkdir()
    without = scores(CASES[name], tmp_path / "without", without=list(defaults))
    assert np.array_equal(without, scores(CASES[name], tmp_path, changed=defaults))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("llama", {".rope.scaling.new_rule": 2.0}, r"llama\.rope\.scaling\.new_rule = 2\.0.*does not know"),
        ("llama", {".attention.scale": 0.5}, r"attention\.scale = 0\.5.*no field"),
        ("llama", {".rope.scaling.type": "su"}, r"rope.scaling.type = 'su'"),
        ("llama", {".rope.scaling.attn_factor": 1.3}, r"rope\.scaling\.attn_factor = 1\.3 with the rule default"),
        ("llama", {".rope.dimension_count": 16}, r"rope\.dimension_count = 16, where a head has 32 numbers"),
        ("llama", {".attention.causal": False}, r"attention\.causal = False"),
        ("llama", {".embedding_length": 64, ".rope.dimension_count": 16}, r"has the shape .* but its keys say"),
        ("llama", {".block_count": 1}, r"9 tensors that are not.*such as blk\.1\."),
        ("llama fused", {".attention.head_count_kv": 1}, r"2 tensors that are not.*such as blk\.0\.attn_qkv"),
        ("llama3", {".rope.scaling.factor": 3.0}, r"both rope_freqs\.weight and the rule linear"),
        ("phi4-mini", {".rope.scaling.factor": 3.0}, r"both rope_factors_short\.weight and the rule linear"),
        ("llama4", {".attention.sliding_window": 0}, r"attention\.sliding_window = 0"),
        ("deepseek2 lite", {".expert_weights_norm": True}, r"expert_weights_norm is true"),
        ("gemma4", {".rope.dimension_count_swa": 16}, r"rope\.dimension_count_swa is not the width of a head"),
        ("granite", {".rope.scaling.finetuned": False}, r"rope\.scaling\.finetuned = False"),
    ],
)
def test_what_a_file_says_and_the_model_cannot_is_refused(name, changed, said, tmp_path):
    with pytest.raises(UnsupportedModelError, match=said):
        scores(CASES[name], tmp_path, changed=changed)


@pytest.mark.slow
def test_a_tensor_too_many_or_too_few_is_refused_by_name(tmp_path):
    tensors = gguf_files.tensors_of(CASES["llama"])
    with pytest.raises(UnsupportedModelError, match=r"such as blk\.1\.attn_q_norm\.weight"):
        scores(CASES["llama"], tmp_path, tensors=tensors | {"blk.1.attn_q_norm.weight": np.ones(32, np.float32)})
    (tmp_path / "less").mkdir()
    with pytest.raises(
        UnsupportedModelError, match=r"no tensor for the weight model\.layers\.1\.mlp\.down_proj\.weight"
    ):
        scores(CASES["llama"], tmp_path / "less", without=["blk.1.ffn_down.weight"])


def test_the_first_files_of_glm_4_7_flash_choose_experts_as_llama_cpp_has_it():
    keys = {"general.architecture": "deepseek2", "deepseek2.vocab_size": 154880}
    assert row_of("deepseek2").family_of(Keys(Metadata(keys))) == "deepseek_v3"
    assert row_of("deepseek2").family_of(Keys(Metadata(keys | {"deepseek2.vocab_size": 102400}))) == "deepseek_v2"


def test_an_unknown_architecture_is_refused_with_those_that_are_read(tmp_path):
    strange = gguf_files.Case("strange", "strange", "attn_norm")
    with pytest.raises(UnsupportedModelError, match=r"architecture 'strange'.*it reads llama, .*nemotron_h"):
        write_folder([gguf_files.write(strange, tmp_path / "strange.gguf")], tmp_path / "folder")


def test_an_architecture_that_an_older_gguf_does_not_know_is_refused(tmp_path, monkeypatch):
    known = {number: name for number, name in gguf.MODEL_ARCH_NAMES.items() if name != "llama"}
    monkeypatch.setattr(gguf, "MODEL_ARCH_NAMES", known)
    with pytest.raises(UnsupportedModelError, match=r"architecture 'llama'.*pip install -U gguf"):
        scores(CASES["llama"], tmp_path)


def test_a_missing_part_of_a_split_file_is_named(tmp_path):
    first = gguf_files.write(CASES["llama in two parts"], tmp_path / "tiny.gguf")
    second = first.with_name("tiny-00002-of-00002.gguf")
    assert parts_of(second) == [first, second]
    second.unlink()
    with pytest.raises(UsageError, match=r"one of 2 parts.*tiny-00002-of-00002\.gguf is not beside it"):
        parts_of(first)
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(UsageError, match=r"is one of 2 parts of a model, but its name does not say so"):
        write_folder(parts_of(renamed), tmp_path / "folder")
    assert not Path(tmp_path / "folder").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "deepseek2", "granitehybrid", "gemma4 E2B"])
def test_a_damaged_file_is_refused_in_a_sentence_or_still_a_model(name, tmp_path):
    whole = gguf_files.write(CASES[name], tmp_path / "whole.gguf").read_bytes()
    random, damaged, refused = np.random.default_rng(0), tmp_path / "damaged.gguf", 0
    for number in range(25):
        content = bytearray(whole)
        for place in random.integers(0, 12_000, 3):  # in the header
            content[place] = random.integers(256)
        damaged.write_bytes(content[: random.integers(len(whole))] if number % 5 == 0 else content)
        try:
            write_folder([damaged], tmp_path / str(number))
            load_gguf(tmp_path / str(number), [damaged], torch.float32)
        except ForedraftError:
            refused += 1
    assert refused > 5
