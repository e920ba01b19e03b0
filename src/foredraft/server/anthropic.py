"""Anthropic's `/v1/messages`, for text.

Knows the protocol; not how answers come about.
"""

import uuid
from collections.abc import AsyncIterator
from typing import Any

from foredraft.server.bodies import CountRequest, MessagesRequest, text_of
from foredraft.server.metrics import drafting_of
from foredraft.server.openai import generation_options, usage_of
from foredraft.server.replies import RequestError, event
from foredraft.server.service import Answers, Wanted

_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def conversation_of(body: MessagesRequest | CountRequest) -> list[dict[str, str]]:
    """Return the messages of a body, as chat templates know them."""
    first = [] if body.system is None else [{"role": "system", "content": text_of(body.system)}]
    return [*first, *({"role": each.role, "content": text_of(each.content)} for each in body.messages)]


def anthropic_error(failure: RequestError) -> dict[str, Any]:
    """Return a failure as Anthropic words it."""
    kind = _KINDS.get(failure.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": failure.message}}


class MessageShape:
    """A request of `/v1/messages`, and how its answer looks."""

    def __init__(self, body: MessagesRequest, model: str, _tokenizer: Any) -> None:
        self._body = body
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}

    def wanted(self) -> Wanted:
        """Return what the body wants."""
        body = self._body
        options = generation_options(body, body.max_tokens, top_k=body.top_k)
        return Wanted([conversation_of(body)], options, stops=body.stop_sequences, speculative=body.speculative)

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """Return the answer in one piece."""
        [grown] = await answers.whole()
        said = {"content": [{"type": "text", "text": grown.text}]}
        return self._head | _ended(answers) | said | _usage(answers) | {"metrics": drafting_of(answers.choices)}

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        """Yield the answer as it grows."""
        begun = self._head | {"content": [], "stop_reason": None, "stop_sequence": None} | _usage(answers)
        yield _event("message_start", message=begun)
        yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        async for _, delta in answers.deltas():
            if delta.text:
                yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": delta.text})
        yield _event("content_block_stop", index=0)
        yield _event("message_delta", delta=_ended(answers), **_usage(answers))
        yield _event("message_stop")

    def failed(self, failure: RequestError) -> bytes:
        """Return the event that ends a stream in which something went wrong."""
        return event(anthropic_error(failure), "error")


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind} | fields, kind)


def _ended(answers: Answers) -> dict[str, Any]:
    choice = answers.choices[0]
    if choice.stops.found is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stops.found}
    return {"stop_reason": "max_tokens" if choice.finish == "length" else "end_turn", "stop_sequence": None}


def _usage(answers: Answers) -> dict[str, Any]:
    counted = usage_of(answers)
    return {"usage": {"input_tokens": counted["prompt_tokens"], "output_tokens": counted["completion_tokens"]}}
