"""Tokenizers whose tokens are words that say their id, and small ones of the kinds that GGUF files hold."""

import functools
import json
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foredraft.model.gguf.metadata import Metadata
from foredraft.model.gguf.tokenizers import write_tokenizer
from support import families

RECORDED = json.loads((Path(__file__).parent.parent / "data" / "gguf_tokens.json").read_text(encoding="utf-8"))
"""What llama.cpp found in some lines, in vocabularies that scripts/gguf_tokens.py made."""

VOCABULARY = 12


def word_tokenizer(size=VOCABULARY, prefix="w"):
    """Token `i` is the word `w<i>`, so that a test can say which ids a document has."""
    return split_at_spaces({f"{prefix}{i}": i for i in range(size)})


def split_at_spaces(vocabulary):
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def save_as_a_models(tokenizer, folder, **configuration):
    """Write a tokenizer as in the folder of a model, and beside it its configuration."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    given = {"tokenizer_class": "PreTrainedTokenizerFast", **configuration}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))


def words(ids):
    return " ".join(f"w{i}" for i in ids)


def pretrained_words():
    """A tokenizer of the words w0, w2, w3, ...; id 1 ends a text."""
    known = {"<end>" if i == 1 else f"w{i}": i for i in range(families.VOCABULARY)}
    backend = Tokenizer(models.WordLevel(known, unk_token="w0"))  # noqa: S106  # a word of the vocabulary, no password
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")  # noqa: S106  # a word of the vocabulary, no password


@functools.cache
def gguf_tokenizer(name):
    """The tokenizer of a recorded vocabulary, such as "space before", which is of the kind of Llama 2's."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Metadata(RECORDED["small"][name]["keys"]), Path(folder))
        return PreTrainedTokenizerFast.from_pretrained(folder)
