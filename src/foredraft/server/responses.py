"""OpenAI's `/v1/responses` protocol, text only; nothing is stored, so a request contains the whole conversation.

Does not depend on how answers are generated.
"""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from foredraft.server.bodies import ResponsesRequest, text_of
from foredraft.server.metrics import drafting_of
from foredraft.server.openai import generation_options, usage_of
from foredraft.server.replies import RequestError, event
from foredraft.server.service import Answers, TextRequest


class ResponseShape:
    """A request of `/v1/responses`, and the format of its answer."""

    def __init__(self, body: ResponsesRequest, model: str, _tokenizer: Any) -> None:
        self._body = body
        self._item = f"msg_{uuid.uuid4().hex}"
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": model,
            "instructions": body.instructions, "metadata": body.metadata or {}, "temperature": body.temperature,
            "top_p": body.top_p, "max_output_tokens": body.max_output_tokens, "tools": [], "tool_choice": "none",
            "parallel_tool_calls": False, "error": None, "previous_response_id": None, "store": False,
            "text": body.text.model_dump(by_alias=True, exclude_none=True),
        }  # fmt: skip

    def text_request(self) -> TextRequest:
        """Translate the body."""
        body, format_ = self._body, self._body.text.format
        items = [("user", body.input)] if isinstance(body.input, str) else [(i.role, i.content) for i in body.input]
        if body.instructions is not None:
            items = [("system", body.instructions), *items]
        messages = [
            {"role": "system" if role == "developer" else role, "content": text_of(each)} for role, each in items
        ]
        options = generation_options(body, body.max_output_tokens)
        shape = None if format_.type == "text" else (format_.type, format_.schema_ or {})
        return TextRequest([messages], options, shape=shape, speculative=body.speculative)

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """Return the complete answer."""
        [delta] = await answers.whole()
        return self._finished(answers, delta.text)

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        """Yield the answer as a stream of events."""
        number = 0

        def numbered(kind: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number - 1} | fields, kind)

        place = {"output_index": 0, "item_id": self._item, "content_index": 0}
        begun = self._head | {"status": "in_progress", "output": [], "incomplete_details": None, "usage": None}
        yield numbered("response.created", response=begun)
        yield numbered("response.in_progress", response=begun)
        yield numbered("response.output_item.added", output_index=0, item=self._message("", "in_progress"))
        yield numbered("response.content_part.added", part=_part(""), **place)
        text = ""
        async for _, delta in answers.deltas():
            if delta.text:
                text += delta.text
                yield numbered("response.output_text.delta", delta=delta.text, logprobs=[], **place)
        finished = self._finished(answers, text)
        yield numbered("response.output_text.done", text=text, logprobs=[], **place)
        yield numbered("response.content_part.done", part=_part(text), **place)
        yield numbered("response.output_item.done", output_index=0, item=finished["output"][0])
        yield numbered(f"response.{finished['status']}", response=finished)

    def failed(self, failure: RequestError) -> bytes:
        """Return the event that ends a failed stream."""
        return event(
            {"type": "error", "code": failure.code, "message": failure.message, "param": failure.param}, "error"
        )

    def _finished(self, answers: Answers, text: str) -> dict[str, Any]:
        is_complete = answers.choices[0].finish != "length"
        status = "completed" if is_complete else "incomplete"
        usage = usage_of(answers)
        return self._head | {
            "status": status,
            "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
            "output": [self._message(text, status)],
            "usage": {
                "input_tokens": usage["prompt_tokens"], "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            "metrics": drafting_of(answers.choices),
        }  # fmt: skip

    def _message(self, text: str, status: str) -> dict[str, Any]:
        content = [_part(text)] if text or status != "in_progress" else []
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
