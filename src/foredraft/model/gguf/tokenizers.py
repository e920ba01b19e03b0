"""The tokenizer of a GGUF file as files that transformers reads, with the tokens that llama.cpp finds.

Knows byte-level BPE, BPE over plain text (Gemma 4), and SentencePiece's BPE, whose merges follow from scores. Does not
know models.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from foredraft.errors import UnsupportedModelError
from foredraft.model.gguf.metadata import Metadata
from foredraft.model.gguf.splits import Split, split_of
from foredraft.model.gguf.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary, read_vocabulary

_SPACE = "\u2581"  # SentencePiece's sign for a space
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
"""Roles of tokens -> their names in transformers."""
_WITHOUT_EFFECT = (
    *("tokenizer.ggml.token_type_count", "tokenizer.ggml.add_sep_token"),  # of encoders
    *("tokenizer.ggml.normalizer.lowercase", "tokenizer.ggml.normalizer.strip_accents"),
    *("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"),  # of unigram tokenizers
    *("tokenizer.huggingface.json", "tokenizer.rwkv.world"),  # other forms of the tokenizer
)
"""Keys that llama.cpp does not use for the kinds of tokenizers read here."""


def write_tokenizer(metadata: Metadata, folder: Path) -> Vocabulary:
    """Write a file's tokenizer and its chat templates to a folder, from which `AutoTokenizer` reads them.

    Reads every known key of the file's tokenizer, and returns its tokens. Raises UnsupportedModelError for a kind of
    tokenizer, or a name of rules for splitting, that is not known.
    """
    vocabulary = read_vocabulary(metadata)
    for key in _WITHOUT_EFFECT:
        metadata.get(key)
    built = _built(metadata, vocabulary)
    added = _added_tokens(vocabulary, str(metadata.get("general.name", "")))
    built.add_tokens(list(added.values()))
    # only tokens that are looked for: transformers would look for any that it has a name for
    named = {name: vocabulary.roles[role] for role, name in _NAMES.items() if vocabulary.roles.get(role) in added}
    config: dict[str, Any] = {
        "tokenizer_class": "TokenizersBackend",
        "clean_up_tokenization_spaces": False,
        **{name: vocabulary.tokens[index] for name, index in named.items()},
    }
    if (template := _chat_template(metadata)) is not None:
        config["chat_template"] = template
    # not by its `save`, which raises a bare Exception on a full disk
    (folder / "tokenizer.json").write_text(built.to_str(pretty=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8")
    return vocabulary


def _built(metadata: Metadata, vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer without its added tokens."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre") or "default"
    pre = "gemma4" if model == "gemma4" else pre
    scores, merges = metadata.get("tokenizer.ggml.scores") or [], metadata.get("tokenizer.ggml.merges")
    add_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    if model == "llama":
        built, add_bos = _sentencepiece(vocabulary, scores, add_space=add_space), True
    else:
        split = split_of(pre)
        built, add_bos = _byte_pairs(vocabulary, merges, split), split.add_bos
    # conversions of Gemma 4 from before April 2026 say false, which llama.cpp overrides
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos) or pre == "gemma4"
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    before, after = ["bos"] * add_bos, ["eos"] * add_eos
    if missing := [role for role in (*before, *after) if role not in vocabulary.roles]:
        raise UnsupportedModelError(
            f"This GGUF file wants its {missing[0]} token around every text and names none; give another file, or the "
            "model as a transformers folder."
        )
    tokens = {role: vocabulary.tokens[vocabulary.roles[role]] for role in (*before, *after)}
    built.post_processor = processors.TemplateProcessing(
        single=[*(tokens[role] for role in before), "$A", *(tokens[role] for role in after)],
        special_tokens=[(text, vocabulary.ids[text]) for text in tokens.values()],
    )
    return built


def _byte_pairs(vocabulary: Vocabulary, merges: Sequence[str] | None, split: Split) -> Tokenizer:
    """Return the tokenizer of a vocabulary with merges, over bytes or, with `split.byte_level` false, plain text."""
    if merges is None:
        raise UnsupportedModelError(
            "This GGUF file holds no merges (tokenizer.ggml.merges), which its kind of tokenizer needs; give another "
            "file, or the model as a transformers folder."
        )
    ids = vocabulary.ids
    halves = dict.fromkeys((merge[:at], merge[at + 1 :]) for merge in merges for at in (merge.find(" ", 1),))
    known = [(left, right) for left, right in halves if left in ids and right in ids and left + right in ids]
    model = models.BPE(ids, known, ignore_merges=split.ignore_merges, byte_fallback=not split.byte_level)
    built = Tokenizer(model)
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    if split.byte_level:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        built.decoder = decoders.ByteLevel()
    else:
        built.normalizer = normalizers.Replace(" ", _SPACE)
        built.decoder = _plain_decoder(add_space=False)
    built.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return built


def _sentencepiece(vocabulary: Vocabulary, scores: Sequence[float], *, add_space: bool) -> Tokenizer:
    """Return the tokenizer of a vocabulary with scores, which merges the two parts of the best token in each step."""
    ids, pairs = vocabulary.ids, []
    for text, score in zip(vocabulary.tokens, scores, strict=False):
        # of equal scores llama.cpp takes the leftmost, so that runs of spaces grow from the left: the longest first
        rank = (-score, -len(text))
        halves = ((text[:at], text[at:]) for at in range(1, len(text)))
        pairs += [(rank, left, right) for left, right in halves if left in ids and right in ids]
    pairs.sort(key=lambda pair: pair[0])
    # ranks cannot say "the leftmost of equal scores"; a conversion without a tokenizer.model writes -1000 everywhere
    if len(scores) < len(vocabulary.tokens) or (len(pairs) > 1 and pairs[0][0][0] == pairs[-1][0][0]):
        raise UnsupportedModelError(
            "The tokens of this GGUF file have no scores, or all the same (tokenizer.ggml.scores), and its kind of "
            "tokenizer merges by them; give the folder of the transformers checkpoint that the file was made from."
        )
    unknown = vocabulary.roles.get("unknown")
    built = Tokenizer(
        models.BPE(
            *(ids, [(left, right) for _, left, right in pairs]),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    built.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if add_space else spaces
    built.decoder = _plain_decoder(add_space=add_space)
    return built


def _plain_decoder(*, add_space: bool) -> Any:
    """Return the decoder of tokens in plain text; `add_space`: the first space of a text was not there before."""
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space else steps)


def _added_tokens(vocabulary: Vocabulary, model_name: str) -> dict[int, AddedToken]:
    """Return the tokens that are found in a text before it is split; special ones are no part of an answer's text."""
    strips = any(name in model_name.lower() for name in ("phi-3", "phi3"))  # llama.cpp knows these by their name
    return {
        index: AddedToken(
            text,
            normalized=False,
            special=kind != USER_DEFINED,
            rstrip=strips and text not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for index, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    }


def _chat_template(metadata: Metadata) -> str | list[dict[str, str]] | None:
    """Return the file's chat template, or all of them with their names; None without one."""
    default: str | None = metadata.get("tokenizer.chat_template")
    names = metadata.get("tokenizer.chat_templates", [])
    named = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    if default is not None:
        named["default"] = default
    templates = [{"name": name, "template": text} for name, text in named.items() if text is not None]
    if not all(isinstance(each["template"], str) for each in templates):
        raise TypeError("a chat template is no text")
    return templates if names else default
