"""Server-sent events, and the HTTP status and message of an exception.

Messages contain no traceback and no local path. Does not depend on a protocol's format.
"""

import json
import logging
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from foredraft.errors import ForedraftError, OutOfMemoryError, PromptTooLongError, UsageError
from foredraft.server.writer import BusyError, StoppingError

_RETRY_SECONDS = 2  # value of the Retry-After header (chosen)
_LOG = logging.getLogger("foredraft.server")
_LATE = "The answer took longer than this server allows; request fewer tokens."
_INTERNAL = "An internal error occurred; see the server's log."


@dataclass(eq=False)
class RequestError(Exception):
    """A failed request: HTTP status, message, and the other fields of OpenAI's errors."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        if self.status in (429, 503):
            return {"Retry-After": str(_RETRY_SECONDS)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def failure_of(error: Exception) -> RequestError:
    """Return the client's view of an exception; unexpected ones are logged."""
    message = str(error)
    match error:
        case RequestError():
            failure = error
        case ValidationError():
            failure = _of_body(error)
        case PromptTooLongError():
            failure = RequestError(400, message, code="context_length_exceeded")
        case UsageError():
            failure = RequestError(400, message)
        case BusyError():
            status = 503 if isinstance(error, StoppingError) else 429
            failure = RequestError(status, message, "rate_limit_error", code="overloaded")
        case OutOfMemoryError():
            failure = RequestError(503, message, "rate_limit_error", code="out_of_memory")
        case TimeoutError():
            failure = RequestError(504, _LATE, "timeout_error")
        case _:
            _LOG.error("A request failed.", exc_info=error)
            is_safe = isinstance(error, ForedraftError) and "/" not in message  # a slash may belong to a path
            failure = RequestError(500, message if is_safe else _INTERNAL, "server_error")
    return failure


def _of_body(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(each)[:80] for each in first["loc"]) or None
    if first["type"] == "extra_forbidden":
        unknown = f"This server has no field {place!r} here; leave it out."
        return RequestError(400, unknown, param=place, code="unknown_field")
    message = first["msg"].removeprefix("Value error, ")
    return RequestError(400, f"{place}: {message}." if place else f"{message}.", param=place)


def event(data: Any, name: str | None = None) -> bytes:
    """Return one event; `name` is its type where the protocol has one."""
    body = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {body}\n\n".encode() if name else f"data: {body}\n\n".encode()
