"""OpenAI's `/v1/responses` protocol; nothing is stored, so a request contains the whole conversation.

Does not depend on how answers are generated.
"""

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, PrivateAttr, Tag, model_validator

from foredraft.server import bodies
from foredraft.server.answers import Answers
from foredraft.server.bodies import Body, Content, text_of, with_parts
from foredraft.server.metrics import drafting_of
from foredraft.server.openai import JsonSchema, usage_of
from foredraft.server.parts import Part
from foredraft.server.replies import RequestError

_Event = tuple[str, dict[str, Any]]  # a type, and its fields
_NAMES = {"text": "output_text", "thought": "reasoning_text", "call": "function_call_arguments"}  # of events


class ResponsesItem(bodies.Turn):
    """A message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    type: Literal["message"] = "message"


class _CallItem(Body):
    within = "message"
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: bodies.Arguments


class _ResultItem(Body):
    within = "message"
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class _ThoughtItem(Body):
    within = "message"
    type: Literal["reasoning"]
    content: Content | None = None
    summary: Content = ""
    encrypted_content: str | None = None  # another server's


_Item = _CallItem | _ResultItem | _ThoughtItem | ResponsesItem
_GivenItem = Annotated[
    Annotated[_CallItem, Tag("function_call")] | Annotated[_ResultItem, Tag("function_call_output")]
    | Annotated[_ThoughtItem, Tag("reasoning")] | Annotated[ResponsesItem, Tag("message")],
    bodies.by_type("message", "function_call", "function_call_output", "reasoning"),
]  # fmt: skip


class _Tool(bodies.FunctionTool):
    type: Literal["function"]


class _Format(JsonSchema):
    type: Literal["text", "json_object", "json_schema"] = "text"

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise ValueError("type json_schema needs schema, and no other takes it")
        return self

    @property
    def shape(self) -> bodies.Shape | None:
        return {"text": None, "json_object": {"type": "object"}, "json_schema": self.schema_}[self.type]


class _Text(Body):
    within = "responses.text"
    format: _Format = _Format()


class _Reasoning(Body):
    within = "responses.reasoning"
    effort: str | None = None


class ResponsesRequest(bodies.ConversationRequest):
    """`/v1/responses`."""

    within = "responses"
    input: str | bodies.Some[_GivenItem]
    instructions: str | None = None
    max_output_tokens: PositiveInt | None = None
    text: _Text = _Text()
    reasoning: _Reasoning = _Reasoning()
    tools: bodies.Many[_Tool] = Field(default_factory=list)
    _numbers: Iterator[int] = PrivateAttr(default_factory=itertools.count)  # of the events of a stream
    metadata: dict[str, Any] | None = None

    def text_request(self) -> bodies.TextRequest:
        given = [ResponsesItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return bodies.TextRequest(
            [[*first, *_messages(given)]], self.options(self.max_output_tokens), self._tools,
            self.variables(self.reasoning.effort), shape=self.text.format.shape, speculative=self.speculative,
        )  # fmt: skip

    async def events(self, answers: Answers) -> AsyncIterator[dict[str, Any]]:
        def numbered(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
            return {"type": f"response.{kind}", "sequence_number": next(self._numbers)} | fields

        for kind in ("created", "in_progress"):
            yield numbered(kind, {"response": self._response(answers, "in_progress", [])})
        async for step, number, part in answers.blocks():
            for each in _block_events(answers, step, number, part):
                yield numbered(*each)
        finished = self.whole(answers)
        yield numbered(finished["status"], {"response": finished})

    def failed(self, failure: RequestError) -> dict[str, Any]:  # type: ignore[override]  # others need no number
        told = {"code": failure.code, "message": failure.message, "param": failure.param}
        return {"type": "error", "sequence_number": next(self._numbers)} | told

    def whole(self, answers: Answers) -> dict[str, Any]:
        usage = usage_of(answers)
        items = [_item(answers, number, part) for number, part in enumerate(answers.content)]
        return self._response(answers, items[-1]["status"], items) | {
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
                "total_tokens": usage["total_tokens"],
            },
            "metrics": drafting_of(answers.records),
        }  # fmt: skip

    def _response(self, answers: Answers, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"resp_{answers.id}", "object": "response", "created_at": answers.created, "model": self.model,
            "status": status, "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output, "usage": None, "instructions": self.instructions, "metadata": self.metadata or {},
            "temperature": self.temperature, "top_p": self.top_p, "max_output_tokens": self.max_output_tokens,
            "tools": [{"strict": None, "parameters": None} | each.model_dump() for each in self.tools],
            "tool_choice": self.tool_choice.given, "parallel_tool_calls": self.parallel_tool_calls, "error": None,
            "previous_response_id": None, "store": False, "truncation": "disabled",
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "text": self.text.model_dump(by_alias=True, exclude_none=True),
        }  # fmt: skip


def _block_events(answers: Answers, step: str, number: int, part: Part) -> Iterator[_Event]:
    """Yield the events, without their numbers, of a step of a block of the answer."""
    item = _item(answers, number, part, begun=step == "begin")
    place: dict[str, Any] = {"output_index": number, "item_id": item["id"]}
    place |= {"content_index": 0} if part.call is None else {}
    logprobs: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
    name = _NAMES[part.kind]
    if step == "begin":
        yield "output_item.added", {"output_index": number, "item": item}
        if part.call is None:
            yield "content_part.added", place | {"part": _content(part, "")}
    elif step == "add":
        yield f"{name}.delta", place | logprobs | {"delta": part.text}
    elif part.call is None:
        yield f"{name}.done", place | logprobs | {"text": part.text}
        yield "content_part.done", place | {"part": _content(part, part.text)}
    else:
        yield f"{name}.done", place | {"name": part.call.name, "arguments": part.text}
    if step == "end":
        yield "output_item.done", {"output_index": number, "item": item}


def _item(answers: Answers, number: int, part: Part, *, begun: bool = False) -> dict[str, Any]:
    """Return an item of the output: a whole block, or one that has just begun."""
    is_cut = answers.choices[0].finish == "length" and number + 1 == len(answers.content)
    status = "in_progress" if begun else "incomplete" if is_cut else "completed"
    if part.call is not None:
        return {"id": f"fc_{answers.id}_{number}", "type": "function_call", "call_id": part.call.id,
                "name": part.call.name, "arguments": "" if begun else part.text, "status": status}  # fmt: skip
    head = (
        {"id": f"rs_{answers.id}_{number}", "type": "reasoning", "summary": []}
        if part.kind == "thought"
        else {"id": f"msg_{answers.id}_{number}", "type": "message", "role": "assistant"}
    )
    return head | {"content": [] if begun else [_content(part, part.text)], "status": status}


def _content(part: Part, text: str) -> dict[str, Any]:
    if part.kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _messages(items: Sequence[_Item]) -> list[dict[str, Any]]:
    """Return the messages of items for chat templates, in which an answer's thought and calls are of one message."""
    messages: list[dict[str, Any]] = []
    thought = ""
    for item in items:
        if isinstance(item, _ThoughtItem):
            thought = text_of(item.content) or text_of(item.summary)
            continue
        if isinstance(item, _ResultItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        elif isinstance(item, ResponsesItem):
            if thought and item.role != "assistant":  # an answer that was cut before it said anything
                messages.append(with_parts({"role": "assistant", "content": ""}, thought, []))
            messages.append(with_parts(item.for_template(), thought if item.role == "assistant" else None, []))
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            with_parts(messages[-1], thought, [(item.call_id, item.name, item.arguments)])
        thought = ""
    return messages
