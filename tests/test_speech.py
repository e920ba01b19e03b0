"""Marks that are special tokens: they are seen by what splits an answer, and other special tokens by nobody."""

import asyncio

import llguidance.hf
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foredraft.contracts import StepRecord
from foredraft.errors import UsageError
from foredraft.model.loading import load_tokenizer
from foredraft.server.answers import Choice as Answer
from foredraft.server.bodies import Choice, FunctionTool, TextRequest, Tools
from foredraft.server.processors import Constraint, matcher_of
from foredraft.server.speech import Speech, for_template
from foredraft.server.writer import Event
from support.toys import TOY

SPECIAL = ["<pad>", "<end>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
WORDS = ["so", "yes", '{"name":', '"f",', '"arguments":', "{}}", "Hi"]
TEMPLATE = '<think></think><tool_call>{"name" tools'
ASKED = [{"role": "user", "content": "Hi"}]
TOOLS = Tools.of([FunctionTool(name="f", parameters={"type": "object"})], Choice())


@pytest.fixture
def tokenizer():
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(["?", *WORDS])}, unk_token="?"))  # noqa: S106  # a word of the vocabulary, no password
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend)
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.chat_template = TEMPLATE
    return made


def ids_of(tokenizer, prompt):
    return np.array(tokenizer(prompt).input_ids, np.int64)


def parts(tokenizer, prompt, answer, tools=TOOLS):
    """The kinds and texts of an answer's parts; the prompt is a conversation that ends in these words."""
    ids, written = ids_of(tokenizer, prompt), tokenizer(answer).input_ids
    speech = Speech(tokenizer, ASKED, ids, TextRequest([], {}, tools))
    splitter, (stream, hidden) = speech.splitter(), speech.stream()
    found = []
    for token in written:
        if token not in hidden:
            found += splitter.push([(stream.push(token), None)])
    found += splitter.push([(stream.finish(), None)], last=True)
    return [(part.kind, part.text.strip()) for part in found if part.text.strip()]


def test_special_tokens_are_marks_and_not_text(tokenizer):
    call = 'yes <pad> <tool_call> {"name": "f", "arguments": {}} </tool_call> <end>'
    expected = [("thought", "so"), ("text", "yes"), ("call", "{}")]
    assert parts(tokenizer, "Hi", f"<think> so </think> {call}") == expected
    assert parts(tokenizer, "Hi <think>", f"so </think> {call}") == expected
    assert parts(tokenizer, "Hi <think> </think>", call) == expected[1:]


def test_marks_of_calls_are_hidden_where_no_tools_are_told(tokenizer):
    assert parts(tokenizer, "Hi", "yes <tool_call> so", Tools()) == [("text", "yes"), ("text", "so")]


def test_a_text_that_is_no_conversation_has_no_marks(tokenizer):
    speech = Speech(tokenizer, "Hi", ids_of(tokenizer, "Hi"), TextRequest([], {}, shape="a"))
    assert "think" not in speech.grammar
    stream, hidden = speech.stream()
    assert not hidden
    assert "".join(stream.push(token) for token in tokenizer("<think> so <pad>").input_ids).strip() == "so"


def test_a_thought_may_precede_a_format_only_if_it_can_be_told_from_the_text(tokenizer):
    def grammar(prompt):
        return Speech(tokenizer, ASKED, ids_of(tokenizer, prompt), TextRequest([], {}, shape="a")).grammar

    opening, closing = (f"<[{tokenizer.convert_tokens_to_ids(each)}]>" for each in ("<think>", "</think>"))
    assert opening in grammar("Hi")
    assert opening not in grammar("Hi <think>")
    assert closing in grammar("Hi <think>")
    assert closing not in grammar("Hi <think> </think>")
    tokenizer.chat_template = "<thought></thought>"  # of which this vocabulary has no token
    assert "thought" not in grammar("Hi")


def test_tools_need_a_template_that_takes_them(tokenizer):
    assert for_template(tokenizer, ASKED, told=True) == ASKED
    tokenizer.chat_template = "{{ messages }}"
    assert for_template(tokenizer, ASKED) == ASKED
    for prompt, told in ((ASKED, True), ([{"role": "assistant", "content": "", "tool_calls": [1]}], False)):
        with pytest.raises(UsageError, match="leave out tools"):
            for_template(tokenizer, prompt, told=told)


@pytest.mark.parametrize("special", [True, False])
def test_marks_that_are_tokens_are_written_as_such_within_a_grammar(special):
    """Qwen's marks are no special tokens, but llguidance takes them for some."""
    made = load_tokenizer(TOY)
    made.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in SPECIAL[2:]])
    made.chat_template = TEMPLATE
    required = Tools.of([FunctionTool(name="f")], Choice("required"))
    for prompt, request, answer in (
        ("Hi <think>", TextRequest([], {}, shape=" ?a"), "so</think>a"),
        ("Hi </think>", TextRequest([], {}, required), '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    ):
        grammar = Speech(made, ASKED, ids_of(made, prompt), request).grammar
        allowed = Constraint(matcher_of(llguidance.hf.from_tokenizer(made), grammar), len(made), 0)
        ids = made(answer).input_ids
        for count, token in enumerate(ids):
            assert allowed(torch.tensor([ids[:count]]), torch.zeros(1, len(made)))[0, token] == 0


def test_a_stop_string_is_not_found_in_a_mark_that_is_a_special_token(tokenizer):
    """As little as where the text ends: a stop string such as ">" must not hide what follows a mark."""
    marked = '<think> so </think> yes <tool_call> {"name": "f", "arguments": {}} </tool_call> <end>'

    def answered(stops, answer=marked, prompt=ASKED, tools=TOOLS):
        speech = Speech(tokenizer, prompt, ids_of(tokenizer, "Hi"), TextRequest([], {}, tools))
        choice = Answer(speech, stops, None, None, asyncio.Event())
        records = tuple(StepRecord((token,), 0, 0, (None,), {}) for token in tokenizer(answer).input_ids)
        choice.receive(Event(records, "eos"))
        choice.take()
        return [(part.kind, part.text.strip()) for part in choice.blocks]

    whole = [("thought", "so"), ("text", "yes"), ("call", "{}")]
    assert answered(()) == whole
    assert answered((">", "think")) == whole
    assert answered(("es",)) == [("thought", "so"), ("text", "y")]
    assert answered(("<tool_call>",)) == whole[:2], "which names the token"
    assert answered(("o yes",), "Hi so <pad> yes", "Hi", Tools()) == [("text", "Hi s")], "special tokens are no text"
