"""Models in eight bits: integer products that do not depend on their neighbours, and the texts of plain decoding."""

import warnings

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig
from transformers.pytorch_utils import Conv1D

from foredraft.__main__ import main
from foredraft.api import load
from foredraft.errors import ForedraftWarning, UsageError
from foredraft.graph.layout import lay_out
from foredraft.model.compiled.build import compile_forward
from foredraft.model.loading import load_model, load_tokenizer
from foredraft.model.quantized import Int8Linear, dtype_name, quantize, relative_error
from foredraft.model.target import TorchTarget
from support.compilation import METHODS, SAMPLINGS, always_compiled, written
from support.families import FAMILIES, configuration, each_of, prompt_of, random_tree, tiny_model
from support.toys import TOY, TOY_HEADS


def random_layer(width=48, outputs=40, *, bias=True):
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(outputs, width, generator=generator)
    return weight, torch.randn(outputs, generator=generator) if bias else None


def random_rows(count, width=48):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_the_product_of_what_was_rounded(bias):
    weight, offset = random_layer(bias=bias)
    rows = random_rows(5)
    scale, row_scale = weight.abs().amax(1, keepdim=True) / 127, rows.abs().amax(1, keepdim=True) / 127
    integers, row_integers = torch.round(weight / scale).double(), torch.round(rows / row_scale)
    added = 0 if offset is None else offset
    given = Int8Linear(weight, offset)(rows[None])
    assert given.dtype == torch.float64
    assert given.shape == (1, 5, 40)
    assert torch.allclose(given[0], (row_integers @ integers.T) * row_scale * scale[:, 0] + added, rtol=1e-12)
    assert relative_error(given[0], rows @ weight.double().T + added) < 0.02


def test_a_row_does_not_depend_on_its_neighbours():
    layer, rows = Int8Linear(*random_layer()), random_rows(64)
    together = layer(rows)
    for count in (1, 2, 3, 7, 16, 33):
        for start in range(0, 64 - count, 9):
            assert torch.equal(layer(rows[start : start + count]), together[start : start + count])


def test_rows_and_channels_of_zeros_give_zeros():
    weight, _ = random_layer(bias=False)
    weight[3] = 0
    rows = random_rows(4)
    rows[1] = 0
    given = Int8Linear(weight, None)(rows)
    assert torch.isfinite(given).all()
    assert not given[1].any()
    assert not given[:, 3].any()


def test_what_is_not_finite_stays_visible():
    rows = random_rows(2)
    rows[0, 5] = torch.nan
    given = Int8Linear(*random_layer())(rows)
    assert given[0].isnan().all()
    assert given[1].isfinite().all()


BLOCKS = ("mixtral", "gpt_oss")  # of experts
SINGLE = ("gemma2", "gptj")  # their attention casts to float32


@pytest.mark.slow
@each_of([family for family in FAMILIES if family not in BLOCKS])
def test_tree_rows_and_texts_are_those_of_plain_decoding(family):
    model = quantize(tiny_model(configuration(family)))
    assert not any(type(module) in (torch.nn.Linear, Conv1D) for module in model.modules())
    assert dtype_name(model) == "int8"
    target, ids = TorchTarget(model), prompt_of(12)
    cache = target.new_cache()
    target.prefill(ids[:-1], cache)
    tokens, parents = random_tree(np.random.default_rng(4), 9)
    rows = target.forward(lay_out(int(ids[-1]), tokens, parents, len(ids) - 1), cache).logits
    for node in (0, 4, 9):
        path = [] if node == 0 else [node - 1]
        while path and parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        text = np.concatenate([ids, tokens[path]]).astype(np.int64)
        alone = target.new_cache()
        target.prefill(text[:-1], alone)
        none = np.empty(0, np.int32)
        plain = target.forward(lay_out(int(text[-1]), none, none, len(text) - 1), alone).logits[0]
        assert relative_error(rows[node], plain) < (1e-6 if family in SINGLE else 1e-9)
    for sampling in SAMPLINGS:
        expected = written(target, "none", {}, 0, sampling)
        for method, options, nodes in METHODS:
            assert written(target, method, options, nodes, sampling) == expected


