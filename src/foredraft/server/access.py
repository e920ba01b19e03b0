"""The access log: one line for each request, with its status, its seconds and, if it wrote, its tokens.

Does not depend on routes or on the format of answers.
"""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.engine.statistics import summarize
from foredraft.server.answers import Answers

LOG = logging.getLogger("foredraft.access")


class AccessLog:
    """An ASGI application that logs each request of another one at level INFO."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, state = time.monotonic(), 0, scope.setdefault("state", {})

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            path = scope["path"].encode("unicode_escape").decode()  # a line break must not begin a line of the log
            written = state.get("written", "")
            LOG.info("%s %s %d %.2f s%s", scope["method"], path, status, time.monotonic() - began, written)


def written(name: str, answers: Answers) -> str:
    """Return what the log says of the answers to the request `name`."""
    total = summarize(answers.records, 0.0)
    return (
        f" {name} {answers.prompt_tokens} prompt tokens ({answers.cached_tokens} cached), {total.emitted} written, "
        f"{total.tokens_per_target_step:.2f} a step"
    )
