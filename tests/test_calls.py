"""Thoughts and tool calls in the answers of each family of models, in whichever pieces they come."""

import json
import re
import tarfile
from pathlib import Path
from types import SimpleNamespace

import llguidance
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from foredraft.errors import UsageError
from foredraft.server.bodies import Choice, FunctionTool, Tools
from foredraft.server.dialects import CALLS, dialect_of
from foredraft.server.parts import Splitter
from foredraft.server.speech import for_template, grammar_of

_FOLDER = Path(__file__).parent / "data"
_DATA = json.loads((_FOLDER / "answers_of_families.json").read_text(encoding="utf-8"))
TOOLS, ANSWERS = _DATA["tools"], _DATA["families"]
"""Answers as each family's documentation shows them: what is in the template, the answer, and what it holds."""

HERMES = '<tool_call>{"name'


def _templates():
    """The chat templates that llama.cpp is tested with, by their names there."""
    with tarfile.open(_FOLDER / "chat_templates.tar.xz") as archive:
        return {file.name.removesuffix(".jinja"): archive.extractfile(file).read().decode() for file in archive}


TEMPLATES = _templates()
UNKNOWN = {
    "Apertus-8B-Instruct", "Apriel-1.6-15b-Thinker-fixed", "CohereForAI-c4ai-command-r-plus-tool_use",
    "GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B", "HuggingFaceTB-SmolLM3-3B", "Kimi-K3", "LFM2.5-Instruct",
    "MiniMax-M1", "MiniMax-M3", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek-ai-DeepSeek-V3.1",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "fireworks-ai-llama-3-firefunction-v2", "google-gemma-2-2b-it",
    "llama-cpp-rwkv-world", "meetkai-functionary-medium-v3.2", "microsoft-Phi-3.5-mini-instruct", "muse-glimmer",
    "openbmb-MiniCPM5-1B", "tencent-Hy3", "unsloth-Apriel-1.5", "upstage-Solar-Open-100B",
}  # fmt: skip
"""Templates that tell no tools, or in whose form calls are not read, so that tools are refused."""
NO_CALLS = {"Kimi-K2-Instruct", "Kimi-K2-Thinking", "llama-cpp-deepseek-r1"}
"""Templates that tell tools, but write no call with transformers."""


def parts_of(needles, text, cuts=(), schemas=TOOLS, **options):
    """The parts of an answer that comes in the pieces between the cuts, joined: kind, name of the call, text."""
    splitter, found, at = Splitter(dialect_of(f"{needles} tools"), schemas, **options), [], 0
    for cut in (*cuts, len(text)):
        found += splitter.push([(text[at:cut], None)])
        at = cut
    found += splitter.push([], last=True)
    joined, before = [], None
    for part in found:
        if before is not None and part.continues(before):
            joined[-1] = (*joined[-1][:2], joined[-1][2] + part.text)
        else:
            joined.append((part.kind, part.call and part.call.name, part.text))
        before = part
    return joined


def text_of(parts, kind):
    return "".join(text for each, _, text in parts if each == kind)


def calls_of(parts):
    return [[name, json.loads(text)] for kind, name, text in parts if kind == "call"]


@pytest.mark.parametrize("family", ANSWERS)
def test_an_answer_is_its_thought_its_text_and_its_calls(family):
    needles, text = (ANSWERS[family][key] for key in ("template", "answer"))
    whole = parts_of(needles, text)
    assert text_of(whole, "thought") == ANSWERS[family]["thought"]
    assert text_of(whole, "text") == ANSWERS[family]["text"]
    assert calls_of(whole) == ANSWERS[family]["calls"]
    assert parts_of(needles, text, range(1, len(text))) == whole, "letter by letter"
    for cut in range(len(text)):
        assert parts_of(needles, text, [cut]) == whole, f"in two pieces, the first {text[:cut]!r}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_that_a_template_writes_is_read_as_it_was(name):
    """Of the rows of the table one fits the template, or none if calls in its form are not read."""
    template = TEMPLATES[name]
    fits = [row for row in CALLS if "tools" in template and re.search(row.needle, template, re.DOTALL)]
    assert len(fits) == (name not in UNKNOWN)
    if not fits or name in NO_CALLS:
        return
    told = [{"type": "function", "function": {"name": each, "description": "d", "parameters": TOOLS[each]}}
            for each in TOOLS]  # fmt: skip
    given = {"city": "Paris", "days": 3, "hours": [6, 18]}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": given}}
    said = [{"role": "user", "content": "Hi"}]
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    more = {"chat_template": template, "tools": told, "bos_token": "<s>", "eos_token": "</s>"}
    messages = for_template(SimpleNamespace(chat_template=template), [*said, answer])
    [whole], _ = render_jinja_template([messages], **more)
    begun, prompt = (render_jinja_template([said], add_generation_prompt=each, **more)[0][0] for each in (True, False))
    assert whole.startswith(prompt)
    parts = parts_of(template, whole.removeprefix(begun if whole.startswith(begun) else prompt))
    assert calls_of(parts) == [["get_weather", given]]


