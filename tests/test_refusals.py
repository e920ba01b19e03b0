"""Unsupported input is rejected early, and a failure during generation keeps what was written."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, LlamaConfig, LlamaModel

import foredraft
from foredraft import NumericsError, UnsupportedModelError, UsageError, standard_library
from foredraft.contracts import Draft, Scores
from foredraft.corpus.words import tokenizer_hash
from foredraft.engine.state import SequenceState
from foredraft.errors import StoreError
from foredraft.graph.layout import lay_out
from foredraft.index.trigram import open_table, table_info
from foredraft.model.head_files import trained_head
from foredraft.model.loading import load_ends, load_model, load_tokenizer
from foredraft.model.named_target import load_target
from foredraft.model.support import inspect
from foredraft.model.target import TorchTarget
from foredraft.pairing import pair_draft_model
from foredraft.sampling import SamplingOptions
from foredraft.testing import ToyTarget
from foredraft.verify import verify
from support.toys import TOY, TOY_DRAFT

TINY = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def tiny(**more):
    return AutoModelForCausalLM.from_config(LlamaConfig(**TINY, **more)).eval()


@pytest.fixture(scope="module")
def generator():
    return foredraft.load(TOY, dtype="float32", method="adaptix", speculative_config={"table": "none"})


def test_an_attention_kernel_without_tree_masks_is_refused():
    model = tiny()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match=r"flash_attention_2.*set_attn_implementation\('sdpa'\)"):
        TorchTarget(model)


def test_a_model_without_a_language_head_is_refused():
    with pytest.raises(UnsupportedModelError, match="LlamaModel is no causal language model"):
        TorchTarget(LlamaModel(LlamaConfig(**TINY)))


def test_a_model_whose_embeddings_are_offloaded_is_refused(tmp_path):
    places = dict.fromkeys(("model.layers", "model.norm", "model.rotary_emb"), "cpu")
    places |= {"model.embed_tokens": "disk", "lm_head": "disk"}
    model = AutoModelForCausalLM.from_pretrained(TOY_DRAFT, device_map=places, offload_folder=tmp_path)
    with pytest.raises(UnsupportedModelError, match="embeddings of this model are offloaded"):
        TorchTarget(model)


def test_an_encoder_is_refused_and_a_decoder_of_its_family_is_not():
    with pytest.raises(UnsupportedModelError, match="bert model is an encoder"):
        inspect(BertConfig(**TINY))
    assert inspect(BertConfig(**TINY, is_decoder=True)).family == "bert"


@pytest.mark.parametrize("temperature", [1e-46, 1e-30, 1e-7, float("inf")])
def test_a_temperature_that_overflows_is_refused(generator, temperature):
    with pytest.raises(UsageError, match=r"temperature is .* it must be a finite number, at least 1e-06"):
        generator.generate("Hello", temperature=temperature)


@pytest.mark.parametrize("given", [2.0, {"a": 1}, [[1]], True])
def test_end_ids_of_a_generation_configuration_that_are_none_are_refused(generator, given, monkeypatch):
    monkeypatch.setattr(generator.target.outline.generation_config, "eos_token_id", given)
    with pytest.raises(UsageError, match="eos_token_id of the model's generation configuration holds"):
        generator.generate("Hello")


@pytest.mark.parametrize("given", [{"dtype": "float16"}, {"device": "cpu"}, {"device": "nonsense"}])
def test_dtype_and_device_of_a_loaded_pair_are_not_ignored(given):
    with pytest.raises(UsageError, match="dtype and device apply only to models that foredraft loads"):
        foredraft.load((tiny(), load_tokenizer(TOY)), **given)


def test_loading_options_are_handed_on_or_refused():
    loaded = foredraft.load(TOY, method="none", device="cpu", attn_implementation="eager", revision="main")
    assert loaded.target.model.config._attn_implementation == "eager"
    with pytest.raises(UsageError, match=r"No model could be loaded .*nonsense"):
        foredraft.load(TOY, method="none", device_map={"": "nonsense"})
    with pytest.raises(UsageError, match=r"^foredraft\.load has no option 'revison'\. Did you mean 'revision'"):
        foredraft.load(TOY, revison="main")
    with pytest.raises(UsageError, match="revision, dtype and device apply only to models that foredraft loads"):
        foredraft.load((tiny(), load_tokenizer(TOY)), revision="main")


def test_an_unsupported_folder_is_refused_before_its_weights_are_read(tmp_path):
    AutoConfig.for_model("rwkv").save_pretrained(tmp_path)  # no weights, no tokenizer
    with pytest.raises(UnsupportedModelError, match="This rwkv model keeps a recurrent state"):
        foredraft.load(str(tmp_path))


def test_a_model_whose_arguments_have_names_of_their_own_writes_with_us_what_it_writes_alone():
    config = AutoConfig.for_model("mamba", vocab_size=97, hidden_size=32, num_hidden_layers=2, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config).eval()
    prompt, given = torch.arange(1, 9)[None], {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    given["attention_mask"] = torch.ones_like(prompt)
    alone = model.generate(prompt, **given)
    assert torch.equal(model.generate(prompt, custom_generate=foredraft.generate, **given), alone)


def test_damaged_weights_are_a_sentence(tmp_path):
    shutil.copytree(Path(TOY_DRAFT), tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:20_000])
    with pytest.raises(UsageError, match="No model could be loaded from"):
        load_model(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"num_hidden_layers": None}, r"expected int, got NoneType \(value: None\)"),
        ({"num_attention_heads": 7}, r"\(384\) is not a multiple of the number of attention heads \(7\)"),
        ({"hidden_act": "unheard"}, "KeyError: 'unheard'"),
        ({"rope_parameters": {"rope_type": "unheard"}}, "KeyError: 'unheard'"),
    ],
)
def test_a_configuration_that_transformers_does_not_take_is_a_sentence(field, reason, tmp_path):
    shutil.copytree(Path(TOY), tmp_path, dirs_exist_ok=True)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | field))
    with pytest.raises(UsageError, match=f"No model could be loaded from .*: .*{reason}. Give a folder"):
        load_target(str(tmp_path))


@pytest.mark.parametrize("dtype", ["int8", torch.int8, torch.float8_e4m3fn])
def test_a_dtype_in_which_no_model_runs_is_refused(dtype):
    with pytest.raises(UsageError, match=r"^dtype is '\w+8\w*'; choose auto, float32"):
        load_target(TOY, dtype)


@pytest.mark.parametrize("name", ["~nobody-of-this-name/model", "~nobody-of-this-name/a.gguf", "a" * 300])
def test_a_name_that_can_be_no_path_is_refused(name):
    with pytest.raises(UsageError, match="There is no folder"):
        load_model(name)


@pytest.mark.parametrize("name", ["~nobody-of-this-name/head", "~nobody-of-this-name", "a" * 300])
def test_a_name_of_a_head_or_draft_model_that_can_be_no_path_is_refused(name):
    target = TorchTarget(tiny())
    with pytest.raises(UsageError, match="There is no folder"):
        trained_head("eesd", name, target.model)
    with pytest.raises(UsageError, match="There is no folder"):
        pair_draft_model(name, target, object())


def test_a_model_without_an_end_token_has_no_ends(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(Path(TOY, name), tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    config = json.loads((tmp_path / "config.json").read_text())
    for ends in ([], ["<|assistant|>"]):  # without a generation configuration, the configuration's, as in transformers
        (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 2 if ends else None}))
        assert load_ends(str(tmp_path)) == ends
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 1000000]}')
    assert load_ends(str(tmp_path)) == ["<|user|>", "1000000"]
    for odd in ('{"eos_token_id": -1}', '{"eos_token_id": "x"}', "[]"):
        (tmp_path / "generation_config.json").write_text(odd)
        with pytest.raises(UsageError, match="No end of a turn could be loaded from"):
            load_ends(str(tmp_path))


@pytest.mark.parametrize("content", [b"junk", b""])
def test_damaged_weights_are_refused(content, tmp_path):
    shutil.copy(Path(TOY, "config.json"), tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(UsageError, match="No model could be loaded from"):
        load_model(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("bad_from", range(1, 12))
def test_scores_that_go_bad_inside_a_draft_lose_no_token_that_plain_decoding_writes(generator, bad_from):
    prompt = generator.encode("one two three one two three one two three one two")
    results = {}
    for method, options in (("none", {}), ("prompt_lookup", {}), ("adaptix", {"table": "none"})):
        generator.use(method, options, None if method == "none" else 20)

        def spoil(ids, scores):
            return scores * float("nan") if ids.shape[1] >= len(prompt) + bad_from else scores

        stream = generator.stream(list(prompt), max_new_tokens=24, eos_token_id=[], logits_processor=[spoil])
        with pytest.raises(NumericsError):
            list(stream)
        results[method] = stream.generation.token_ids
    assert len(results["none"]) == bad_from
    assert results["prompt_lookup"] == results["adaptix"] == results["none"]


def test_a_text_has_not_ended_before_its_last_token_is_committed():
    target = ToyTarget()
    prompt = np.array([1, 2, 3], np.int64)
    seq = SequenceState(prompt, SamplingOptions(), max_new_tokens=1)
    seq.cache = target.new_cache()
    seq.cache.write(prompt[:-1])
    seq.cache.commit([0, 1])
    empty = Draft(np.empty(0, np.int32), np.empty(0, np.int32))
    layout = lay_out(3, empty.tokens, empty.parents, 2)
    scores = Scores(target.forward(layout, seq.cache).logits)
    verdict = verify(empty, seq.chooser(scores), seq.ends, 2)
    assert seq.finish is None
    seq.commit(verdict)
    assert seq.finish == "length"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": np.array([np.nan], np.float32)}, "score must be finite"),
        ({"score": np.ones(2, np.float32)}, r"score must be float32\[1\]"),
        ({"source": np.array([3], np.uint8)}, "names source 3; the drafter has 1"),
    ],
)
def test_a_drafters_nonsense_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        Draft(np.array([1], np.int32), np.array([-1], np.int32), **change).check(10, 1)


def test_a_table_that_is_there_needs_no_folder_to_write_to(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    tokenizer = load_tokenizer(TOY).backend_tokenizer
    monkeypatch.setattr(standard_library, "sources", lambda: [Path(__file__)])
    named = tokenizer, tokenizer_hash(tokenizer)
    made = standard_library.default_table(*named)

    def refuse():
        raise StoreError("read-only")

    monkeypatch.setattr(standard_library, "cache_folder", refuse)
    assert standard_library.default_table(*named) == made
    made.unlink()
    with pytest.raises(StoreError, match="read-only"):
        standard_library.default_table(*named)


def test_a_shipped_table_is_used_where_it_fits_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(standard_library, "sources", lambda: [Path(__file__)])
    tokenizer = load_tokenizer(TOY).backend_tokenizer
    named = tokenizer, tokenizer_hash(tokenizer)
    built = standard_library.default_table(*named)
    assert built.parent == tmp_path / "cache"
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    monkeypatch.setattr(standard_library, "_SHIPPED", shipped)
    (shipped / "toy.trigrams").write_bytes(built.read_bytes())
    assert standard_library.default_table(*named) == shipped / "toy.trigrams"


def test_the_shipped_tables_are_sound():
    folder = Path(standard_library.__file__).parent / "tables"
    for path in folder.glob("*.trigrams"):
        open_table(path, check=True)
        assert table_info(path)["metadata"]["tokens"] > 30_000_000
        assert path.name in (folder / "CARD.md").read_text()
    assert (folder / "smollm2.trigrams").exists()


def test_processors_see_tensors_on_the_models_device(generator):
    seen = []

    def look(ids, scores):
        seen.append((ids.device, scores.device))
        return scores

    generator.use("none")
    generator.generate("Hello", max_new_tokens=2, logits_processor=[look])
    assert seen == [(generator.target.device, generator.target.device)] * 2
    assert isinstance(generator.target.device, torch.device)


@pytest.mark.parametrize("device", ["cuda:7", "mps"])
def test_a_device_that_is_not_there_is_refused(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="torch sees 1 CUDA devices" if device == "cuda:7" else "No model could"):
        load_model(TOY_DRAFT, device=device)


def test_what_quantises_a_model_is_told_the_device(monkeypatch):
    told = []

    def loads(*_, **options):
        told.append(options.get("device_map"))
        raise ValueError("seen")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", loads)
    for device in ("cuda:0", None, "cpu"):
        with pytest.raises(UsageError, match="seen"):
            load_model(TOY_DRAFT, device=device, quantization_config=object())
    assert told == ["cuda:0", "cuda", None]


@pytest.mark.parametrize("cache_bytes", [2e9, "2", -5, 0])
def test_room_that_is_no_number_of_bytes_is_refused(generator, cache_bytes):
    with pytest.raises(UsageError, match="it must be a whole number of bytes"):
        generator.batch(cache_bytes)
