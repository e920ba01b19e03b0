"""Layer skipping: skipped sub-layers add nothing, weights are shared, texts are those of plain decoding."""

import copy
import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import foredraft
from foredraft.drafters import Resources, make_drafter
from foredraft.errors import StoreError, UnsupportedModelError, UsageError
from foredraft.graph.layout import lay_out_text
from foredraft.model.fingerprint import fingerprint
from foredraft.model.skipping import Skipped, default_skipped, read_skipped, skipping, write_skipped
from foredraft.testing import ToyTarget
from support.families import (
    GREEDY,
    NEW_TOKENS,
    SETTINGS,
    VOCABULARY,
    each_of,
    of_families,
    plain,
    prompt_of,
    target_of,
    written,
)
from support.pairs import pairs
from support.toys import TOY

FAMILIES = [
    "llama", "qwen3", "gpt2", "gemma2", "gpt_neox", "mistral", "qwen2", "gemma", "gemma3_text", "granite", "smollm3",
]  # fmt: skip
OUTPUTS = {
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "gpt_neox": ("attention.dense", "mlp.dense_4h_to_h"),
}
"""The output projections of a family's sub-layers, in a layer."""


def layer_list(model):
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))


def silenced(target, skipped):
    """Return a copy of the model in which the skipped sub-layers' output projections are zero: the same in weights."""
    model = copy.deepcopy(target.model)
    names = OUTPUTS.get(target.support.family, ("self_attn.o_proj", "mlp.down_proj"))
    for name, numbers in zip(names, (skipped.attention, skipped.mlp), strict=True):
        for number in numbers:
            for parameter in layer_list(model)[number].get_submodule(name).parameters():
                torch.nn.init.zeros_(parameter)
    return model


def scores(target, ids):
    return target.forward(lay_out_text(ids, 0), target.new_cache()).logits


@pytest.mark.parametrize("skipped", [Skipped((1,), ()), Skipped((), (0,)), Skipped((0,), (1,)), Skipped((1,), (0, 1))])
@each_of(FAMILIES)
def test_what_is_skipped_adds_nothing(family, skipped):
    target, ids = target_of(family), prompt_of(20)
    before = scores(target, ids)
    draft = skipping(target, skipped)
    with torch.inference_mode():
        expected = silenced(target, skipped)(torch.from_numpy(ids)[None]).logits[0]
    torch.testing.assert_close(scores(draft, ids), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores(draft, ids), before, atol=1e-2)
    torch.testing.assert_close(scores(target, ids), before, rtol=0, atol=0)  # the target is unchanged


@each_of(FAMILIES)
def test_all_weights_are_the_targets(family):
    target = target_of(family)
    own = {weight.data_ptr() for weight in target.model.parameters()}
    assert {weight.data_ptr() for weight in skipping(target, Skipped((0,), (0, 1))).model.parameters()} < own


@of_families(
    ("family", "options", "setting"),
    pairs(FAMILIES, [{}, {"attention": [1], "least_probability": 0.0}], list(SETTINGS)),
    ids=lambda value: "-".join(value) or "default" if isinstance(value, dict) else value,
)
def test_drafted_text_equals_plain_text(family, options, setting):
    drafter = make_drafter("layer_skip", options, Resources(VOCABULARY, target=target_of(family)))
    text, records = written(target_of(family), prompt_of(40), SETTINGS[setting], drafter, nodes=4)
    assert text == plain(family, 40, setting)
    assert sum(record.drafted for record in records) > 0


@pytest.mark.slow
def test_a_draft_model_that_leaves_out_little_is_mostly_right():
    drafter = make_drafter(
        "layer_skip", {"mlp": [5], "least_probability": 0.0}, Resources(8192, target=generator().target)
    )
    generator().attach("layer_skip", drafter, nodes=4)
    result = generator().generate("The small fox", max_new_tokens=48)
    generator().use("none")
    assert result.token_ids == generator().generate("The small fox", max_new_tokens=48).token_ids
    assert result.statistics.tokens_per_target_step > 3


@functools.cache
def generator():
    return foredraft.load(TOY, method="none", dtype="float32")


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 8, 9, 40])
def test_the_default_is_sound_for_every_number_of_layers(layers):
    chosen = default_skipped(layers)
    chosen.check(layers)
    assert layers < 3 or layers - 1 not in chosen.mlp


# --- files


def about():
    return {"trials": 3}