def test_the_template_of_gpt_oss_takes_a_thought_and_a_text_beside_a_call():
    tokenizer = SimpleNamespace(chat_template=TEMPLATES["openai-gpt-oss-120b"])
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    answer = {"role": "assistant", "content": "I look.", "thinking": "The time is asked.", "tool_calls": [call]}
    messages = for_template(tokenizer, [{"role": "user", "content": "Hi"}, answer])
    [written], _ = render_jinja_template([messages], chat_template=tokenizer.chat_template)
    assert "<|channel|>analysis<|message|>The time is asked.\n\nI look.<|end|>" in written


@pytest.mark.parametrize("family", [family for family, answer in ANSWERS.items() if answer["calls"]])
def test_arguments_come_while_they_are_written(family):
    """Those of a call that is cut are what was written of them, as with OpenAI."""
    needles, text, _, _, calls = ANSWERS[family].values()
    splitter, seen = Splitter(dialect_of(f"{needles} tools"), TOOLS), 0
    for letter in text:
        seen += sum(part.kind == "call" for part in splitter.push([(letter, None)]))
    at_once = family in ("Llama 4 pythonic", "LFM 2")  # which are read when they have ended
    assert seen >= (1 if at_once else 3) or calls == [["now", {}]]
    if not at_once and "hours" in text:
        whole, cut = (
            [part for part in parts_of(needles, each) if part[0] == "call"] for each in (text, text.split("18")[0])
        )
        assert whole[0][2].startswith(cut[0][2].rstrip("}"))


@pytest.mark.parametrize(
    ("needles", "text"),
    [
        (HERMES, r'<tool_call>{"name": "get\_weather", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": "word"}</tool_call>'),
        (HERMES, 'It writes <tool_call> and </tool'),
        (HERMES, '<tool_call>{"name": "f", "arg'),
        (HERMES, "<tool_call>"),
        ('ipython "parameters"', '{"answer": "a JSON text", "name": "x"}'),
        ('ipython "parameters"', 'In JSON: {"name": "now", "parameters": {}}'),
        ("[func_name1(params_name1=", "[1, 2, 3] is a list"),
        ("[func_name1(params_name1=", "[unknown(a=1)]"),
        ("<tool_call><function=", "a <function= of two"),
        (HERMES, '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>'),
        ("<|tool_call_start|>", "<|tool_call_start|>[f(a=1e999)]"),
        ("<|tool_call_start|>", '<|tool_call_start|>[f(**{"a": 1})]'),
    ],
)  # fmt: skip
def test_what_is_no_call_stays_text(needles, text):
    for cuts in ((), range(1, len(text))):
        assert parts_of(needles, text, cuts) == [("text", None, text)]


