"""Quantised transformers models give the same text with and without drafts, if rows do not depend on each other."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from foredraft.api import load
from foredraft.errors import ForedraftWarning
from foredraft.model.loading import load_tokenizer
from foredraft.model.target import TorchTarget
from support.families import configuration, tiny_model
from support.toys import TOY


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


@pytest.mark.parametrize(("settings", "warned"), [({}, 1), ({"llm_int8_threshold": 0.0}, 0)])
def test_eight_bits_that_depend_on_other_rows_are_named(settings, warned, recwarn):
    """Test by configuration, as bitsandbytes is not installed."""
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
