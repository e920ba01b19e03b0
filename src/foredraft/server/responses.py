"""OpenAI's `/v1/responses` protocol; nothing is stored, so a request contains the whole conversation.

Does not depend on how answers are generated.
"""

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, PrivateAttr, Tag, model_validator

from foredraft.server import bodies
from foredraft.server.answers import Answers
from foredraft.server.bodies import (
    Body,
    Content,
    FunctionTool,
    Many,
    Shape,
    Some,
    TextRequest,
    Tools,
    text_of,
    with_parts,
)
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
    arguments: str


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


class _Tool(FunctionTool):
    type: Literal["function"]


class _Format(JsonSchema):
    type: Literal["text", "json_object", "json_schema"] = "text"

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise ValueError("type json_schema needs schema, and no other takes it")
        return self

    @property
    def shape(self) -> Shape | None:
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
    input: str | Some[_GivenItem]
    instructions: str | None = None
    max_output_tokens: PositiveInt | None = None
    text: _Text = _Text()
    reasoning: _Reasoning = _Reasoning()
    tools: Many[_Tool] = Field(default_factory=list)
    tool_choice: bodies.ToolChoice = bodies.Choice()
    parallel_tool_calls: bool = True
    metadata: Annotated[dict[str, str | None], bodies.at_most(bodies.MOST_METADATA)] | None = None
    _tools: Tools = PrivateAttr(default_factory=Tools)

    @model_validator(mode="after")
    def _tools_are_there(self) -> Self:
        self._tools = Tools.of(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)
        return self

    def text_request(self) -> TextRequest:
        given = [ResponsesItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        options, shape = self.options(self.max_output_tokens), self.text.format.shape
        variables = self.variables(self.reasoning.effort)
        return TextRequest(
            [[*first, *_messages(given)]], options, self._tools, variables, shape=shape, speculative=self.speculative
        )

    async def events(self, answers: Answers) -> AsyncIterator[dict[str, Any]]:
        numbers = itertools.count()

        def numbered(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
            return {"type": f"response.{kind}", "sequence_number": next(numbers)} | fields

        for kind in ("created", "in_progress"):
            yield numbered(kind, {"response": self._response("in_progress", [])})
        number, before, text = -1, Part("text", []), ""
        async for begins, part in answers.parts():
            if begins:
                for each in self._closing(number, before, text) if number >= 0 else ():
                    yield numbered(*each)
                number, before, text = number + 1, part, ""
                for each in self._opening(number, part):
                    yield numbered(*each)
            if part.text:
                text += part.text
                yield numbered(f"{_NAMES[part.kind]}.delta", self._place(number, part) | {"delta": part.text})
        finished = self.whole(answers)
        for each in self._closing(number, before, text, finished["output"][number]):
            yield numbered(*each)
        yield numbered(finished["status"], {"response": finished})

    def _opening(self, number: int, part: Part) -> Iterator[_Event]:
        """Yield the events, without their numbers, that begin an item of the output."""
        yield "output_item.added", {"output_index": number, "item": self._item(number, part, None, "in_progress")}
        if part.call is None:
            yield "content_part.added", self._place(number, part, logprobs=False) | {"part": _content(part, "")}

    def _closing(self, number: int, part: Part, text: str, item: dict[str, Any] | None = None) -> Iterator[_Event]:
        """Yield the events that end an item."""
        if part.call is None:
            yield f"{_NAMES[part.kind]}.done", self._place(number, part) | {"text": text}
            yield "content_part.done", self._place(number, part, logprobs=False) | {"part": _content(part, text)}
        else:
            yield f"{_NAMES[part.kind]}.done", self._place(number, part) | {"name": part.call.name, "arguments": text}
        yield "output_item.done", {"output_index": number, "item": item or self._item(number, part, text, "completed")}

    def _place(self, number: int, part: Part, *, logprobs: bool = True) -> dict[str, Any]:
        place: dict[str, Any] = {"output_index": number, "item_id": self._item(number, part, None, "")["id"]}
        place |= {"content_index": 0} if part.call is None else {}
        return place | ({"logprobs": []} if part.kind == "text" and logprobs else {})

    @staticmethod
    def failed(failure: RequestError) -> dict[str, Any]:
        return {"type": "error", "code": failure.code, "message": failure.message, "param": failure.param}

    def whole(self, answers: Answers) -> dict[str, Any]:
        [choice] = answers.choices
        status = "incomplete" if choice.finish == "length" else "completed"
        usage, blocks = usage_of(answers), choice.blocks or [Part("text", [])]
        statuses = ["completed"] * (len(blocks) - 1) + [status]
        items = [self._item(number, part, part.text, statuses[number]) for number, part in enumerate(blocks)]
        return self._response(status, items) | {
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
                "total_tokens": usage["total_tokens"],
            },
            "metrics": drafting_of(answers.records),
        }  # fmt: skip

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"resp_{self._id}", "object": "response", "created_at": self._created, "model": self.model,
            "status": status, "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output, "usage": None, "instructions": self.instructions, "metadata": self.metadata or {},
            "temperature": self.temperature, "top_p": self.top_p, "max_output_tokens": self.max_output_tokens,
            "tools": [{"strict": None, "parameters": None} | each.model_dump() for each in self.tools],
            "tool_choice": self.tool_choice.given, "parallel_tool_calls": self.parallel_tool_calls, "error": None,
            "previous_response_id": None, "store": False, "truncation": "disabled",
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "text": self.text.model_dump(by_alias=True, exclude_none=True),
        }  # fmt: skip

    def _item(self, number: int, part: Part, text: str | None, status: str) -> dict[str, Any]:
        """Return an item of the output; `text` is None if nothing was written yet."""
        content = [] if text is None else [_content(part, text)]
        if part.call is not None:
            return {"id": f"fc_{self._id}_{number}", "type": "function_call", "call_id": part.call.id,
                    "name": part.call.name, "arguments": text or "", "status": status}  # fmt: skip
        if part.kind == "thought":
            head = {"id": f"rs_{self._id}_{number}", "type": "reasoning", "summary": []}
            return head | {"content": content, "status": status}
        head = {"id": f"msg_{self._id}_{number}", "type": "message", "role": "assistant"}
        return head | {"content": content, "status": status}


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
            messages.append(with_parts(item.for_template(), thought if item.role == "assistant" else None, []))
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            with_parts(messages[-1], thought, [(item.call_id, item.name, item.arguments)])
        thought = ""
    return messages