def test_null_is_no_arguments():
    assert parts_of(HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>') == [("call", "f", "{}")]


def test_what_follows_a_malformed_call_is_text():
    text = "<|tool_call>call:f{a:[1],b:<i>} and more"
    for cuts in ((), range(1, len(text))):
        expected = [("call", "f", '{"a": [1], "b": '), ("text", None, "<i>} and more")]
        assert parts_of("<|tool_call>", text, cuts) == expected


def test_marks_inside_of_arguments_are_arguments():
    text = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> <tool_call>"}} </tool_call>.'
    assert parts_of(HERMES, text) == [("call", "f", '{"a": "</tool_call> <tool_call>"}'), ("text", None, ".")]


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "12", "12"), ({"type": "integer"}, "12", 12), ({}, "12", 12), ({}, "twelve", "twelve"),
        ({"type": "integer"}, "twelve", "twelve"), ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "1.5", 1.5), ({"type": "boolean"}, "True", True),
        ({"type": "integer"}, "true", "true"), ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'), ({"type": "number"}, "NaN", "NaN"),
        ({"type": None}, "12", 12), ({"anyOf": None}, "12", 12), ({"type": "number"}, "1e999", "1e999"),
        ({"type": ["string", "null"]}, '"Paris"', "Paris"), ({"type": ["string", "null"]}, "Paris", "Paris"),
    ],
)  # fmt: skip
def test_arguments_have_the_types_of_the_schema(schema, written, value):
    text = f"<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>"
    [(_, _, arguments)] = parts_of("<tool_call><function=", text, schemas={"f": {"properties": {"a": schema}}})
    assert json.loads(arguments) == {"a": value}


@pytest.mark.parametrize("family", ["Qwen 3 Coder", "GLM 4.6", "DeepSeek V3.2", "MiniMax M2"])
@pytest.mark.parametrize("breaks", ["\n", "\n\n"])
def test_line_breaks_at_the_end_of_a_text_are_kept(family, breaks):
    """The templates of some families write one before the closing tag; another one is the text's, such as a file's."""
    needles, text = (ANSWERS[family][key] for key in ("template", "answer"))
    longer = text.replace("{x}", "{x}" + breaks)
    name, given = calls_of(parts_of(needles, text))[0]
    for cuts in ((), range(1, len(longer))):
        assert calls_of(parts_of(needles, longer, cuts))[0] == [name, given | {"city": given["city"] + breaks}]


@pytest.mark.parametrize("quote", ['"', "'", '"""'])
@pytest.mark.parametrize("text", ["a\n  b\r\n\nc", r"a\nb", "one (\n[", "a \\\\ b\n"])
def test_a_text_of_several_lines_is_an_argument_in_pythons_form(quote, text):
    written = f"<|tool_call_start|>[f(a={quote}{text}{quote}, b=1)]<|tool_call_end|>"
    value = text.replace(r"\n", "\n").replace("\\\\", "\\")
    for cuts in ((), range(1, len(written))):
        assert calls_of(parts_of("<|tool_call_start|>", written, cuts)) == [["f", {"a": value, "b": 1}]]


def test_a_thought_that_the_prompt_has_begun():
    parts = parts_of("<think>", "Hm.\n</think>\n\nYes.\n", thinking=True)
    assert parts == [("thought", None, "Hm."), ("text", None, "Yes.\n")]
    assert parts_of("<think>", "Hm, and cut \n", thinking=True) == [("thought", None, "Hm, and cut")]


def test_a_text_without_marks_is_unchanged():
    for text in ("  spaces around \n\n", "\n", "<tool_call> is not asked for "):
        assert parts_of("", text, range(1, len(text)), schemas=None) == [("text", None, text)]


def test_no_more_calls_than_asked_for():
    needles, text, *_ = ANSWERS["Hermes"].values()
    assert [name for name, _ in calls_of(parts_of(needles, text, parallel=False))] == ["get_weather"]


