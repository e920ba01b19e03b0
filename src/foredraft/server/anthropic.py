"""Anthropic's `/v1/messages` protocol, text only.

Does not depend on how answers are generated.
"""

import uuid
from collections.abc import AsyncIterator
from typing import Any

from foredraft.server.bodies import CountRequest, MessagesRequest, text_of
from foredraft.server.metrics import drafting_of
from foredraft.server.openai import generation_options, usage_of
from foredraft.server.replies import RequestError, event
from foredraft.server.service import Answers, TextRequest

_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def conversation_of(body: MessagesRequest | CountRequest) -> list[dict[str, str]]:
    """Return the messages of a body in the format of chat templates."""
    first = [] if body.system is None else [{"role": "system", "content": text_of(body.system)}]
    return [*first, *({"role": each.role, "content": text_of(each.content)} for each in body.messages)]


def anthropic_error(failure: RequestError) -> dict[str, Any]:
    """Return a failure in Anthropic's format."""
    kind = _KINDS.get(failure.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": failure.message}}


class MessageShape:
    """A request of `/v1/messages`, and the format of its answer."""

    def __init__(self, body: MessagesRequest, model: str, _tokenizer: Any) -> None:
        self._body = body
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}

    def text_request(self) -> TextRequest:
        """Translate the body."""
        body = self._body
        options = generation_options(body, body.max_tokens, top_k=body.top_k)
        return TextRequest([conversation_of(body)], options, stops=body.stop_sequences, speculative=body.speculative)

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """Return the complete answer."""
        [delta] = await answers.whole()
        content = {"content": [{"type": "text", "text": delta.text}]}
        return (
            self._head | _stop_reason(answers) | content | _usage(answers) | {"metrics": drafting_of(answers.choices)}
        )

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        """Yield the answer as a stream of events."""
        message = self._head | {"content": [], "stop_reason": None, "stop_sequence": None} | _usage(answers)
        yield _event("message_start", message=message)
        yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        async for _, delta in answers.deltas():
            if delta.text:
                yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": delta.text})
        yield _event("content_block_stop", index=0)
        yield _event("message_delta", delta=_stop_reason(answers), **_usage(answers))
        yield _event("message_stop")

    def failed(self, failure: RequestError) -> bytes:
        """Return the event that ends a failed stream."""
        return event(anthropic_error(failure), "error")


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind} | fields, kind)


def _stop_reason(answers: Answers) -> dict[str, Any]:
    choice = answers.choices[0]
    if choice.stops.found is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stops.found}
    return {"stop_reason": "max_tokens" if choice.finish == "length" else "end_turn", "stop_sequence": None}


def _usage(answers: Answers) -> dict[str, Any]:
    usage = usage_of(answers)
    return {"usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}}