def test_a_file_comes_back_for_its_model_in_any_dtype(tmp_path):
    path, model = tmp_path / "skipped.json", target_of("llama").model
    write_skipped(path, Skipped((1,), (0, 1)), model, about())
    assert read_skipped(path, model) == Skipped((1,), (0, 1))
    assert read_skipped(path, copy.deepcopy(model).to(torch.bfloat16)) == Skipped((1,), (0, 1))
    assert json.loads(path.read_text())["trials"] == 3
    drafter = make_drafter("layer_skip", {"skipped": path}, Resources(VOCABULARY, target=target_of("llama")))
    text, _ = written(target_of("llama"), prompt_of(40), GREEDY, drafter)
    assert len(text) == NEW_TOKENS
    assert [each.name for each in tmp_path.iterdir()] == ["skipped.json"]


def test_one_changed_weight_is_another_model():
    model = copy.deepcopy(target_of("llama").model)
    before = fingerprint(model)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert fingerprint(model) != before


def damaged(content, **changes):
    return json.dumps({**json.loads(content), **changes})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda content: damaged(content, model="0" * 64), "was made for another model"),
        (lambda content: damaged(content, format=2), "not a file of skipped layers of format 1"),
        (lambda content: "[1, 2]", "not a file of skipped layers"),
        (lambda content: content[:40], r"cannot be used: .*line 3 column"),
        (
            lambda content: damaged(content, attention=[7]),
            "cannot be used: attention names layer 7; this model has layers 0 to 1",
        ),
        (lambda content: damaged(content, mlp="all"), "cannot be used: mlp is 'all'; it must be a list"),
        (lambda content: damaged(content, attention=[], mlp=[]), "none would be skipped"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, damage, says):
    path, model = tmp_path / "skipped.json", target_of("llama").model
    write_skipped(path, Skipped((1,), (1,)), model, about())
    path.write_text(damage(path.read_text()))
    with pytest.raises(StoreError, match=says):
        read_skipped(path, model)


def test_a_file_that_cannot_be_read_or_written_is_told(tmp_path):
    model = target_of("llama").model
    with pytest.raises(StoreError, match=r"cannot be used: .*No such file"):
        read_skipped(tmp_path / "none.json", model)
    with pytest.raises(StoreError, match="cannot be written"):
        write_skipped(Path("/dev/null/skipped.json"), Skipped((1,), ()), model, about())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"attention": [9]}, "attention names layer 9; this model has layers 0 to 1"),
        ({"mlp": [-1]}, "mlp names layer -1"),
        ({"attention": [0, 1], "mlp": [0, 1]}, "Of the 4 sub-layers all would be skipped"),
        ({"attention": []}, "none would be skipped"),
        ({"attention": [1, 1]}, "list of different layer numbers"),
        ({"mlp": 3}, "mlp is 3; it must be a list"),
        ({"mlp": [0.5]}, "list of different layer numbers"),
        ({"skipped": "a.json", "mlp": [1]}, "give the file or the lists"),
        ({"levels": 0}, "levels is 0; it must be 1 to 64"),
        ({"least_probability": 2}, "least_probability is 2.0; it must be 0 to 1"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options, says):
    with pytest.raises(UsageError, match=says):
        make_drafter("layer_skip", options, Resources(VOCABULARY, target=target_of("llama")))


@pytest.mark.parametrize("family", ["opt", "mixtral", "falcon"])
def test_families_whose_sub_layers_are_not_known_are_refused(family):
    with pytest.raises(UnsupportedModelError, match=f"The sub-layers of {family} models cannot be skipped"):
        skipping(target_of(family), Skipped((0,), ()))


@pytest.mark.parametrize("target", [None, ToyTarget()])
def test_without_a_target_of_layers_it_is_refused(target):
    with pytest.raises(UsageError, match="no model is loaded here"):
        make_drafter("layer_skip", {}, Resources(VOCABULARY, target=target))


def test_a_wrapped_model_is_refused():
    target = copy.copy(target_of("llama"))
    target.outline = copy.copy(target.model)
    target.model.forward = target.model.forward
    with pytest.raises(UnsupportedModelError, match="forward is wrapped"):
        skipping(target, Skipped((0,), ()))


def test_both_caches_follow_a_long_text():
    target = target_of("mistral")  # its sliding window is much shorter than the text
    drafter = make_drafter("layer_skip", {"mlp": [1], "least_probability": 0.0}, Resources(VOCABULARY, target=target))
    prompt = np.random.default_rng(5).integers(1, VOCABULARY, 120).astype(np.int64)
    nothing = make_drafter("none", {}, Resources(VOCABULARY))
    assert written(target, prompt, GREEDY, drafter)[0] == written(target, prompt, GREEDY, nothing)[0]