class Bytes:
    """A vocabulary of bytes, two special tokens, and an end."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, [256, 257, 258]
    tokens = [bytes([each]) for each in range(256)] + [b"<end>", b"<think>", b"</think>"]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


TOKENS = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def accepted(grammar, text, specials=None):
    """Return how much of a text a grammar allows, and whether it may end there."""
    matcher = llguidance.LLMatcher(TOKENS, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = specials or list(text.encode())
    taken = matcher.try_consume_tokens(ids)
    return taken, taken == len(ids) and matcher.is_accepting()


def tools(mode="required", names=None, *, strict=False, parallel=True):
    given = [FunctionTool(name=name, parameters=schema, strict=strict) for name, schema in TOOLS.items()]
    return Tools.of(given, Choice(mode, names), parallel=parallel)


WRITTEN = [
    family
    for family, answer in ANSWERS.items()
    if answer["calls"] and not answer["text"] and "role first" not in family
]


@pytest.mark.parametrize("family", WRITTEN)
def test_a_required_call_is_written_as_the_family_writes_it(family):
    """What the grammar writes is read as the same call; another tool, and a text, are not allowed."""
    dialect = dialect_of(f"{ANSWERS[family]['template']} tools")
    thought = None if dialect.thoughts is None else False
    grammar = grammar_of(None, tools(), dialect, {}, thought)
    matcher = llguidance.LLMatcher(TOKENS, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    written = written_by(matcher, dialect.calls, {"city": "Paris"})
    whole = parts_of(ANSWERS[family]["template"], written)
    assert calls_of(whole) == [["get_weather", {"city": "Paris"}]], written
    assert accepted(grammar, "Hello")[0] < 5
    assert accepted(grammar, written.replace("get_weather", "get_water"))[0] < len(written.encode())


def written_by(matcher, calls, given):
    """The text of a call in a family's form, by its style; the matcher has to allow it."""
    style = calls.style
    name, city = "get_weather", given["city"]
    kinds = {
        "JsonCall": lambda: f'{{"{style.name}": "{name}", "{style.arguments}": {json.dumps(given)}}}',
        "NamedCall": lambda: style.written.format(name) + json.dumps(given),
        "TaggedCall": lambda: name + style.name + style.written.format("city", "true") + city + style.close + style.end,
        "PythonCall": lambda: f'{name}(city="{city}")',
        "BraceCall": lambda: f"call:{name}{{city:{style.quote}{city}{style.quote}}}",
    }  # fmt: skip
    text = calls.prefix + kinds[type(style).__name__]() + calls.end + calls.suffix
    taken = matcher.try_consume_tokens(list(text.encode()))
    assert text.encode()[:taken].decode() == text
    assert matcher.is_accepting()
    return text


@pytest.mark.parametrize(
    ("family", "schema", "keyword"),
    [
        ("Qwen 3 Coder", {"type": "string", "pattern": "a+"}, "pattern"),
        ("GLM 4.6", {"type": "string", "maxLength": 3}, "maxLength"),
        ("Gemma 4", {"type": "string", "minLength": 3}, "minLength"),
        ("Gemma 4", {"type": "array", "maxItems": 3}, "maxItems"),
        ("Gemma 4", {"$ref": "#/$defs/a"}, "$ref"),
        ("Gemma 4", {"oneOf": [{"type": "string"}, {"const": "a"}]}, "oneOf"),
        ("LFM 2", {"type": "string"}, "minProperties"),
        ("Qwen 3 Coder", {"type": "string", "enum": 5}, "'enum' of a tool's schema is 5"),
        ("Gemma 4", {"type": "object", "required": None}, "'required' of a tool's schema is None"),
        ("Gemma 4", {"type": "object", "properties": {"b": True}}, "True where this model needs an object"),
    ],
)
def test_what_a_form_cannot_enforce_is_refused(family, schema, keyword):
    dialect, whole = dialect_of(f"{ANSWERS[family]['template']} tools"), {"properties": {"a": schema}}
    tool = FunctionTool(name="f", parameters=whole | ({keyword: 1} if keyword == "minProperties" else {}))
    with pytest.raises(UsageError, match=re.escape(keyword)):
        grammar_of(None, Tools.of([tool], Choice("required")), dialect, {}, None)


def test_a_constant_is_enforced():
    cases = (
        ("Gemma 4", {"const": "x"}, '<|"|>x<|"|>', '<|"|>y<|"|>'),
        ("Qwen 3 Coder", {"type": "string", "const": "x"}, "x", "y"),
    )
    for family, schema, right, wrong in cases:
        dialect = dialect_of(f"{ANSWERS[family]['template']} tools")
        calls, tool = dialect.calls, FunctionTool(name="f", parameters={"properties": {"a": schema}, "required": ["a"]})
        thought = None if dialect.thoughts is None else False
        grammar = grammar_of(None, Tools.of([tool], Choice("required")), dialect, {}, thought)
        for value, taken in ((right, True), (wrong, False)):
            text = f"call:f{{a:{value}}}"
            if family != "Gemma 4":
                text = f"f{calls.style.name}{calls.style.written.format('a', 'true')}{value}{calls.style.close}"
                text += calls.style.end
            assert accepted(grammar, calls.prefix + text + calls.end + calls.suffix)[1] == taken, text


