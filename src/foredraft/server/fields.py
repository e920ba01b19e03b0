"""The request fields that are not honoured: the ignored ones, which cannot change the answer, and the refused ones.

Fields that are honoured are those of the bodies themselves. docs/reference/fields.md is written from both. Does not
know a request.
"""

import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic_core import PydanticCustomError

UNKNOWN, REFUSED = "unknown_field", "unsupported_field"
"""Codes of the errors for a field that nobody knows, and for one of the table."""

_OPENAI = "chat completions responses"
_TEXTS = "chat completions"
_LABEL = "labels the request"
_SPEED = "changes when or how fast the answer comes, if anything"
_KEPT = "nothing of a request is stored"
_HISTORY = "describes an earlier answer; its text is what the model reads"
_SAMPLER = "another value needs a sampler that this server does not have"
_SHAPES = "use response_format"
_TEMPLATE = "the chat template of the model is always applied as it is"


class Row(NamedTuple):
    """Fields: the bodies that have them, their `harmless` values (None: all), which are ignored, and the reason."""

    bodies: str  # separated by spaces; a nested body by its place, as in `messages.tool_calls`
    names: str  # separated by spaces
    harmless: tuple[Any, ...] | None
    reason: str  # why they are ignored, or why other values are refused


TABLE = (
    Row(_OPENAI, "user safety_identifier", None, _LABEL),
    Row(f"{_TEXTS} messages", "metadata", None, _LABEL),
    Row(_TEXTS, "request_id", None, _LABEL),
    Row(_OPENAI, "prompt_cache_key prompt_cache_retention prompt_cache_options", None, _SPEED),
    Row(f"{_OPENAI} messages", "service_tier", None, _SPEED),
    Row(_TEXTS, "priority cache_prompt keep_alive", None, _SPEED),
    Row(_TEXTS, "cache_salt", None, "prefixes are kept apart by API key"),
    Row(_TEXTS, "timings_per_token", None, "`metrics` has the figures"),
    Row(_OPENAI, "store", None, _KEPT),
    Row("responses", "previous_response_id conversation prompt", (), f"{_KEPT}; send the whole conversation as input"),
    Row("responses", "background", (False,), f"{_KEPT}; wait for the answer"),
    Row("responses", "include", ([], ["reasoning.encrypted_content"]), "reasoning is sent as text"),
    Row("responses", "truncation", ("disabled",), "a conversation that is too long is refused; shorten it"),
    Row("responses", "max_tool_calls", None, "limits OpenAI's own tools, of which there are none here"),
    Row("responses", "top_logprobs", (0,), "use /v1/chat/completions"),
    Row("responses", "stream_options", None, "pads events, or not"),
    Row("responses.reasoning", "summary generate_summary", None, "reasoning is sent as it is written"),
    Row("chat responses.text", "verbosity", None, "no chat template takes it"),
    Row("chat", "modalities", (["text"],), "this model writes text only"),
    Row("chat", "audio", (), "this model writes text only"),
    Row("chat", "web_search_options", (), "this server runs no tools of its own"),
    Row("chat", "functions", ([],), "use tools"),
    Row("chat", "function_call", ("none", "auto"), "use tool_choice"),
    Row("chat", "think", (), "use chat_template_kwargs, as in {'enable_thinking': false}"),
    Row("chat", "include_reasoning", (True,), "reasoning is in a field of its own; do not read it"),
    Row("chat tokenize", "add_generation_prompt", (True,), _TEMPLATE),
    Row("chat tokenize", "continue_final_message", (False,), "an answer that is begun cannot be continued"),
    Row("chat tokenize", "chat_template", (), _TEMPLATE),
    Row("chat", "documents", ([],), "put the documents into a message"),
    Row("completions", "chat_template_kwargs", None, "a text has no chat template"),
    Row(_TEXTS, "add_special_tokens", (), "it is false for a conversation, and the tokenizer's own choice for a text"),
    Row(_TEXTS, "skip_special_tokens", (True,), "special tokens are never shown"),
    Row(_TEXTS, "spaces_between_special_tokens", None, "special tokens are never shown"),
    Row(_TEXTS, "include_stop_str_in_output", (False,), "a stop string is not part of the answer"),
    Row(_TEXTS, "stop_token_ids", ([],), "use stop"),
    Row(_TEXTS, "bad_words", ([],), "use logit_bias"),
    Row(_TEXTS, "allowed_token_ids", (), "use logit_bias or response_format"),
    Row(_TEXTS, "min_tokens", (0,), "use ignore_eos with max_tokens"),
    Row(_TEXTS, "best_of", (1,), "use n"),
    Row(_TEXTS, "use_beam_search", (False,), _SAMPLER),
    Row(_TEXTS, "length_penalty typical_p", (1, 1.0), _SAMPLER),
    Row(_TEXTS, "mirostat", (0,), _SAMPLER),
    Row(_TEXTS, "prompt_logprobs", (), "only tokens that are written have log-probabilities"),
    Row(_TEXTS, "truncate_prompt_tokens", (-1,), "a prompt that is too long is refused; shorten it"),
    Row("completions", "echo", (False,), "the prompt is not repeated"),
    Row("completions", "suffix", ("",), "the model continues a text, and does not fill a gap"),
    Row(_TEXTS, "structured_outputs guided_json guided_regex guided_choice guided_grammar grammar", (), _SHAPES),
    Row(_TEXTS, "repeat_penalty", (1, 1.0), "use repetition_penalty"),
    Row(_TEXTS, "n_predict", (), "use max_tokens"),
    Row("messages", "cache_control speed", None, _SPEED),
    Row("messages", "user_profile_id", None, _LABEL),
    Row("messages", "diagnostics", None, "asks why a cache was missed; the answer is the same"),
    Row("messages", "inference_geo", None, "the server is where it is"),
    Row("messages responses", "context_management", None, "shortens a conversation; one that is too long is refused"),
    Row("messages", "mcp_servers", ([],), "this server runs no tools of its own"),
    Row("messages", "container", (), "this server runs no tools of its own"),
    Row("messages", "output_format", (), "use output_config.format"),
    Row("messages.thinking", "budget_tokens", None, "no chat template takes it; max_tokens bounds thought and answer"),
    Row("messages.thinking", "display", None, "reasoning is sent as it is written"),
    Row("stream_options", "include_obfuscation", None, "pads events, or not"),
    Row("stream_options", "continuous_usage_stats", (False,), "usage is sent once, at the end"),
    Row("tools", "custom", (), "use a function"),
    Row("tools tools.function", "cache_control", None, _SPEED),
    Row("tools", "eager_input_streaming", None, "arguments are always streamed as they are written"),
    Row("tools tools.function", "defer_loading", (False,), "all tools are shown to the model"),
    Row("tools tools.function", "allowed_callers", (["direct"],), "only the client calls tools"),
    Row("tools", "input_examples", ([],), "no chat template takes them; put them into the description"),
    Row("message", "audio", (), "this model reads text only"),
    Row("message", "function_call", (), "use tool_calls"),
    Row("message message.content", "annotations status phase citations logprobs id caller", None, _HISTORY),
    Row("message message.tool_calls", "provider_specific_fields", None, _LABEL),
    Row("message message.content message.tool_calls", "cache_control prompt_cache_breakpoint", None, _SPEED),
    Row("message message.content message.tool_calls.function", "parsed parsed_arguments", None, "repeats the text"),
    Row("message.content", "is_error", None, "the content says it"),
    Row("message.content", "signature", None, "reasoning is text here"),
    Row("message", "reasoning_details", None, "use reasoning_content"),
    Row("message.tool_calls", "index", None, "calls are in the order of the list"),
)  # fmt: skip
_ROWS = {(body, name): row for row in TABLE for body in row.bodies.split() for name in row.names.split()}


def is_ignored(body: str, name: str, value: Any, honoured: Iterable[str]) -> bool:
    """Return whether a field that `body` does not honour can be left out; PydanticCustomError if it cannot."""
    row = _ROWS.get((body, name))
    if row is None:
        others = [*honoured, *(known for place, known in _ROWS if place == body)]
        near = difflib.get_close_matches(name[:80], others, 1)
        advice = f"did you mean {near[0]!r}?" if near else "leave it out."
        raise PydanticCustomError(UNKNOWN, f"This server has no field '{{name}}' here; {advice}", {"name": name[:80]})
    if row.harmless is None or any(type(value) is type(each) and value == each for each in row.harmless):
        return True
    raise PydanticCustomError(REFUSED, "it cannot be as asked; {reason}", {"name": name, "reason": row.reason})
