"""OpenAI's `/v1/responses`, for text: nothing is stored, so a conversation is sent whole.

Knows the protocol; not how answers come about.
"""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from foredraft.server.bodies import ResponsesRequest, text_of
from foredraft.server.metrics import drafting_of
from foredraft.server.openai import generation_options, usage_of
from foredraft.server.replies import RequestError, event
from foredraft.server.service import Answers, Wanted


class ResponseShape:
    """A request of `/v1/responses`, and how its answer looks."""

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

    def wanted(self) -> Wanted:
        """Return what the body wants."""
        body, form = self._body, self._body.text.format
        given = [("user", body.input)] if isinstance(body.input, str) else [(i.role, i.content) for i in body.input]
        if body.instructions is not None:
            given = [("system", body.instructions), *given]
        messages = [
            {"role": "system" if role == "developer" else role, "content": text_of(each)} for role, each in given
        ]
        options = generation_options(body, body.max_output_tokens)
        shape = None if form.type == "text" else (form.type, form.schema_ or {})
        return Wanted([messages], options, shape=shape, speculative=body.speculative)

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """Return the answer in one piece."""
        [grown] = await answers.whole()
        return self._finished(answers, grown.text)

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        """Yield the answer as it grows."""
        number = 0

        def worded(kind: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number - 1} | fields, kind)

        place = {"output_index": 0, "item_id": self._item, "content_index": 0}
        begun = self._head | {"status": "in_progress", "output": [], "incomplete_details": None, "usage": None}
        yield worded("response.created", response=begun)
        yield worded("response.in_progress", response=begun)
        yield worded("response.output_item.added", output_index=0, item=self._message("", "in_progress"))
        yield worded("response.content_part.added", part=_part(""), **place)
        text = ""
        async for _, delta in answers.deltas():
            if delta.text:
                text += delta.text
                yield worded("response.output_text.delta", delta=delta.text, logprobs=[], **place)
        finished = self._finished(answers, text)
        yield worded("response.output_text.done", text=text, logprobs=[], **place)
        yield worded("response.content_part.done", part=_part(text), **place)
        yield worded("response.output_item.done", output_index=0, item=finished["output"][0])
        yield worded(f"response.{finished['status']}", response=finished)

    def failed(self, failure: RequestError) -> bytes:
        """Return the event that ends a stream in which something went wrong."""
        return event(
            {"type": "error", "code": failure.code, "message": failure.message, "param": failure.param}, "error"
        )

    def _finished(self, answers: Answers, text: str) -> dict[str, Any]:
        whole = answers.choices[0].finish != "length"
        status = "completed" if whole else "incomplete"
        counted = usage_of(answers)
        return self._head | {
            "status": status,
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": [self._message(text, status)],
            "usage": {
                "input_tokens": counted["prompt_tokens"], "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": counted["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counted["total_tokens"],
            },
            "metrics": drafting_of(answers.choices),
        }  # fmt: skip

    def _message(self, text: str, status: str) -> dict[str, Any]:
        content = [_part(text)] if text or status != "in_progress" else []
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
