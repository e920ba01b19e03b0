"""Thoughts, tool calls and formats in the three protocols, by the clients that people use, of what the toy is told."""

import json
import re
import threading

import anthropic
import httpx
import openai
import pydantic
import pytest
from llguidance import LLMatcher

from foredraft.api import load
from foredraft.server import speech
from foredraft.server.running import Listening
from foredraft.server.service import Service
from support.toys import TOY_DRAFT

pytestmark = pytest.mark.slow
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
TEMPLATE = (
    '{% if tools %}<|user|>{{ tools | tojson }} <tool_call>{"name{% endif %}{% for m in messages %}<|{{ m.role }}|>'
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}<|assistant|><think>{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
)
THOUGHT, SAID, CALL = (
    "I look.",
    "Just a moment.",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"],
          "additionalProperties": False}  # fmt: skip
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def server():
    generator = load(TOY_DRAFT, method="auto", speculative_config={"table": "none"}, compile=False, dtype="float32")
    generator.tokenizer.chat_template = TEMPLATE
    listening = Listening(Service(generator, "toy", {"table": "none"}), port=0)
    thread = threading.Thread(target=listening.run)
    thread.start()
    yield listening.address
    listening.stop()
    thread.join()


@pytest.fixture
def told(monkeypatch):
    """Make every answer the given text, by a grammar that allows no other."""

    def tell(text):
        monkeypatch.setattr(speech, "grammar_of", lambda *_: LLMatcher.grammar_from_regex(re.escape(text)))

    return tell


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat_has_the_thought_the_text_and_the_call(client, told):
    told(f"{THOUGHT}\n</think>\n\n{SAID}\n{CALL}")
    fields = {"model": "toy", "messages": ASKED, "tools": [CHAT_TOOL], "max_tokens": 200}
    answer = client.chat.completions.create(**fields)
    [choice] = answer.choices
    assert (choice.message.reasoning_content, choice.message.reasoning, choice.message.content) == (
        THOUGHT,
        THOUGHT,
        SAID,
    )
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    assert choice.finish_reason == "tool_calls"
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    with client.chat.completions.stream(**fields) as stream:
        thought = "".join(
            getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
            for event in stream
            if event.type == "chunk" and event.chunk.choices
        )
        last = stream.get_final_completion().choices[0]
    assert (thought, last.message.content) == (THOUGHT, SAID)
    assert last.message.tool_calls[0].function.parsed_arguments == {"city": "Paris"}
    assert last.finish_reason == "tool_calls"
    after = [*ASKED, choice.message.model_dump(), {"role": "tool", "tool_call_id": "1", "content": "Rain"}]
    told("Yes.</think>It rains.")
    assert client.chat.completions.create(**fields | {"messages": after}).choices[0].message.content == "It rains."


def test_a_call_that_is_cut_has_the_arguments_so_far(client, told):
    told(f"</think>{CALL.replace('Paris', 'Paris' * 40)}")
    answer = client.chat.completions.create(model="toy", messages=ASKED, tools=[CHAT_TOOL], max_tokens=60).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.tool_calls[0].function.arguments.startswith('{"city": "ParisParis')


def test_responses_have_an_item_for_each_part(client, told):
    told(f"{THOUGHT}</think>{SAID}{CALL}")
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    fields = {"model": "toy", "input": "Weather?", "tools": [tool], "include": [], "reasoning": {"effort": "low"}}
    answer = client.responses.create(**fields)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert (answer.output[0].content[0].text, answer.output_text) == (THOUGHT, SAID)
    assert json.loads(answer.output[2].arguments) == {"city": "Paris"}
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert [item.type for item in final.output] == [item.type for item in answer.output]
    assert final.output[2].parsed_arguments == {"city": "Paris"}
    for kind in ("reasoning_text", "output_text", "function_call_arguments"):
        assert kinds.index(f"response.{kind}.delta") < kinds.index(f"response.{kind}.done")
    told("No.</think>It rains.")
    result = {"type": "function_call_output", "call_id": answer.output[2].call_id, "output": "Rain"}
    asked = [{"role": "user", "content": "Weather?"}, *(item.model_dump() for item in answer.output), result]
    assert client.responses.create(**fields | {"input": asked}).output_text == "It rains."


