"""MTP layers of checkpoints: the text of plain decoding, transformers' own scores, which checkpoints are refused."""

import warnings

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from transformers.cache_utils import MtpCache

import gguf_files
from foredraft.api import load
from foredraft.contracts import SequenceView
from foredraft.drafters import Resources, make_drafter
from foredraft.errors import ForedraftWarning, StoreError, UsageError
from foredraft.model.gguf.files import SOURCE, quantised_file
from foredraft.model.loading import load_model
from foredraft.model.mtp import load_mtp
from foredraft.model.state_heads import HeadModel
from foredraft.model.state_rollout import StateRollout
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions
from support import exits
from support.causal_types import tiny_configuration
from support.families import LONG, NEW_TOKENS, VOCABULARY, each_of, prompt_of, tiny_model, written
from support.mtp import LAYOUTS, save_checkpoint
from support.quantised import pack_checkpoint, quantise_checkpoint, same_weights
from support.speculators import drafter_files, target_of, writes_the_plain_text

SHAPES = {"chain": {"out_degree": 1, "least_probability": 0.0}, "tree": {"out_degree": 3, "least_probability": 0.0}}
QUICK = ("qwen3_5_text", "deepseek_v3")
SAMPLED = "T=0.7 top_p=0.9"


def drafter_of(target, **options):
    return make_drafter("mtp", options, Resources(VOCABULARY, target=target))


@each_of(LAYOUTS, quick=QUICK)
def test_the_text_is_that_of_transformers(family, tmp_path):
    target = TorchTarget(save_checkpoint(tmp_path, family)[0])
    ids = torch.from_numpy(prompt_of(LONG))[None]
    own = target.model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, LONG:].tolist()
    nothing = make_drafter("none", {}, Resources(VOCABULARY))
    texts = {"greedy": own, SAMPLED: exits.written(target, family, SAMPLED, nothing)[0]}
    for setting, shape in zip(texts, SHAPES if list(LAYOUTS).index(family) % 2 else reversed(SHAPES), strict=True):
        drafted, records = exits.written(target, family, setting, drafter_of(target, **SHAPES[shape]))
        assert drafted == texts[setting]
        assert sum(record.drafted for record in records) > NEW_TOKENS


@each_of(LAYOUTS, quick=QUICK)
@torch.inference_mode()
def test_drafts_are_scored_as_by_transformers(family, tmp_path):
    """The first token after a text, and the two after tokens of a chain that has the layer's own states."""
    model, mtp = save_checkpoint(tmp_path, family)
    ids, end = prompt_of(LONG), LONG - 2
    head, target = load_mtp(model), TorchTarget(model)
    states = target.prefill(ids[: end - 1].copy(), target.new_cache(), head.reads)
    rollout = StateRollout(head, target.with_model(HeadModel(head)), 4)
    found = [rollout.start(SequenceView(ids[:end], end, states))]
    found += [rollout.expand(ids[[end + row]].astype(np.int32), np.array([row - 1], np.int32)) for row in range(2)]
    cache, positions = MtpCache(config=mtp.config), torch.arange(LONG - 1)[None]
    given = model.get_decoder()(torch.from_numpy(ids[None, : end - 1])).last_hidden_state
    rows = slice(0, end - 1)
    for scores in found:
        tokens = torch.from_numpy(ids[1:])[None, rows]
        given = mtp.forward_layer(0, given, positions[:, rows], cache, input_ids=tokens)[:, -1:]
        torch.testing.assert_close(
            scores, mtp.shared_head(given)[0], atol=1e-3, rtol=1e-3
        )  # recurrent layers round otherwise in one pass
        rows = slice(rows.stop, rows.stop + 1)


@pytest.mark.parametrize(
    ("family", "case", "shape", "setting"),
    [("llama", "layer of Qwen 3", "chain", "greedy"), ("gpt_oss", "layer of Qwen 3.5", "tree", SAMPLED)],
)
def test_a_layer_that_was_trained_apart_drafts_for_a_model_without_one(family, case, shape, setting, tmp_path):
    """Its scores are compared with those of the library `speculators` in test_speculators.py."""
    drafter_files("mtp", case, tmp_path)
    drafter = make_drafter(
        "mtp", {"model": str(tmp_path), **SHAPES[shape]}, Resources(VOCABULARY, target=target_of(family))
    )
    assert writes_the_plain_text(family, setting, drafter)


@pytest.mark.parametrize("has_one", [True, False])
def test_auto_blends_the_layer_in_by_default_if_there_is_one(has_one, tmp_path):
    model = save_checkpoint(tmp_path, "qwen3_5_text")[0] if has_one else tiny_model(tiny_configuration("qwen3_5_text"))
    resources = Resources(VOCABULARY, target=TorchTarget(model))
    options = {"table": "none", "store": "none"}
    sources = make_drafter("auto", {**options, "drafter": "default"}, resources).source_names
    assert ("auto, mtp" in sources) == has_one


