"""Options of a run as strings: `steps=500` on the command line becomes a field of a dataclass.

Knows fields with defaults. Does not know what they are for.
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

from foredraft.errors import UsageError
from foredraft.options import options_from

T = TypeVar("T")


def named(pairs: Iterable[str]) -> dict[str, str]:
    """Split strings such as `steps=500` at their first equals sign.

    Raises:
        UsageError: a string without one, or a name given twice.
    """
    given: dict[str, str] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise UsageError(f"{pair!r} is not of the form NAME=VALUE.")
        if name in given:
            raise UsageError(f"{name} is given twice. Give it once.")
        given[name] = value
    return given


def assigned(kind: type[T], pairs: Iterable[str], what: str) -> T:
    """Build the options `kind`, whose fields all have defaults, from strings such as `steps=500`.

    Raises:
        UsageError: an unknown name, or a value of the wrong kind.
    """
    types = {field.name: type(field.default) for field in fields(kind)}  # type: ignore[arg-type]  # T is a dataclass
    given = {name: _value(types.get(name, str), name, value) for name, value in named(pairs).items()}
    return options_from(kind, given, what)


def _value(kind: type[Any], name: str, value: str) -> Any:
    """Convert a value, or raise `UsageError`."""
    try:
        return kind(value)
    except ValueError as error:
        raise UsageError(f"{name} is {value!r}, which is no {kind.__name__}.") from error
