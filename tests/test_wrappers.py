"""Models with a vision part: as objects and by name, their texts are those of their own `generate`, without images."""

import json
from functools import wraps

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, ProcessorMixin

import foredraft
from foredraft import UnsupportedModelError, UsageError
from foredraft.cli import main
from foredraft.errors import ForedraftWarning
from foredraft.integrations.transformers import last_statistics
from foredraft.model.loading import load_model
from support.causal_types import tiny_configuration
from support.families import VOCABULARY, each_of, of_families, target_of, tiny_model
from support.outlines import assert_outlined
from support.tokenizers import pretrained_words
from support.wrappers import TEXT, WRAPPERS, saved, tiny_wrapper, wrapper_config, wrapper_of

NEW_TOKENS = 40
WRAPPER = each_of(WRAPPERS, quick=("gemma3",))
CONFIGS = {
    "a chain": {"method": "draft_model", "num_speculative_tokens": 5},
    "a tree": {"method": "draft_tree", "num_speculative_tokens": 8, "least_probability": 0.0},
    "wrong drafts": {"method": "adaptix", "table": "none", "num_speculative_tokens": 8},
}
"""The first two draft with the model itself, so most drafts are right; the third with what repeats by chance.

A chain is a tree without branches, which no family treats otherwise; one is drafted for one family."""


def prompts(*lengths):
    """Return rows of several lengths as a batch padded on the left: ids and mask."""
    rows = [np.random.default_rng(n).integers(2, VOCABULARY, n) for n in lengths]
    ids, mask = torch.zeros(len(rows), max(lengths), dtype=torch.long), torch.zeros(len(rows), max(lengths))
    for number, row in enumerate(rows):
        ids[number, -len(row) :], mask[number, -len(row) :] = torch.from_numpy(row), 1
    return {"input_ids": ids, "attention_mask": mask.long()}


def drafting(model, name):
    config = dict(CONFIGS[name])
    if config["method"].startswith("draft"):
        config |= {"model": (model, pretrained_words()), "tokenizer": pretrained_words()}
    return {"custom_generate": foredraft.generate, "speculative_config": config}


