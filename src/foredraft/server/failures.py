"""What goes wrong, as a status and a sentence: no traceback, and no path of this machine.

Knows exceptions; each protocol words the failure in its own shape.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from foredraft.errors import ForedraftError, OutOfMemoryError, UsageError
from foredraft.server.writer import BusyError

_LOG = logging.getLogger("foredraft.server")
RETRY_SECONDS = 2


@dataclass(eq=False)
class RequestError(Exception):
    """An answer that could not be given.

    Attributes:
        status: of HTTP.
        message: a sentence.
        kind: OpenAI's `type`, which Anthropic words almost alike.
        param: the field that is wrong, or None.
        code: a word for programs, or None.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What goes with the status."""
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_SECONDS)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def _of_usage(message: str) -> RequestError:
    return RequestError(400, message, code="context_length_exceeded" if "window" in message else None)


def _of_rush(message: str) -> RequestError:
    return RequestError(503 if "stopping" in message else 429, message, "rate_limit_error", code="overloaded")


def _of_memory(message: str) -> RequestError:
    return RequestError(503, message, "rate_limit_error", code="out_of_memory")


def _of_time(_message: str) -> RequestError:
    return RequestError(504, "The answer took longer than this server allows; ask for fewer tokens.", "timeout_error")


_MADE: Mapping[type[Exception], Callable[[str], RequestError]] = {
    BusyError: _of_rush, UsageError: _of_usage, OutOfMemoryError: _of_memory, TimeoutError: _of_time,
}  # fmt: skip


def failure_of(error: Exception) -> RequestError:
    """Return what is told of an exception."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ValidationError):
        return _of_body(error)
    for kind, made in _MADE.items():
        if isinstance(error, kind):
            return made(str(error))
    _LOG.error("A request failed.", exc_info=error)  # here, and not in the answer
    if isinstance(error, ForedraftError) and "/" not in str(error):
        return RequestError(500, str(error), "server_error")
    return RequestError(500, "Something went wrong in the server; its log tells what.", "server_error")


def _of_body(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(each) for each in first["loc"]) or None
    if first["type"] == "extra_forbidden":
        return RequestError(
            400, f"This server has no field {place!r} here; leave it out.", param=place, code="unknown_field"
        )
    message = first["msg"].removeprefix("Value error, ")
    return RequestError(400, f"{place}: {message}." if place else f"{message}.", param=place)
