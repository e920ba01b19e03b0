"""Which fields of a request are honoured, ignored or refused, in the bodies that clients of 2026 send."""

import pytest
from pydantic import ValidationError

from foredraft.server.anthropic import CountRequest, MessagesRequest
from foredraft.server.openai import ChatRequest, CompletionRequest
from foredraft.server.replies import failure_of
from foredraft.server.responses import ResponsesRequest

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION | {"strict": True}}
ASKED = [{"role": "user", "content": "Hi"}]
CALLED = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "call_1", "index": 0, "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
]}  # fmt: skip
BODIES = {
    "chat": (ChatRequest, {"messages": ASKED}), "completions": (CompletionRequest, {"prompt": "Hi"}),
    "responses": (ResponsesRequest, {"input": "Hi"}),
    "messages": (MessagesRequest, {"messages": ASKED, "max_tokens": 5}),
}  # fmt: skip


def made(route, **fields):
    kind, least = BODIES[route]
    return kind.model_validate(least | fields)


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("chat", {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}),
        ("chat", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("chat", {"parallel_tool_calls": False}),
        ("chat", {"messages": [*ASKED, CALLED, {"role": "tool", "tool_call_id": "call_1", "content": "7"}]}),
        ("chat", {"messages": [*ASKED, {"role": "assistant", "content": "A", "parsed": {}, "reasoning_content": "t"}]}),
        ("chat", {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, *ASKED]}),
        ("chat", {"reasoning_effort": "none", "verbosity": "low", "store": True, "prompt_cache_retention": "24h"}),
        ("chat", {"chat_template_kwargs": {"enable_thinking": False}, "top_k": -1, "service_tier": "flex"}),
        ("chat", {"stream_options": {"include_usage": True, "include_obfuscation": False}}),
        ("chat", {"best_of": 1, "skip_special_tokens": True, "add_generation_prompt": True, "functions": []}),
        ("chat", {"cache_prompt": True, "keep_alive": "5m", "timings_per_token": True, "priority": 0, "user": "u"}),
        ("chat", {"top_logprobs": 0, "metadata": {"a": "b"}, "prompt_cache_options": {"ttl": "30m"}}),
        ("completions", {"echo": False, "best_of": 1, "stream_options": {"include_usage": True}, "suffix": ""}),
        ("responses", {"include": [], "tools": [], "truncation": "disabled", "store": True, "top_logprobs": 0}),
        ("responses", {"include": ["reasoning.encrypted_content"], "parallel_tool_calls": True}),
        ("responses", {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "high"}}),
        ("responses", {"tools": [FUNCTION | {"type": "function", "strict": True}], "tool_choice": "required"}),
        ("responses", {"tools": [FUNCTION | {"type": "function", "defer_loading": False}]}),
        ("responses", {"tools": [FUNCTION | {"type": "function"}], "tool_choice": {"type": "function", "name": "f"}}),
        ("messages", {"tools": [], "thinking": {"type": "enabled", "budget_tokens": 9}, "metadata": {"user_id": "u"}}),
        ("messages", {"tools": [{"name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral"}}],
                      "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}),
        ("messages", {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}}}),
        ("messages", {"thinking": {"type": "adaptive"}, "context_management": {"edits": []}}),
        ("messages", {"speed": "fast", "user_profile_id": "u", "diagnostics": {"previous_message_id": "m"}}),
    ],
    ids=str,
)  # fmt: skip
def test_what_clients_send_is_taken(route, fields):
    assert made(route, **fields).text_request().prompts