@pytest.mark.filterwarnings("ignore:The draft model has")  # as many weights as the target: it is the target
@of_families(
    ("family", "how"),
    [(family, how) for family in WRAPPERS for how in CONFIGS if how != "a chain" or family == "gemma3"],
    quick=("gemma3",),
)
def test_an_object_writes_with_us_what_it_writes_alone(family, how):
    model = wrapper_of(family)
    for batch in (prompts(30), prompts(9, 23)):
        given = batch | {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
        expected = model.generate(**given)
        assert model.generate(**given, **drafting(model, how)).tolist() == expected.tolist()
        assert len(set(expected[0].tolist())) > 10, "a text of one repeated token would hide mistakes"
    if how != "wrong drafts":
        assert all(row.steps < NEW_TOKENS / 2 for row in last_statistics(model))


@WRAPPER
def test_a_sampled_text_has_the_logits_of_the_model_and_does_not_depend_on_the_drafter(family):
    model, texts = wrapper_of(family), []
    given = prompts(30) | {"max_new_tokens": 16, "do_sample": True, "top_k": 20, "eos_token_id": None}
    given |= {"return_dict_in_generate": True, "output_logits": True}
    for method in ({"method": "none"}, CONFIGS["wrong drafts"]):
        torch.manual_seed(4)
        texts.append(model.generate(**given, custom_generate=foredraft.generate, speculative_config=method))
    assert texts[0].sequences.tolist() == texts[1].sequences.tolist()
    with torch.inference_mode():
        expected = model(texts[1].sequences).logits[0, 29:-1]
    torch.testing.assert_close(torch.cat(texts[1].logits), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["token_type_ids", "mm_token_type_ids"])
def test_token_types_of_a_text_are_taken_and_those_of_an_image_are_refused(name):
    model = wrapper_of("gemma3" if name == "token_type_ids" else "qwen3_vl")
    given = prompts(9) | {name: torch.zeros(1, 9, dtype=torch.long), "max_new_tokens": 8}
    assert model.generate(**given, **drafting(model, "wrong drafts")).tolist() == model.generate(**given).tolist()
    given[name] = torch.ones(1, 9, dtype=torch.long)
    with pytest.raises(UsageError, match=rf"does not take images or sounds \({name}\); it reads text only"):
        model.generate(**given, **drafting(model, "wrong drafts"))


def test_images_are_refused_in_a_sentence():
    model = wrapper_of("mistral3")
    given = prompts(9) | {"pixel_values": torch.ones(1, 3, 56, 56), "image_sizes": torch.tensor([[56, 56]])}
    with pytest.raises(UsageError, match=r"images or sounds \(mm_encoder_outputs\).*leave custom_generate out\.$"):
        model.generate(**given, max_new_tokens=8, **drafting(model, "wrong drafts"))


class Processor(ProcessorMixin):
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer


@pytest.mark.parametrize("given", [pretrained_words, lambda: Processor(pretrained_words())])
def test_a_pair_with_a_tokenizer_or_a_processor_writes_the_models_text(given):
    model = wrapper_of("gemma3")
    generator = foredraft.load((model, given()), method="adaptix", speculative_config={"table": "none"})
    text = generator.generate("w5 w9 w12 w5 w9", max_new_tokens=NEW_TOKENS, eos_token_id=[])
    prompt = torch.tensor([[5, 9, 12, 5, 9]])
    expected = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    assert list(text.token_ids) == expected[0, 5:].tolist()


@WRAPPER
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_gives_the_models_text_without_its_vision_part(family, tied, tmp_path):
    model = tiny_wrapper(wrapper_config(family, tie_word_embeddings=tied))
    with pytest.warns(ForedraftWarning, match=f"is a {family} model; only its text model is loaded"):
        generator = foredraft.load(saved(model, tmp_path), dtype="float32", method="prompt_lookup")
    text = generator.generate("w5 w9 w12 w5 w9", max_new_tokens=NEW_TOKENS, eos_token_id=[])
    expected = model.generate(torch.tensor([[5, 9, 12, 5, 9]]), max_new_tokens=NEW_TOKENS, eos_token_id=None)
    assert list(text.token_ids) == expected[0, 5:].tolist()
    language = {each for part in (model.get_decoder(), model.get_output_embeddings()) for each in part.parameters()}
    assert sizes(generator.target.model.parameters()) == sizes(language)


def sizes(weights):
    return sorted(each.numel() for each in weights)


def test_a_text_model_with_per_layer_embeddings_is_read_from_its_wrappers_checkpoint(tmp_path):
    """Gemma 3n, whose wrapper cannot be built without another package; the names are those of its checkpoints."""
    text = AutoConfig.for_model(
        "gemma3n_text", **TEXT, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY, num_kv_shared_layers=0, laurel_rank=4,
        activation_sparsity_pattern=[0.0, 0.0],
    )  # fmt: skip
    model = tiny_model(text)
    weights = {name.replace("model.", "model.language_model.", 1): each for name, each in model.state_dict().items()}
    save_file(weights | {"model.vision_tower.stem": torch.ones(3)}, tmp_path / "model.safetensors", {"format": "pt"})
    AutoConfig.for_model("gemma3n", text_config=text.to_dict(), tie_word_embeddings=False).save_pretrained(tmp_path)
    pretrained_words().save_pretrained(tmp_path)
    with pytest.warns(ForedraftWarning, match="gemma3n"):
        generator = foredraft.load(str(tmp_path), dtype="float32", method="prompt_lookup")
    written = generator.generate("w5 w9 w12 w5 w9", max_new_tokens=NEW_TOKENS, eos_token_id=[])
    expected = model.generate(torch.tensor([[5, 9, 12, 5, 9]]), max_new_tokens=NEW_TOKENS, pad_token_id=0)
    assert list(written.token_ids) == expected[0, 5:].tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::foredraft.errors.ForedraftWarning")
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_a_text_model_can_be_rounded_which_stores_it_alone(kind, tmp_path):
    folder, ids = saved(wrapper_of(kind), tmp_path), prompts(20)["input_ids"]
    exact, rounded = (load_model(folder, dtype)(input_ids=ids).logits.float() for dtype in ("float32", "q8_0"))
    assert 0 < (rounded - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl", "no wrapper"])
def test_a_weight_that_is_missing_or_not_used_is_named(kind, tmp_path):
    model = target_of("llama").model if kind == "no wrapper" else wrapper_of(kind)
    saved(model, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in weights if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file(
        {name: each for name, each in weights.items() if name != gone}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(UsageError, match=r"has no weight model\.layers\.1\.mlp\.up_proj\.weight, which .* random"):
        load_model(str(tmp_path))
    more = weights | {gone.replace("weight", "bias"): torch.ones(len(weights[gone]))}
    save_file(more, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"has a weight model\.layers\.1\.mlp\.up_proj\.bias that a \w+ model of its"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl", "no wrapper", "hybrid"])
def test_layers_that_the_configuration_does_not_count_are_refused(kind, tmp_path):
    alone = {"no wrapper": lambda: target_of("llama").model, "hybrid": lambda: tiny_model(tiny_configuration("lfm2"))}
    saved(alone[kind]() if kind in alone else wrapper_of(kind), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    count = text["num_hidden_layers"] = text["num_hidden_layers"] - 1
    text["layer_types"] = (text.get("layer_types") or ["full_attention"] * count)[:count]
    path.write_text(json.dumps(config))
    with pytest.raises(UsageError, match=rf"has a layer {count}, .* says that there are {count} \(num_hidden_layers\)"):
        load_model(str(tmp_path))


@WRAPPER
def test_a_text_model_without_weights_is_described_as_with_them(family, tmp_path):
    folder = saved(wrapper_of(family), tmp_path)
    for dtype in ("auto", "bfloat16"):
        assert_outlined(folder, dtype)


def test_info_describes_the_text_model(tmp_path, capsys):
    assert main(["info", saved(wrapper_of("qwen3_vl"), tmp_path), "--no-measure", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["family"], facts["text_model_of"], facts["layers"]) == ("qwen3_vl_text", "qwen3_vl", 2)
    assert facts["parameters"] < sum(each.numel() for each in wrapper_of("qwen3_vl").parameters())


REFUSED = {
    "clip": "This is a clip model with a text model of the type clip_text_model, which transformers has no causal",
    "paligemma": "whose tokens attend to later ones",
    "muse_glimmer": "muse_glimmer_text, which changes its scores by final_logit_softcapping and output_multiplier",
    "vision-encoder-decoder": "vision-encoder-decoder model with a text model of the type bert",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_run_is_refused_by_its_kind(kind, tmp_path):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=REFUSED[kind]):
        foredraft.load(str(tmp_path))


def test_an_object_whose_texts_its_language_model_does_not_score_alike_is_refused():
    model = tiny_wrapper(wrapper_config("gemma3"))
    original = model.forward

    @wraps(original)
    def doubled(**given):
        output = original(**given)
        output.logits = output.logits * 2
        return output

    model.forward = doubled
    with pytest.raises(UnsupportedModelError, match="Gemma3ForConditionalGeneration scores a text otherwise than"):
        foredraft.load((model, pretrained_words()))
