"""Server-sent events, and the HTTP status and message of an exception.

Messages contain no traceback and no local path. Does not depend on a protocol's format.
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from foredraft.errors import ForedraftError, OutOfMemoryError, PromptTooLongError, UsageError
from foredraft.server.fields import REFUSED, UNKNOWN
from foredraft.server.writer import BusyError, StoppingError

_RETRY_SECONDS = 2  # value of the Retry-After header (chosen)
_LOG = logging.getLogger("foredraft.server")
_KINDS = (
    (PromptTooLongError, 400, "invalid_request_error", "context_length_exceeded"),
    (UsageError, 400, "invalid_request_error", None),
    (StoppingError, 503, "rate_limit_error", "overloaded"),
    (BusyError, 429, "rate_limit_error", "overloaded"),
    (OutOfMemoryError, 503, "rate_limit_error", "out_of_memory"),
)
"""Exceptions, each before its base class, with the status, type and code of their responses."""


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
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ValidationError):
        return _of_body(error)
    for raised, status, kind, code in _KINDS:
        if isinstance(error, raised):
            return RequestError(status, message, kind, code=code)
    if isinstance(error, TimeoutError):
        message = "The answer took longer than this server allows; request fewer tokens."
        return RequestError(504, message, "timeout_error")
    _LOG.error("A request failed.", exc_info=error)
    if not isinstance(error, ForedraftError) or "/" in message:  # a slash may belong to a path
        message = "An internal error occurred; see the server's log."
    return RequestError(500, message, "server_error")


def _of_body(error: ValidationError) -> RequestError:
    errors = error.errors(include_url=False, include_input=False)
    # of the alternatives of a field, the one that fits furthest; a field that is not honoured is one place further, and
    # of those that fit equally, one with a reason of ours
    own = (UNKNOWN, REFUSED)
    first = max(errors, key=lambda each: (len(each["loc"]) + (each["type"] in own), each["type"] == "value_error"))
    # without the names of the alternatives of a field, which are no fields or items
    named = [each for each in first["loc"] if not re.fullmatch(r"str|int|float|bool|_?[A-Z]\w*|.*\[.*", str(each))]
    message, code = first["msg"].removeprefix("Value error, "), None
    if first["type"] in (UNKNOWN, REFUSED):
        named, code = [*named, first["ctx"]["name"]], first["type"]
    place = ".".join(str(each)[:80] for each in named) or None
    shown = message if code == UNKNOWN or not place else f"{place}: {message}"
    return RequestError(400, f"{shown.rstrip('.?')}.", param=place, code=code)


def written(body: Mapping[str, Any]) -> bytes:
    """Return a body in JSON. Half a surrogate pair, which a model may write, has no bytes in UTF-8, and is escaped."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def sent(event: Mapping[str, Any]) -> bytes:
    """Return an event as it is sent, under the name of its type where the protocol has types."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return b"%sdata: %s\n\n" % (name.encode(), written(event))