@pytest.mark.parametrize(
    ("route", "fields", "words"),
    [
        ("chat", {"maxTokens": 3}, "no field 'maxTokens' here; did you mean 'max_tokens'"),
        ("chat", {"qqqq": 3}, "no field 'qqqq' here; leave it out."),
        ("chat", {"best_of": 2}, "best_of: it cannot be as asked; use n."),
        ("chat", {"best_of": True}, "best_of"),
        ("chat", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "'g' in tools"),
        ("chat", {"tool_choice": "required"}, "needs 'a tool' in tools"),
        ("chat", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required",
                                                                                              "tools": []}}},
         "tool_choice needs 'a tool'"),
        ("chat", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0"),
        ("chat", {"functions": [FUNCTION]}, "use tools"),
        ("chat", {"tools": [TOOL], "ignore_eos": True}, "strict, named or required exclude each other"),
        ("responses", {"tools": [FUNCTION | {"type": "function", "parameters": {"properties": 3}}]}, "properties"),
        ("chat", {"tools": [TOOL], "tool_choice": {"type": "function"}}, "name a tool"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages.0.content.0: this model reads text only; leave out the part of type 'image_url'"),
        ("chat", {"messages": [{"role": "user", "content": "a", "nme": "b"}]}, "did you mean 'name'"),
        ("responses", {"previous_response_id": "r"}, "send the whole conversation"),
        ("responses", {"truncation": "auto"}, "shorten it"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools.0"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads text only"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "reads text only"),
        ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ("responses", {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[1]"}]},
         "input.0.function_call.arguments: '[1]' is no object; send the call as it came"),
        ("completions", {"echo": True}, "the prompt is not repeated"),
    ],
    ids=str,
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_with_the_reason(route, fields, words):
    with pytest.raises(ValidationError) as raised:
        made(route, **fields)
    failure = failure_of(raised.value)
    assert failure.status == 400
    assert words in failure.message


def test_templates_see_thoughts_calls_and_results():
    answer = CALLED | {"reasoning": "Hm.", "content": "So."}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "7"}]}
    [told] = made("chat", messages=[*ASKED, answer, result]).text_request().prompts
    assert told[1]["reasoning_content"] == "Hm."
    assert told[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": "b"}}
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    call = {"type": "function_call", "id": "i", "call_id": "call_1", "name": "f", "arguments": '{"a": "b"}'}
    said = {"role": "assistant", "content": "So."}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "7"}
    [of_items] = made("responses", input=[*ASKED, thought, said, call, result]).text_request().prompts
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    call = {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": "b"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "call_1",
        "content": [{"type": "text", "text": "7"}],
        "is_error": False,
    }
    answer = [thought, {"type": "text", "text": "So."}, call]
    blocks = [*ASKED, {"role": "assistant", "content": answer}, {"role": "user", "content": [result]}]
    [of_blocks] = made("messages", messages=blocks).text_request().prompts
    assert told == of_items == of_blocks


def test_an_answer_that_was_cut_within_its_thought_is_an_answer():
    """In each protocol, as templates refuse two questions in a row."""
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    blocks = [{"type": "thinking", "thinking": "Hm.", "signature": ""}]
    [of_items] = made("responses", input=[*ASKED, thought, *ASKED]).text_request().prompts
    answer = {"role": "assistant", "content": blocks}
    [of_blocks] = made("messages", messages=[*ASKED, answer, *ASKED]).text_request().prompts
    cut = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    [told] = made("chat", messages=[*ASKED, cut, *ASKED]).text_request().prompts
    assert told == of_items == of_blocks
    assert told[1]["reasoning_content"] == "Hm."


@pytest.mark.parametrize("written", ["", '{"a": "b', "null"])
def test_an_earlier_call_without_whole_arguments_has_none(written):
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": written}
    [told] = made("responses", input=[*ASKED, call]).text_request().prompts
    assert told[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_thinking_is_switched_by_the_names_that_templates_read():
    assert made("chat").text_request().variables == {}
    off = {"enable_thinking": False, "thinking": False}
    assert made("chat", reasoning_effort="none").text_request().variables == off
    assert made("messages", thinking={"type": "disabled"}).text_request().variables == off
    high = made("responses", reasoning={"effort": "high"}).text_request().variables
    assert (high["enable_thinking"], high["reasoning_effort"]) == (True, "high")
    own = (
        made("chat", reasoning_effort="high", chat_template_kwargs={"enable_thinking": False}).text_request().variables
    )
    assert own["enable_thinking"] is False


def test_tools_that_are_not_to_be_called_are_not_told():
    assert not made("chat", tools=[TOOL], tool_choice="none").text_request().tools.told
    assert "strict" not in str(made("chat", tools=[TOOL]).text_request().tools.told), "the model need not know"
    counted = CountRequest(messages=ASKED, tools=[{"name": "f", "input_schema": {"type": "object"}}])
    assert counted.text_request().tools.told
