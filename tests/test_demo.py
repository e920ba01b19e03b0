"""The embedded pair: complete, small, and of one tokenizer."""

import json
import tomllib
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from foredraft import demo
from foredraft.demo import EMBEDDED, embedded_path
from foredraft.errors import UsageError

FILES = ("config.json", "generation_config.json", "chat_template.jinja", "model.safetensors", "tokenizer.json")
HERE = Path(demo.__file__).parent


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_folder_is_complete(name):
    for file in (*FILES, "tokenizer_config.json"):
        assert (embedded_path(name) / file).stat().st_size, file


def test_the_package_stays_small():
    assert sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file()) < 50e6


@pytest.mark.parametrize("name", EMBEDDED)
def test_configuration_tokenizer_and_weights_agree(name):
    folder = embedded_path(name)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert config["model_type"] == "llama"
    assert config["vocab_size"] == tokenizer.get_vocab_size() == 8192
    assert config["bos_token_id"] == config["eos_token_id"] == tokenizer.token_to_id("<|endoftext|>") == 0
    assert [tokenizer.token_to_id(token) for token in ("<|user|>", "<|assistant|>")] == [1, 2]
    with safe_open(folder / "model.safetensors", "numpy") as weights:
        embedding = weights.get_slice("model.embed_tokens.weight")
        assert embedding.get_shape() == [config["vocab_size"], config["hidden_size"]]
        assert embedding.get_dtype() == "BF16"


def test_both_have_one_tokenizer_and_one_chat_template():
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (embedded_path("demo") / file).read_bytes() == (embedded_path("demo-draft") / file).read_bytes()


def test_any_text_survives_the_tokenizer():
    tokenizer = Tokenizer.from_file(str(embedded_path("demo") / "tokenizer.json"))
    text = "def f(x):\n\treturn x  # naïve, 漢字, 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_an_unknown_name_is_refused_with_a_hint():
    with pytest.raises(UsageError, match="Did you mean 'demo-draft'"):
        embedded_path("demo_draft")


def test_the_card_and_its_evaluation_sets_are_there():
    card = (HERE / "CARD.md").read_text()
    for owed in ("Taskmaster-4", "OpenStax", "CC BY 4.0", "Python Software Foundation", "Apache-2.0", "MIT"):
        assert owed in card
    assert set(tomllib.loads((HERE / "evaluation.toml").read_text())) == {"math", "code", "chat", "news"}
