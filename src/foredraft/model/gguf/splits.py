"""How a tokenizer splits a text into words before it merges them: rows by `tokenizer.ggml.pre`, llama.cpp's names.

The rows give llama.cpp's words, also where its patterns are simpler than those of a model's first tokenizer. They are
in the syntax of `tokenizers.Regex`. Names of models that are not read, such as embeddings, have no row. Data only: does
not know vocabularies.
"""

from dataclasses import dataclass

from foredraft.errors import UnsupportedModelError


def _any(*patterns: str) -> str:
    """Return the pattern that matches what the first of `patterns` that matches does."""
    return "|".join(patterns)


_ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"  # English contractions
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_CASED_WORD = (  # llama.cpp takes every letter but a-z and A-Z for an upper-case and a lower-case one
    r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]*[\p{L}&&[^A-Z]]+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]+[\p{L}&&[^A-Z]]*",
)
_HAN = "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"
_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_ASCII_SIGN_AND_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DIGITS_FROM_RIGHT = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # groups of three; the first keeps what is before it
_DEEPSEEK_CASED = (  # letters with cases, as of an old Unicode
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-"
    "\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-"
    "\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc"
    "\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)

_DEEPSEEK_ASIAN = "[\u0800-\u9fa5\uac00-\ud7ff&&[^\\s]]+"  # llama.cpp takes wide spaces out of the range
_LINES = r"[^\n]+|\n+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _any(_ENDINGS, _WORD, r"\p{N}{1,3}", _SIGNS, _SPACES)
_QWEN2 = _any(_ENDINGS, _WORD, r"\p{N}", _SIGNS, _SPACES)
_MARKED_WORDS = _any(_ASCII_SIGN_AND_WORD, r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*", _SPACES)
_GPT4O = _any(*(f"{word}{_ENDINGS}?" for word in _CASED_WORD), r"\p{N}{1,3}", _SIGNS_AND_SLASHES, _SPACES)


@dataclass(frozen=True)
class Split:
    """How texts are split, and what else llama.cpp derives from the name of a pre-tokenizer.

    Attributes:
        patterns: each splits the pieces of the one before it, at both ends of what it matches.
        ignore_merges: a word that is a token is not merged from its parts.
        add_bos: the default of `tokenizer.ggml.add_bos_token`.
        byte_level: tokens are written in GPT-2's 256 characters for bytes; otherwise in plain text, with U+2581 for a
            space and tokens such as <0x0A> for the bytes of other characters.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    byte_level: bool = True


def _row(names: str, *patterns: str, **others: bool) -> dict[str, Split]:
    """Return one split by each of its names, which are separated by spaces."""
    return dict.fromkeys(names.split(), Split(patterns, **others))


_SPLITS = {
    **_row("default", r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **_row("gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo exaone4 trillion granite-docling", _GPT2),
    **_row("smollm starcoder refact command-r exaone minerva-7b mellum2", r"\p{N}", _GPT2),
    **_row(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA3, ignore_merges=True, add_bos=True
    ),
    **_row("dbrx smaug-bpe chatglm-bpe", _LLAMA3),
    **_row("glm4 glm5", _LLAMA3, ignore_merges=True),
    **_row("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open", _QWEN2),
    **_row("qwen35", _any(_ENDINGS, _MARKED_WORD, r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES)),
    **_row(
        "jais-2",
        _any(
            *(_ENDINGS, _WORD, r"\p{N}{1,3}", _SIGNS, r"\s*[\r\n]+"),
            *(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)),
            r"\s{1,2}(?!\S)|\s",
        ),
    ),
    **_row(
        "deepseek-llm",
        r"[\r\n]",
        rf"\s?[{_DEEPSEEK_CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002]+",
        r"\s+\z",
        _DEEPSEEK_ASIAN,
        r"\p{N}+",
    ),
    **_row("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_ASIAN, r"\p{N}"),
    **_row("deepseek-v3 hunyuan-dense joyai-llm hy_v4", r"\p{N}{1,3}", _JAPANESE, _MARKED_WORDS),
    **_row(
        "spark2_5",
        r"\p{N}{1,3}",
        _JAPANESE,
        _any(
            *(_ASCII_SIGN_AND_WORD, r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+"),
            r"[\r\n]|\s+(?!\S)|\s+",
        ),
        r"\p{N}",
    ),
    **_row(
        "youtu",
        "[\uac00-\ud7a3\u3131-\u318e]+|[\u3105-\u312f]+"
        "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|" + _JAPANESE,
        _any(f"{_MARKED_WORD}{_ENDINGS}?", r"\p{N}", _SIGNS_AND_SLASHES, _SPACES),
        ignore_merges=True,
    ),
    **_row("falcon", r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
    **_row("viking", " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}"),
    **_row("tekken", _any(*_CASED_WORD, r"\p{N}", _SIGNS_AND_SLASHES, _SPACES), ignore_merges=True, add_bos=True),
    **_row("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    **_row(
        "tiny_aya cohere2moe",
        _DIGITS_FROM_RIGHT,
        _any(f"{_MARKED_WORD}{_ENDINGS}?", r"\p{N}{1,3}", _SIGNS_AND_SLASHES, _SPACES),
    ),
    **_row(
        "kimi-k2",
        _any(
            *(f"[{_HAN}]+", rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_ENDINGS}?"),
            *(r"\p{N}{1,3}", _SIGNS, _SPACES),
        ),
    ),
    **_row("superbpe", r"\p{N}+", "(?=(?:[0-9]{3})+(?![0-9]))"),
    **_row("seed-coder", _any(_ENDINGS, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES)),
    **_row("ufakzeka", _any(_WORD, r"\p{N}", _SIGNS, _SPACES)),
    **_row("afmoe", _DIGITS_FROM_RIGHT, _ASIAN, _MARKED_WORDS),
    **_row(
        "exaone-moe",
        _any(
            *(_ENDINGS, r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", r"\p{N}"),
            *(r" ?[^\s\p{L}\p{N}]+[\r\n/]?", r"\s*[\r\n]|\s+(?!\S)|\s+"),
        ),
    ),
    **_row("minicpm5", r"\p{N}{1,3}", _any(_ENDINGS, _WORD, r"\p{N}+", _SIGNS, _SPACES), ignore_merges=True),
    **_row("gemma4", _LINES, add_bos=True, byte_level=False),
    **_row("sarvam-moe", _LINES, byte_level=False),
}
NAMES = tuple(_SPLITS)
"""Every name that has a row."""


def split_of(name: str) -> Split:
    """Return the row of a `tokenizer.ggml.pre`; UnsupportedModelError for a name that no row has."""
    if name not in _SPLITS:
        raise UnsupportedModelError(
            f"This GGUF file splits texts by the rules {name!r} (tokenizer.ggml.pre), which foredraft does not know, "
            "so its tokens would be others than the model's. Update foredraft, or give a transformers folder."
        )
    return _SPLITS[name]
