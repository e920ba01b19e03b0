"""Anthropic's `/v1/messages` protocol, text only.

Does not depend on how answers are generated.
"""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from foredraft.server import bodies
from foredraft.server.answers import Answers
from foredraft.server.metrics import drafting_of
from foredraft.server.openai import usage_of
from foredraft.server.replies import RequestError

_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class _Message(bodies.Turn):
    role: Literal["user", "assistant"]
    content: bodies.Content


class CountRequest(bodies.Body):
    """`/v1/messages/count_tokens`."""

    model: str | None = None
    messages: bodies.Some[_Message]
    system: bodies.Content | None = None

    def conversation(self) -> list[dict[str, Any]]:
        first = [] if self.system is None else [{"role": "system", "content": bodies.text_of(self.system)}]
        return [*first, *(message.for_template() for message in self.messages)]


class _NoThinking(bodies.Body):
    type: Literal["disabled"]


class MessagesRequest(CountRequest, bodies.GenerationRequest):
    """`/v1/messages`, text only."""

    max_tokens: PositiveInt
    stop_sequences: bodies.Stops = Field(default_factory=list)
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: NonNegativeInt | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    thinking: _NoThinking | None = None

    @model_validator(mode="after")
    def _asks_for_an_answer(self) -> Self:
        if self.messages[-1].role == "assistant":
            raise ValueError("the last message is the assistant's; an answer that is begun cannot be continued")
        return self

    def text_request(self) -> bodies.TextRequest:
        options = self.options(self.max_tokens, top_k=self.top_k) | {"stop_strings": self.stop_sequences}
        return bodies.TextRequest([self.conversation()], options, speculative=self.speculative)

    def whole(self, answers: Answers) -> dict[str, Any]:
        content = {"type": "text", "text": answers.choices[0].text}
        return self._message(answers, [content]) | {"metrics": drafting_of(answers.records)}

    async def events(self, answers: Answers) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "message_start", "message": self._message(answers, [])}
        yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        async for _, delta in answers.deltas():
            if delta.text:
                told = {"type": "text_delta", "text": delta.text}
                yield {"type": "content_block_delta", "index": 0, "delta": told}
        yield {"type": "content_block_stop", "index": 0}
        yield {"type": "message_delta", "delta": _stop_reason(answers), "usage": _usage(answers)}
        yield {"type": "message_stop"}

    @staticmethod
    def failed(failure: RequestError) -> dict[str, Any]:
        kind = _KINDS.get(failure.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": failure.message}}

    def _message(self, answers: Answers, content: list[dict[str, str]]) -> dict[str, Any]:
        head = {"id": f"msg_{self._id}", "type": "message", "role": "assistant", "model": self.model}
        return head | {"content": content, "usage": _usage(answers)} | _stop_reason(answers)


def _stop_reason(answers: Answers) -> dict[str, str | None]:
    [choice] = answers.choices
    found = choice.stops.found if choice.finish else None
    reason = {None: None, "length": "max_tokens", "stop": "end_turn"}[choice.finish]
    return {"stop_reason": "stop_sequence" if found else reason, "stop_sequence": found}


def _usage(answers: Answers) -> dict[str, int]:
    usage = usage_of(answers)
    cached = usage["prompt_tokens_details"]["cached_tokens"]  # Anthropic does not count them as input tokens
    return {
        "input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0, "output_tokens": usage["completion_tokens"],
    }  # fmt: skip