@pytest.mark.slow
def test_compiled_texts_are_those_of_the_model_as_it_is(tmp_path):
    config = configuration("llama")
    config.max_position_embeddings = 1024
    model = quantize(tiny_model(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of its own calls
        compiled = always_compiled(model, *compile_forward(model, tmp_path))
    assert compiled.compiled.package_for(1) is not None
    for sampling in SAMPLINGS:
        expected = written(TorchTarget(model), "none", {}, 0, sampling)
        for method, options, nodes in METHODS:
            assert written(compiled, method, options, nodes, sampling) == expected


@pytest.mark.slow
def test_the_demo_model_is_loaded_in_eight_bits():
    model = load_model(TOY, "int8", "cpu")
    held = sum(each.numel() for each in model.state_dict().values() if each.dtype == torch.int8)
    assert held > 0.8 * sum(each.numel() for each in load_model(TOY, "float32", "cpu").parameters())
    text = "The capital of France is"
    plain = load(TOY, dtype="int8", method="none", compile=False).generate(text, max_new_tokens=24)
    drafted = load(TOY, dtype="int8", method="auto", compile=False).generate(text, max_new_tokens=24)
    assert drafted.token_ids == plain.token_ids


class Bare(torch.nn.Module):
    """A model without linear layers."""

    device = torch.device("cpu")


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: quantize(tiny_model(configuration("llama"))), "quantised already"),
        (Bare, "no linear layers"),
        (lambda: tiny_model(configuration("mixtral")), "experts' weights in blocks"),
        (lambda: tiny_model(configuration("llama")).to("meta"), "on meta; int8 is for the CPU"),
    ],
    ids=["twice", "bare", "experts", "elsewhere"],
)
def test_what_cannot_be_rounded_is_refused(model, sentence):
    with pytest.raises(UsageError, match=sentence):
        quantize(model())


def test_heads_of_the_model_in_floating_point_are_refused():
    with pytest.raises(UsageError, match="whose weights are not this model's"):
        load(TOY, dtype="int8", method="eesd", speculative_config={"head": TOY_HEADS["eesd"]}, compile=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (f"train eesd --model {TOY} --data texts --out head --dtype int8", "heads are trained with"),
        ("generate Hello --dtype int4", "choose auto, float32, float64, bfloat16, float16, int8"),
    ],
    ids=["training", "unknown"],
)
def test_the_command_refuses_in_a_sentence(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").write_text("A text.\n")
    monkeypatch.setattr("sys.argv", ["foredraft", *arguments.split()])
    assert main() != 0
    said = " ".join(capsys.readouterr().err.split())
    assert says in said
    assert "Traceback" not in said


def same_text_drafted_or_not(pair):
    question = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    for sampling in ({}, {"do_sample": True, "temperature": 0.7, "seed": 1}):
        plain = load(pair, method="none").generate(question, max_new_tokens=16, **sampling)
        drafted = load(pair, method="auto", speculative_config={"num_speculative_tokens": 8})
        assert drafted.generate(question, max_new_tokens=16, **sampling).token_ids == plain.token_ids


def test_a_model_that_torchao_quantised_writes_the_same_drafted_or_not():
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    options = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(TOY, dtype=torch.float32, quantization_config=options).eval()
    same_text_drafted_or_not((model, load_tokenizer(TOY)))
    with pytest.raises(UsageError, match="quantised already"):
        quantize(model)


@pytest.mark.parametrize(("settings", "warned"), [({}, 1), ({"llm_int8_threshold": 0.0}, 0)])
def test_eight_bits_that_depend_on_other_rows_are_named(settings, warned, recwarn):
    """By its configuration, as bitsandbytes is not installed."""
    model = tiny_model(configuration("llama"))
    model.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True, **settings)
    TorchTarget(model)
    said = [str(each.message) for each in recwarn if issubclass(each.category, ForedraftWarning)]
    assert len(said) == warned
    assert all("Load it with llm_int8_threshold=0.0" in each for each in said)


def test_a_model_that_bitsandbytes_quantised_writes_the_same_drafted_or_not():
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    pytest.importorskip("accelerate", reason="accelerate, which transformers needs for bitsandbytes, is not installed")
    for options in (
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
        BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    ):
        pair = (
            AutoModelForCausalLM.from_pretrained(
                TOY, dtype=torch.float32, quantization_config=options, device_map="cpu"
            ),
            load_tokenizer(TOY),
        )
        same_text_drafted_or_not(pair)