@pytest.mark.parametrize("family", ["Hermes", "LFM 2", "Gemma 4", "Qwen 3 Coder", "GLM 4.6"])
@pytest.mark.parametrize("value", ["Paris", None])
def test_a_text_that_may_be_missing_is_read_as_it_was_required(family, value):
    """As pydantic writes it for `str | None`, which clients ask for strictly."""
    schema = {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}, "required": ["a"]}
    tool = FunctionTool(name="f", parameters=schema, strict=True)
    dialect = dialect_of(f"{ANSWERS[family]['template']} tools")
    thought = None if dialect.thoughts is None else False
    grammar = grammar_of(None, Tools.of([tool], Choice("required")), dialect, {}, thought)
    written, quoted = json.dumps(value), "null" if value is None else f'<|"|>{value}<|"|>'
    text = {
        "Hermes": f'<tool_call>\n{{"name": "f", "arguments": {{"a": {written}}}}}\n</tool_call>',
        "LFM 2": f"<|tool_call_start|>[f(a={written})]<|tool_call_end|>",
        "Gemma 4": f"<|tool_call>call:f{{a:{quoted}}}<tool_call|>",
        "Qwen 3 Coder": f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>",
        "GLM 4.6": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>",
    }[family]
    assert accepted(grammar, text)[1]
    assert calls_of(parts_of(ANSWERS[family]["template"], text, schemas={"f": schema})) == [["f", {"a": value}]]


@pytest.mark.parametrize("family", ["Hermes", "LFM 2", "Gemma 4", "Qwen 3 Coder"])
def test_limits_of_a_number_are_kept(family):
    dialect = dialect_of(f"{ANSWERS[family]['template']} tools")
    tool = FunctionTool(
        name="f", parameters={"properties": {"a": {"type": "integer", "maximum": 5}}, "required": ["a"]}
    )
    grammar = grammar_of(None, Tools.of([tool], Choice("required")), dialect, {}, None)
    written = {
        "Hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 5}}\n</tool_call>',
        "LFM 2": "<|tool_call_start|>[f(a=5)]<|tool_call_end|>",
        "Gemma 4": "<|tool_call>call:f{a:5}<tool_call|>",
        "Qwen 3 Coder": "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>",
    }[family]
    assert accepted(grammar, written)[1]
    assert not accepted(grammar, written.replace("5", "6"))[1]


def test_a_named_tool_is_the_only_one():
    dialect = dialect_of(f"{ANSWERS['Hermes']['template']} tools")
    grammar = grammar_of(None, tools(names=["now"]), dialect, {}, None)
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert accepted(grammar, text) == (len(text), True)
    assert accepted(grammar, text.replace("now", "get_weather"))[0] < len(text)


def test_strict_tools_leave_the_choice_but_not_the_arguments():
    dialect = dialect_of(f"{ANSWERS['Hermes']['template']} tools")
    grammar = grammar_of(None, tools("auto", strict=True), dialect, {}, None)
    call = f'Well: <tool_call>\n{{"name": "get_weather", "arguments": {json.dumps({"city": "x"})}}}\n</tool_call> Good.'
    for text in ("No call at all.", "", call, call + call):
        assert accepted(grammar, text) == (len(text), True)
    assert accepted(grammar, call.replace('"x"', "3"))[0] < len(call)


def test_a_format_begins_behind_the_thought():
    dialect, shape = dialect_of("<think></think>"), {"type": "object", "properties": {"a": {"type": "integer"}}}
    for specials, thought in (({}, b"<think>Hm {</think>"), ({"<think>": 257, "</think>": 258}, None)):
        ids = list(thought) if thought else [257, *b"Hm {", 258]
        closed = list(thought[7:]) if thought else ids[1:]
        open_, begun, over = (grammar_of(shape, Tools(), dialect, specials, each) for each in (False, True, None))
        answer = list(b'{"a": 1}')
        assert accepted(open_, "", ids + list(b"\n\n") + answer)[1]
        assert accepted(open_, "", answer)[1], "it need not think"
        assert accepted(begun, "", closed + answer)[1]
        assert not accepted(begun, "", closed)[1]
        assert accepted(over, "", answer)[1]
        assert accepted(over, "", ids)[0] == 0


def test_a_regex_may_hold_anything():
    grammar = grammar_of('a/b"\n\\d', Tools(), dialect_of("<think>"), {}, None)
    assert accepted(grammar, 'a/b"\n7') == (6, True)
