"""Checkpoints rounded to GGUF's blocks as they are loaded: the weights, the integers beside them, and refusals."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import foredraft
from foredraft import UsageError
from foredraft.cache_folder import CACHE_VARIABLE
from foredraft.engine.batch import steps
from foredraft.graph.layout import lay_out_text
from foredraft.model import rounded
from foredraft.model.compiled.block_layers import quantised_weights
from foredraft.model.compiled.blocks import QuantisedRows, stored_integers
from foredraft.model.compiled.build import compile_forward
from foredraft.model.gguf.files import SOURCE
from foredraft.model.loading import load_model
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions
from support.outlines import assert_outlined

LAYERS = 2


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random Llama in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=320, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("checkpoint")
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("dtype", "form"), [("q8_0", "Q8_0"), ("q4_0", "Q4_0")])
def test_matrices_are_rounded_as_gguf_rounds_and_found_again_as_integers(dtype, form, checkpoint, cache):
    before, after = load_model(checkpoint, device="cpu"), load_model(checkpoint, dtype, device="cpu")
    assert after.dtype == torch.bfloat16
    for name, layer in before.named_modules():
        if type(layer) is nn.Linear:
            kind = GGMLQuantizationType["Q8_0" if name == "lm_head" else form]
            expected = quants.dequantize(quants.quantize(layer.weight.detach().float().numpy(), kind), kind)
            found = after.get_submodule(name).weight
            assert torch.equal(found, torch.from_numpy(expected).bfloat16()), name
            assert not torch.equal(found, layer.weight)
    assert after.lm_head.weight is after.model.embed_tokens.weight
    with quantised_weights(after, QuantisedRows(stored_integers(after), after.dtype)) as count:
        assert count == 7 * LAYERS + 1
    assert_outlined(checkpoint, dtype)


def test_it_is_rounded_once_until_the_checkpoint_changes(checkpoint, cache, monkeypatch, tmp_path):
    calls, really = [], rounded._round
    monkeypatch.setattr(rounded, "_round", lambda *given: calls.append(given) or really(*given))
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path / "mine")
    for _ in range(2):
        load_model(str(tmp_path / "mine"), "q8_0", device="cpu")
    assert len(calls) == 1
    with torch.no_grad():
        model.model.norm.weight += 1
    model.save_pretrained(tmp_path / "mine")
    assert load_model(str(tmp_path / "mine"), "q8_0", device="cpu").model.norm.weight[0] == model.model.norm.weight[0]


@torch.no_grad()
def changed_since(model):
    """Return a model after a change of one matrix, whose integers are then no longer those of the file."""
    model.model.layers[1].mlp.up_proj.weight[3] += 1
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own calls
def test_a_precise_package_rounds_rows_little_and_is_found_by_who_does_not_ask(checkpoint, packages, monkeypatch):
    """Tests of products have what rows lose otherwise, and those of compiled models another package in its place."""
    monkeypatch.setenv(CACHE_VARIABLE, str(packages))
    model, ids = changed_since(load_model(checkpoint, "q4_0", device="cpu")), np.arange(5, 69)
    with torch.inference_mode():
        exact = deepcopy(model).float()(torch.from_numpy(ids)[None]).logits[0]
    generator, packaged = foredraft.Generator(TorchTarget(model), None, method="none"), set()
    for precise in (True, None):
        ((_, record),) = generator.compile(precise=precise)
        found = generator.target.forward(lay_out_text(ids, 0), generator.target.new_cache()).logits
        packaged.add(record.sha256)
        assert record.precise
        assert (found - exact).norm() < 1e-2 * exact.norm()
    assert len(packaged) == 1
    with pytest.raises(UsageError, match="multiplied as they are"):
        compile_forward(load_model(checkpoint, device="cpu"), packages, precise=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own calls
def test_a_compiled_rounded_model_reads_integers_and_drafts_what_it_would_write(checkpoint, packages, monkeypatch):
    """It finds the package that the test before has left, if that has run."""
    monkeypatch.setenv(CACHE_VARIABLE, str(packages))
    model = changed_since(load_model(checkpoint, "q4_0", device="cpu"))
    generator = foredraft.Generator(TorchTarget(model), None, method="prompt_lookup", options={}, nodes=8)
    generator.compile()
    record = generator.target.compiled.record
    assert any("weights of 4 bits" in kernel for kernel in record.kernels)
    assert any("stay dequantised: 1," in sentence for sentence in record.told())
    texts = []
    for method in ("prompt_lookup", "none"):
        generator.use(method)
        records = list(steps(generator.begin(np.tile(np.arange(5, 25), 3), SamplingOptions(), max_new_tokens=24)))
        texts.append([token for record in records for token in record.emitted])
    assert texts[0] == texts[1]
    assert len(records) == len(texts[1])


def test_what_cannot_be_rounded_is_refused_in_a_sentence(checkpoint, cache, monkeypatch, tmp_path):
    (tmp_path / SOURCE).write_bytes(b"")
    with pytest.raises(UsageError, match="a GGUF file is read with the blocks it has"):
        rounded.rounded_folder(str(tmp_path), "q8_0", None, load_model)
    LlamaConfig().save_pretrained(tmp_path / "without weights")
    with pytest.raises(UsageError, match=r"No model could be loaded from '.*without weights'"):
        load_model(str(tmp_path / "without weights"), "q8_0", device="cpu")
    monkeypatch.setattr(rounded, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"dtype q4_0 needs the package gguf; run: pip install 'foredraft\[gguf\]'"):
        load_model(checkpoint, "q4_0", device="cpu")
