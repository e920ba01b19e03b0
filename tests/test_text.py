"""Text as it grows: whole characters, joined pieces, stop strings over several tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from foredraft import load
from foredraft.model.loading import load_tokenizer
from foredraft.text import StopStrings, TextStream, continuation, decode
from support.llamas import tiny_llama
from support.tokenizers import RECORDED, gguf_tokenizer
from support.toys import TOY

TEXTS = [
    "Plain words, and a line.\n\n  Then indented ones.",
    "Hi 🙂👩‍👩‍👧 and 🇺🇳!",
    "你好世界。naïve café, ελληνικά, עברית",
    "🙂",
    "a\u0301 e\u0301\t\r\n",
    "x" * 200,
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TOY)


def pieces(tokenizer, ids):
    stream = TextStream(tokenizer)
    return [stream.push(token) for token in ids], stream.finish()


@pytest.mark.parametrize("text", TEXTS)
def test_joined_pieces_are_the_text(tokenizer, text):
    ids = tokenizer(text).input_ids
    parts, rest = pieces(tokenizer, ids)
    assert "".join(parts) == text
    assert rest == ""


@pytest.mark.parametrize("text", ["🙂", "世", "é🙂世界"])
def test_a_piece_holds_whole_characters_only(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert len(ids) > len(text), "characters must span tokens here"
    parts, _ = pieces(tokenizer, ids)
    assert "\ufffd" not in "".join(parts)
    assert "" in parts
    assert len([part for part in parts if part]) <= len(text)


def test_an_unfinished_character_is_released_at_the_end(tokenizer):
    ids = tokenizer("ok 🙂").input_ids[:-1]
    parts, rest = pieces(tokenizer, ids)
    assert "".join(parts) == "ok "
    assert set(rest) == {"\ufffd"}
    assert "".join(parts) + rest == decode(tokenizer, ids)


@settings(max_examples=60, deadline=None)
@given(data=st.lists(st.integers(0, 8191), max_size=30))
def test_joined_pieces_equal_decoding_all_of_any_ids(tokenizer, data):
    parts, rest = pieces(tokenizer, data)
    assert "".join(parts) + rest == decode(tokenizer, data)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30))
def test_joined_pieces_equal_any_text(tokenizer, text):
    ids = tokenizer(text).input_ids
    parts, rest = pieces(tokenizer, ids)
    assert "".join(parts) + rest == decode(tokenizer, ids)


def test_a_space_that_depends_on_the_token_before_is_kept():
    """SentencePiece-like decoders drop the space of the first token they are given."""
    words = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "▁three": 2}, unk_token="▁one"))  # noqa: S106  # a word of text
    words.decoder = decoders.Metaspace()
    parts, rest = pieces(PreTrainedTokenizerFast(tokenizer_object=words), [0, 1, 2, 2])
    assert "".join(parts) + rest == "one two three three"


def test_special_tokens_and_ids_beyond_the_tokenizer_have_no_text(tokenizer):
    ids = tokenizer("one two").input_ids
    strewn = [0, ids[0], 1, 99_999, *ids[1:], 123_456, 0]
    parts, rest = pieces(tokenizer, strewn)
    assert "".join(parts) + rest == decode(tokenizer, strewn) == "one two"


def stops_at(tokenizer, text, *strings):
    """After how many tokens a stop string is seen, or None."""
    stop = StopStrings(tokenizer, strings)
    ids = tokenizer(text).input_ids
    return next((number for number, token in enumerate(ids, 1) if stop(token)), None)


def first_holding(tokenizer, text, *strings):
    ids = tokenizer(text).input_ids
    for number in range(1, len(ids) + 1):
        if any(string in tokenizer.decode(ids[:number]) for string in strings):
            return number
    return None


@pytest.mark.parametrize(
    ("text", "strings"),
    [
        ("One sentence. Another sentence.", [". An"]),
        ("One sentence. Another sentence.", ["sentence. Another sentence."]),
        ("def f():\n    return 1\n\n\nprint(f())", ["\n\n\n"]),
        ("def f():\n    return 1\n\n\nprint(f())", ["nothing", "rint("]),
        ("smile 🙂 now", ["🙂"]),
        ("smile 🙂 now", ["smile "]),
        ("smile 🙂 now", ["🙂 n"]),
        ("你好世界", ["好世"]),
        ("aaaaaaaaab", ["ab"]),
        ("abc", ["a"]),
    ],
)
def test_a_stop_string_may_span_tokens(tokenizer, text, strings):
    expected = first_holding(tokenizer, text, *strings)
    assert expected is not None
    assert stops_at(tokenizer, text, *strings) == expected


def test_a_stop_string_that_does_not_occur_stops_nothing(tokenizer):
    assert stops_at(tokenizer, "One sentence. Another.", "sentence.A", "other!", "e. B") is None


def test_a_stop_string_is_not_pieced_together_across_other_text(tokenizer):
    assert stops_at(tokenizer, "ab then cd, ab then cd", "abcd") is None


def test_a_stop_string_with_a_special_token_is_seen(tokenizer):
    special = tokenizer.all_special_tokens[0]
    number = tokenizer.convert_tokens_to_ids(special)
    ids = [*tokenizer("one two").input_ids, number, *tokenizer(" three").input_ids]
    for string in (special, f"two{special}", f"two{special} th"):
        stop = StopStrings(tokenizer, [string, "four"])
        found = next((count for count, token in enumerate(ids, 1) if stop(token)), None)
        assert found is not None, string
        assert string in tokenizer.decode(ids[:found])
        assert string not in tokenizer.decode(ids[: found - 1])


@pytest.mark.parametrize("name", RECORDED["small"])
@pytest.mark.parametrize("text", ["Hello, world! Is it big?", "  two  spaces\n  x", "新日本 🦊🦉🙂 naïve 조선말"])
def test_a_prompt_and_its_continuation_are_the_text_of_all_ids(name, text):
    tokenizer = gguf_tokenizer(name)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) > 8
    for cut in range(len(ids)):
        stream, before = TextStream(tokenizer, ids[:cut]), decode(tokenizer, ids[:cut])
        joined = "".join(map(stream.push, ids[cut:])) + stream.finish()
        whole = before if text.startswith(before) else before.rstrip("\ufffd")  # the prompt ends within a character
        assert whole + joined == text
        assert continuation(tokenizer, ids[:cut], ids[cut:]) == joined


def test_characters_of_byte_tokens_are_whole_after_a_prompt_that_ends_in_some():
    tokenizer = gguf_tokenizer("space before")
    ids = tokenizer("🦊🦉🦊🦉", add_special_tokens=False).input_ids
    assert len(ids) > 12, "each byte must be a token here"
    for cut in range(1, len(ids)):
        stream = TextStream(tokenizer, ids[:cut])
        parts = [*map(stream.push, ids[cut:]), stream.finish()]
        assert not any("\ufffd" in part for part in parts)
        assert "🦊🦉🦊🦉".endswith("".join(parts))


def test_a_text_begins_anew_after_a_special_token():
    tokenizer = gguf_tokenizer("space before")
    answer = tokenizer("Hello", add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(answer[0]).startswith("▁")
    for prompt, text in (("x<|im_end|>", "Hello"), ("", "Hello"), ("x<|im_end|>\n", " Hello"), ("[/x]", " Hello")):
        assert continuation(tokenizer, tokenizer(prompt).input_ids, answer) == text


def forced(prompt, ids):
    """A processor after which the model writes `ids` after the prompt."""

    def process(prefix, scores):
        wanted = torch.full_like(scores, -1e9)
        wanted[:, ids[prefix.shape[-1] - len(prompt)]] = 0
        return wanted

    return process


def test_generations_streams_and_stop_strings_continue_the_prompt():
    tokenizer = gguf_tokenizer("space before")
    generator = load((tiny_llama(len(tokenizer)), tokenizer), method="none", compile=False)
    whole, prompt = generator.encode("Hello, world! It is big").tolist(), generator.encode("Hello, world!").tolist()
    answer = whole[len(prompt) :]
    assert whole[: len(prompt)] == prompt
    options = {"max_new_tokens": len(answer), "logits_processor": [forced(prompt, answer)], "eos_token_id": []}
    assert generator.generate(prompt, **options).text == " It is big"
    assert "".join(piece.text for piece in generator.stream(prompt, **options)) == " It is big"
    stopped = generator.generate(prompt, stop_strings=" I", **options)
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) < len(answer)