def test_a_checkpoint_without_the_layer_or_with_a_part_of_it_is_refused(tmp_path):
    bare = tiny_model(tiny_configuration("qwen3_5_text"))
    for bare.config.name_or_path in ("", "file.gguf", "a/model", "/a/folder/file.gguf"):
        with pytest.raises(UsageError, match=r"holds no MTP layer \(tensors mtp\."):
            drafter_of(TorchTarget(bare))
    (tmp_path / SOURCE).touch()  # the integers of rounded weights
    bare.name_or_path = bare.config.name_or_path = str(tmp_path)
    with pytest.raises(UsageError, match=r"are rounded \(dtype q8_0 or q4_0\), which leaves its MTP layer out"):
        drafter_of(TorchTarget(bare))
    (tmp_path / SOURCE).unlink()
    part = save_checkpoint(tmp_path, "qwen3_5_text", without="mtp.norm.weight")[0]
    with pytest.raises(StoreError, match="post_norm"):
        drafter_of(TorchTarget(part))


@pytest.mark.skipif(transformers.__version__ < "5.23", reason="transformers older than 5.23 reads no quantised layer")
@pytest.mark.parametrize("kind", ["fp8", "awq", "compressed-tensors"])
def test_a_quantised_layer_is_dequantised_as_its_model_is(kind, tmp_path):
    if kind == "fp8":
        pytest.importorskip("accelerate", reason="accelerate, which transformers needs for FP8, is not installed")
    plain, _ = save_checkpoint(tmp_path, "glm4_moe")
    expected = quantise_checkpoint(tmp_path) if kind == "fp8" else pack_checkpoint(tmp_path, kind)
    with pytest.warns(ForedraftWarning, match="are quantised"):
        model = load_model(str(tmp_path), dtype="float32", device="cpu")
    attention = load_mtp(model).layers.layers[0].mtp_block.self_attn.state_dict()
    prefix = f"model.layers.{plain.config.num_hidden_layers}.self_attn."
    own = {name.removeprefix(prefix): each for name, each in expected.items() if prefix in name}
    assert own
    assert same_weights(attention, own)


def save_revision(repository, name, commit):
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / name).write_text(commit)
    return save_checkpoint(repository / "snapshots" / commit, "qwen3_next")[0]


def test_a_layer_of_another_revision_than_the_models_is_a_warning(tmp_path, monkeypatch):
    """Of a model that is loaded by revision, transformers records only the name."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = save_revision(tmp_path / "models--some--model", "main", "1" * 40)
    model.config.name_or_path = "some/model"
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForedraftWarning)
        load_mtp(model)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    with pytest.warns(ForedraftWarning, match="other weights than the main revision of some/model"):
        load_mtp(model)


def test_the_layer_is_of_the_revision_that_was_loaded(tmp_path, monkeypatch):
    """The hub's cache holds the model's branch `v2` alone, so another revision would not be found."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--some--model", "2" * 40
    save_revision(repository, "v2", commit)
    model = load_model("some/model", device="cpu", revision="v2")
    drafted = dict(load_mtp(model).layers.named_parameters())["layers.0.eh_proj.weight"]
    with safe_open(repository / "snapshots" / commit / "model.safetensors", framework="pt") as stored:
        assert torch.equal(drafted, stored.get_tensor("mtp.fc.weight"))


@pytest.mark.parametrize("name", ["glm4moe with a drafting head", "qwen35 with a drafting head"])
def test_the_layer_of_a_gguf_file_is_found_and_drafts_its_models_text(name, tmp_path, monkeypatch):
    """GLM's file has the weights as they are; Qwen's has norms that multiply, and the model's add one first."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    case = next(case for case in gguf_files.CASES if case.name == name)
    target = load(
        str(gguf_files.write(case, tmp_path / "it.gguf")), dtype="float32", device="cpu", compile=False, method="none"
    ).target
    stored, block = gguf_files.tensors_of(case), f"blk.{target.model.config.num_hidden_layers}."
    layer, add = load_mtp(target.model).layers.layers[0], float("qwen" in name)
    assert np.array_equal(layer.eh_proj.weight, stored[f"{block}nextn.eh_proj.weight"])
    for norm, named in (("enorm", "enorm"), ("hnorm", "hnorm"), ("post_norm", "shared_head_norm")):
        expected = stored[f"{block}nextn.{named}.weight"] - add
        assert np.allclose(layer.get_submodule(norm).weight, expected, atol=1e-6)
    assert np.array_equal(layer.mtp_block.self_attn.k_proj.weight, stored[f"{block}attn_k.weight"])
    prompt, texts = np.arange(5, 5 + LONG), []
    apart = {"model": str(tmp_path / "it.gguf"), **SHAPES["tree"]}  # as if it held the layer alone
    for method, options in (("none", {}), ("mtp", apart if add else SHAPES["tree"])):
        drafter = make_drafter(method, options, Resources(gguf_files.VOCABULARY, target=target))
        text, records = written(target, prompt, SamplingOptions(), drafter, nodes=8, new_tokens=NEW_TOKENS)
        texts.append(text)
    (head,) = drafter.needs.models  # compiled, its LM head multiplies the integers of the target's file
    assert quantised_file(head.model) == quantised_file(target.model) is not None
    assert texts[0] == texts[1]
    assert sum(record.drafted for record in records) > NEW_TOKENS
    with pytest.raises(UsageError, match=r"is of another target, a (glm4moe|qwen35) model, and this one is a llama"):
        make_drafter("mtp", apart, Resources(VOCABULARY, target=target_of("llama")))
