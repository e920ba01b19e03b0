"""Anthropic's `/v1/messages` protocol.

Does not depend on how answers are generated.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, Tag, model_validator

from foredraft.server import bodies
from foredraft.server.answers import Answers
from foredraft.server.bodies import Body
from foredraft.server.calls import read_json
from foredraft.server.metrics import drafting_of
from foredraft.server.openai import TopK, usage_of
from foredraft.server.parts import Part
from foredraft.server.replies import RequestError

_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
_DELTAS = {"text": ("text_delta", "text"), "thought": ("thinking_delta", "thinking"),
           "call": ("input_json_delta", "partial_json")}  # fmt: skip


class _Thinking(Body):
    within = "message.content"
    type: Literal["thinking"]
    thinking: str


class _HiddenThinking(Body):
    type: Literal["redacted_thinking"]
    data: str  # another server's


class _ToolUse(Body):
    within = "message.content"
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(Body):
    within = "message.content"
    type: Literal["tool_result"]
    tool_use_id: str
    content: bodies.Content = ""


_Part = Annotated[
    Annotated[_Thinking, Tag("thinking")] | Annotated[_HiddenThinking, Tag("redacted_thinking")]
    | Annotated[_ToolUse, Tag("tool_use")] | Annotated[_ToolResult, Tag("tool_result")]
    | Annotated[bodies.TextPart, Tag("text")],
    bodies.by_type("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]  # fmt: skip


class _Message(Body):
    within = "message"
    role: Literal["user", "assistant", "system"]
    content: str | bodies.Many[_Part]

    def for_template(self) -> list[dict[str, Any]]:
        """Return the messages that it is for chat templates, which have a message for each result of a tool."""
        parts = [bodies.TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        text = "".join(part.text for part in parts if isinstance(part, bodies.TextPart))
        thought = "".join(part.thinking for part in parts if isinstance(part, _Thinking))
        calls = [(part.id, part.name, part.input) for part in parts if isinstance(part, _ToolUse)]
        results = [part for part in parts if isinstance(part, _ToolResult)]
        messages = [{"role": "tool", "tool_call_id": result.tool_use_id, "content": bodies.text_of(result.content)}
                    for result in results]  # fmt: skip
        if text or not results:
            messages.append(bodies.with_parts({"role": self.role, "content": text}, thought, calls))
        return messages


class _Tool(bodies.FunctionTool):
    within = "tools"
    type: Literal["custom"] = "custom"
    parameters: Annotated[dict[str, Any], Field(alias="input_schema")]


class _ThinkingWish(Body):
    within = "messages.thinking"
    type: Literal["enabled", "disabled", "adaptive"]


class _Format(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class _OutputConfig(Body):
    effort: str | None = None
    format: _Format | None = None


class CountRequest(bodies.ConversationRequest):
    """`/v1/messages/count_tokens`, and what it has in common with `/v1/messages`."""

    within = "messages"
    messages: bodies.Some[_Message]
    system: bodies.Content | None = None
    tools: bodies.Many[_Tool] | None = None
    thinking: _ThinkingWish | None = None
    output_config: _OutputConfig = _OutputConfig()

    def text_request(self) -> bodies.TextRequest:
        first = [] if self.system is None else [{"role": "system", "content": bodies.text_of(self.system)}]
        conversation = [*first, *(each for message in self.messages for each in message.for_template())]
        thinks = None if self.thinking is None else self.thinking.type != "disabled"
        variables = self.variables(self.output_config.effort, thinks)
        return bodies.TextRequest([conversation], {}, self._tools, variables)


class MessagesRequest(CountRequest):
    """`/v1/messages`."""

    max_tokens: PositiveInt
    stop_sequences: bodies.Stops = Field(default_factory=list)
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: TopK | None = None

    @model_validator(mode="after")
    def _asks_for_an_answer(self) -> Self:
        if self.messages[-1].role == "assistant":
            raise ValueError("the last message is the assistant's; an answer that is begun cannot be continued")
        return self

    def text_request(self) -> bodies.TextRequest:
        options = self.options(self.max_tokens, top_k=self.top_k) | {"stop_strings": self.stop_sequences}
        shape = self.output_config.format.schema_ if self.output_config.format else None
        return replace(super().text_request(), options=options, shape=shape, speculative=self.speculative)

    def whole(self, answers: Answers) -> dict[str, Any]:
        content = [_block(part, part.text) for part in answers.content]
        return self._message(answers, content) | {"metrics": drafting_of(answers.records)}

    async def events(self, answers: Answers) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "message_start", "message": self._message(answers, [])}
        async for step, index, part in answers.blocks():
            if step == "begin":
                yield {"type": "content_block_start", "index": index, "content_block": _block(part, "")}
            elif step == "add":
                kind, name = _DELTAS[part.kind]
                yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: part.text}}
            else:
                yield {"type": "content_block_stop", "index": index}
        yield {"type": "message_delta", "delta": _stop_reason(answers), "usage": _usage(answers)}
        yield {"type": "message_stop"}

    @staticmethod
    def failed(failure: RequestError) -> dict[str, Any]:
        kind = _KINDS.get(failure.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": failure.message}}

    def _message(self, answers: Answers, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"msg_{answers.id}", "type": "message", "role": "assistant", "model": self.model}
        return head | {"content": content, "usage": _usage(answers)} | _stop_reason(answers)


def _block(part: Part, text: str) -> dict[str, Any]:
    """Return a block of content that holds `text`. Arguments that are cut, and so no JSON, are left out."""
    if part.kind == "thought":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if part.call is None:
        return {"type": "text", "text": text}
    try:
        given = read_json(text or "{}")
    except (ValueError, RecursionError):
        given = {}
    return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": given}


def _stop_reason(answers: Answers) -> dict[str, str | None]:
    [choice] = answers.choices
    found = choice.stops.found if choice.finish else None
    called = any(part.call is not None for part in choice.parts)
    reason = {None: None, "length": "max_tokens", "stop": "tool_use" if called else "end_turn"}[choice.finish]
    return {"stop_reason": "stop_sequence" if found else reason, "stop_sequence": found}


def _usage(answers: Answers) -> dict[str, int]:
    usage = usage_of(answers)
    cached = usage["prompt_tokens_details"]["cached_tokens"]  # Anthropic does not count them as input tokens
    return {
        "input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0, "output_tokens": usage["completion_tokens"],
    }  # fmt: skip
