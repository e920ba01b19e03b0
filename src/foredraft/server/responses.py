"""OpenAI's `/v1/responses` protocol, text only; nothing is stored, so a request contains the whole conversation.

Does not depend on how answers are generated.
"""

import itertools
from collections.abc import AsyncIterator
from typing import Any, Literal, Self

from pydantic import PositiveInt, model_validator

from foredraft.server.answers import Answers
from foredraft.server.bodies import Body, Content, GenerationRequest, Shape, Some, TextRequest, Turn
from foredraft.server.metrics import drafting_of
from foredraft.server.openai import JsonSchema, usage_of
from foredraft.server.replies import RequestError


class ResponsesItem(Turn):
    """A message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


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
    format: _Format = _Format()


class ResponsesRequest(GenerationRequest):
    """`/v1/responses`."""

    input: str | Some[ResponsesItem]
    instructions: str | None = None
    max_output_tokens: PositiveInt | None = None
    text: _Text = _Text()
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    def text_request(self) -> TextRequest:
        given = [ResponsesItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = [item.for_template() for item in given]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        options, shape = self.options(self.max_output_tokens), self.text.format.shape
        return TextRequest([messages], options, shape=shape, speculative=self.speculative)

    async def events(self, answers: Answers) -> AsyncIterator[dict[str, Any]]:
        numbers = itertools.count()

        def numbered(kind: str, **fields: Any) -> dict[str, Any]:
            return {"type": kind, "sequence_number": next(numbers)} | fields

        place = {"output_index": 0, "item_id": f"msg_{self._id}", "content_index": 0}
        begun = self._response("in_progress", [])
        yield numbered("response.created", response=begun)
        yield numbered("response.in_progress", response=begun)
        yield numbered("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield numbered("response.content_part.added", part=_part(""), **place)
        async for _, delta in answers.deltas():
            if delta.text:
                yield numbered("response.output_text.delta", delta=delta.text, logprobs=[], **place)
        finished, text = self.whole(answers), answers.choices[0].text
        yield numbered("response.output_text.done", text=text, logprobs=[], **place)
        yield numbered("response.content_part.done", part=_part(text), **place)
        yield numbered("response.output_item.done", output_index=0, item=finished["output"][0])
        yield numbered(f"response.{finished['status']}", response=finished)

    @staticmethod
    def failed(failure: RequestError) -> dict[str, Any]:
        return {"type": "error", "code": failure.code, "message": failure.message, "param": failure.param}

    def whole(self, answers: Answers) -> dict[str, Any]:
        [choice] = answers.choices
        status = "incomplete" if choice.finish == "length" else "completed"
        usage = usage_of(answers)
        return self._response(status, [self._item(status, [_part(choice.text)])]) | {
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
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
            "tools": [], "tool_choice": "none", "parallel_tool_calls": False, "error": None,
            "previous_response_id": None, "store": False,
            "text": self.text.model_dump(by_alias=True, exclude_none=True),
        }  # fmt: skip

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": f"msg_{self._id}", "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