def test_messages_have_a_block_for_each_part(server, told):
    told(f"{THOUGHT}</think>{SAID}{CALL}")
    tool = {"name": "weather", "input_schema": SCHEMA}
    fields = {"model": "toy", "max_tokens": 200, "messages": ASKED, "tools": [tool], "thinking": {"type": "adaptive"}}
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        answer = client.messages.create(**fields)
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        assert (answer.content[0].thinking, answer.content[1].text) == (THOUGHT, SAID)
        assert answer.content[2].input == {"city": "Paris"}
        assert answer.stop_reason == "tool_use"
        with client.messages.stream(**fields) as stream:
            final = stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
        assert final.content[2].input == {"city": "Paris"}
        result = {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": "Rain"}
        asked = [*ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        told("No.</think>It rains.")
        assert client.messages.create(**fields | {"messages": asked}).content[1].text == "It rains."
        counts = [
            client.messages.count_tokens(model="toy", messages=ASKED, **more).input_tokens
            for more in ({}, {"tools": [tool]})
        ]
        assert counts[1] > counts[0] + 10


@pytest.mark.parametrize(
    ("written", "given"),
    [("NaN", {}), ("1e999", {}), ("[" * 2000 + "]" * 2000, {}), (r'"\ud83d"', {"city": "\ud83d"})],
    ids=("NaN", "too large", "too deep", "half a pair"),
)
def test_arguments_that_json_does_not_hold_fail_no_message(server, told, written, given):
    """A number that no JSON has is left out; half of a character, escaped as in JSON, is sent as it is."""
    told(f'</think><tool_call>\n{{"name": "weather", "arguments": {{"city": {written}}}}}\n</tool_call>')
    body = {"max_tokens": 5000, "messages": ASKED, "tools": [{"name": "weather", "input_schema": SCHEMA}]}
    answer = httpx.post(f"{server}/v1/messages", json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["content"][-1]["input"] == given


def test_a_prompt_that_switches_thinking_off_has_no_thought(client, told):
    told(f"{SAID}")
    for extra in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):
        message = client.chat.completions.create(model="toy", messages=ASKED, **extra).choices[0].message
        assert (message.content, getattr(message, "reasoning_content", None)) == (SAID, None)


class Weather(pydantic.BaseModel):
    city: str


def test_tools_can_be_required(client):
    """By the toy as it is, which knows of no tools, with thinking switched off."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    tools = [
        openai.pydantic_function_tool(Weather, name="weather"),
        openai.pydantic_function_tool(Weather, name="other"),
    ]
    named = {"type": "function", "function": {"name": "other"}}
    for choice, names in (("required", {"weather", "other"}), (named, {"other"})):
        answer = client.chat.completions.parse(
            model="toy", messages=ASKED, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=400,
            seed=1, extra_body=off,
        ).choices[0]  # fmt: skip
        [call] = answer.message.tool_calls
        assert call.function.name in names
        assert answer.finish_reason == "length" or isinstance(call.function.parsed_arguments, Weather)


WISHES = {
    "thought": {}, "schema behind a thought": {"response_format": {"type": "json_object"}},
    "required": {"tools": [CHAT_TOOL], "tool_choice": "required"}, "strict": {"tools": [CHAT_TOOL]},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
}  # fmt: skip


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("thinking", [False, True])
def test_drafted_answers_are_the_plain_ones(server, wish, thinking):
    for fields in ({"temperature": 0}, {"temperature": 0.8, "seed": 3}):
        body = (
            {"messages": ASKED, "max_tokens": 60, "chat_template_kwargs": {"enable_thinking": thinking}}
            | fields
            | WISHES[wish]
        )
        answers = [httpx.post(f"{server}/v1/chat/completions", json=body | {"speculative": way}, timeout=60).json()
                   for way in (False, True, {"method": "prompt_lookup"})]  # fmt: skip
        said = [without_ids(answer["choices"]) for answer in answers]
        assert said[0] == said[1] == said[2]


def without_ids(choices):
    return [json.loads(re.sub(r'"id": "\w+"', '"id": ""', json.dumps(choice))) for choice in choices]
