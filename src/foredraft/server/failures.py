"""What goes wrong, as a status and a sentence: no traceback, and no path of this machine.

Knows exceptions; each protocol words the failure in its own shape.
"""

import logging
from dataclasses import dataclass

from pydantic import ValidationError

from foredraft.errors import ForedraftError, OutOfMemoryError, UsageError
from foredraft.server.writer import BusyError, StoppingError

_LOG = logging.getLogger("foredraft.server")
RETRY_SECONDS = 2
_UNTOLD = "Something went wrong in the server; its log tells what."


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


def failure_of(error: Exception) -> RequestError:
    """Return what is told of an exception."""
    message = str(error)
    match error:
        case RequestError():
            failure = error
        case ValidationError():
            failure = _of_body(error)
        case UsageError():
            failure = RequestError(400, message, code="context_length_exceeded" if "window" in message else None)
        case StoppingError():
            failure = RequestError(503, message, "rate_limit_error", code="overloaded")
        case BusyError():
            failure = RequestError(429, message, "rate_limit_error", code="overloaded")
        case OutOfMemoryError():
            failure = RequestError(503, message, "rate_limit_error", code="out_of_memory")
        case TimeoutError():
            late = "The answer took longer than this server allows; ask for fewer tokens."
            failure = RequestError(504, late, "timeout_error")
        case _:
            _LOG.error("A request failed.", exc_info=error)  # here, and not in the answer
            known = isinstance(error, ForedraftError) and "/" not in message  # which may be a path
            failure = RequestError(500, message if known else _UNTOLD, "server_error")
    return failure


def _of_body(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(each)[:80] for each in first["loc"]) or None
    if first["type"] == "extra_forbidden":
        return RequestError(
            400, f"This server has no field {place!r} here; leave it out.", param=place, code="unknown_field"
        )
    message = first["msg"].removeprefix("Value error, ")
    return RequestError(400, f"{place}: {message}." if place else f"{message}.", param=place)
