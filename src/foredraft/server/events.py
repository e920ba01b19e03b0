"""Server-sent events: how an answer is streamed, and how a stream ends when something goes wrong.

Knows bytes; not what they say.
"""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from foredraft.server.failures import RequestError, failure_of
from foredraft.server.service import Answers, Service

DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str | None = None) -> bytes:
    """Return one event; `name` is its type where the protocol has one."""
    body = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {body}\n\n".encode() if name else f"data: {body}\n\n".encode()


def streamed(
    service: Service, answers: Answers, events: AsyncIterator[bytes], failed: Callable[[RequestError], bytes]
) -> StreamingResponse:
    """Return a response that sends events as they come, and stops the writing when nobody reads any more."""

    async def sent() -> AsyncIterator[bytes]:
        try:
            async for each in events:
                yield each
        except Exception as error:  # noqa: BLE001  # the response has begun: all that is left is to tell
            yield failed(failure_of(error))

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return _AnswerStream(service, answers, sent(), media_type="text/event-stream", headers=headers)


class _AnswerStream(StreamingResponse):
    """A response that lets its answers go when it ends, also where its client went before the first event."""

    def __init__(self, service: Service, answers: Answers, events: AsyncIterator[bytes], **options: Any) -> None:
        super().__init__(events, **options)
        self._service, self._answers = service, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.attending(self._answers):
            await super().__call__(scope, receive, send)
