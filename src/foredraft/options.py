"""Builds frozen dataclasses of options from mappings, and rejects unknown keys and values of the wrong type.

Does not depend on any option; each dataclass lives in the module that uses it and validates its own values.
"""

import dataclasses
import difflib
import json
import math
import numbers
import operator
import os
import reprlib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from foredraft.errors import UsageError, told

T = TypeVar("T")

_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = _shorten.maxlong = 60


@dataclasses.dataclass(frozen=True, slots=True)
class NoOptions:
    """For what has no options."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint such as `` Did you mean 'top_p'?`` for a misspelt word, or an empty string."""
    known = list(known)
    longer = [each for each in known if len(word) > 2 and each.startswith(word)]  # for abbreviations: stop, max_new
    close = longer or difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_known(word: Any, known: Iterable[str], what: str, listed: str) -> None:
    """Raise UsageError unless `word` is one of `known`; `what` and `listed` begin the sentences of its message.

    Such as ``There is no method 'rst'. Did you mean 'rest'? Methods are: none, rest.``
    """
    known = list(known)
    if word not in known:
        hint = nearest(word, known) if isinstance(word, str) else ""
        raise UsageError(
            f"{what} {shown(word)}.{hint} " + (f"{listed}: {', '.join(known)}." if known else "There are none.")
        )


def check_range(
    options: Any, *names: str, least: float = -math.inf, most: float = math.inf, above: float = -math.inf
) -> None:
    """Raise UsageError for the first of these attributes that is not finite, or not from `least` or `above` to `most`.

    All limits but `above` are included.
    """
    for name in names:
        value = getattr(options, name)
        if least <= value <= most and above < value < math.inf:
            continue
        if above > -math.inf:
            wanted = f"above {above}" if most == math.inf else f"above {above} and at most {most}"
        else:
            wanted = f"at least {least}" if most == math.inf else f"{least} to {most}"
        raise UsageError(f"{name} is {value}; it must be {'a finite number, ' * (value == math.inf)}{wanted}.")


def shown(value: Any) -> str:
    """Return the representation of a value for a message, shortened if it is long."""
    return _shorten.repr(value)


def user_path(named: str | os.PathLike[str]) -> Path:
    """Return the path that a user named, with `~` expanded; UsageError if there can be none of this name."""
    if not os.fspath(named):
        raise UsageError("The name of a folder or file is empty; give one.")
    try:
        path = Path(named).expanduser()
        path.exists()  # raises for a name that is too long
    except (OSError, RuntimeError) as error:  # the latter for a user without a home folder
        raise UsageError(f"There is no folder or file {named} ({told(error).rstrip('.')}); give another.") from error
    return path


def whole_number(value: Any) -> int | None:
    """Return an integer, including numpy's, as int; None for other types, including bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return operator.index(value)


def json_object(text: str, what: str) -> dict[str, Any]:
    """Return the JSON object in a text; UsageError, whose sentence begins with `what`, if there is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f'{what} is not JSON ({error}); give an object such as {{"table": "none"}}.') from error
    if not isinstance(found, dict):
        raise UsageError(f'{what} is {shown(found)}; give a JSON object such as {{"table": "none"}}.')
    return found


def options_from(kind: type[T], given: Any, what: str) -> T:
    """Build the frozen dataclass `kind` from `given`, a mapping of option name to value.

    Numpy numbers become Python numbers, and paths become strings. `what` names the owner of the options in messages,
    such as ``Method 'adaptix'``. UsageError for an unknown or missing key, or a value that is of the wrong type or that
    `kind` rejects.
    """
    owner = what[:1].lower() + what[1:]
    if not isinstance(given, Mapping):
        raise UsageError(f"The options of {owner} are {shown(given)}; give a mapping of their names to values.")
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]  # T is a dataclass by contract
    known = [field.name for field in fields]
    for key in given:
        check_known(key, known, f"{what} has no option", "Its options are")
    for field in fields:
        if field.name not in given and field.default is field.default_factory is dataclasses.MISSING:
            raise UsageError(f"{what} needs the option {field.name!r}; give it.")
    hints = get_type_hints(kind)
    return kind(**{name: _typed(hints[name], value, f"{name} of {owner}") for name, value in given.items()})


def _typed(hint: Any, value: Any, name: str) -> Any:
    """Convert a value to a field's type; only plain types and string choices are checked."""
    kinds = list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]
    optional = types.NoneType in kinds
    if optional:
        kinds.remove(types.NoneType)
        if value is None:
            return None
    kind = kinds[0] if len(kinds) == 1 else None
    choices = [choice for choice in get_args(kind) if isinstance(choice, str)] if get_origin(kind) is Literal else []
    if kind in (int, float, bool, str):
        typed, wanted = _plain(kind, value)
    elif choices:
        typed, wanted = (value if value in choices else None), f"one of {', '.join(choices)}"
    else:
        return value
    if typed is None:
        raise UsageError(f"{name} is {shown(value)}; it must be {wanted}{', or None' if optional else ''}.")
    return typed


def _plain(kind: Any, value: Any) -> tuple[Any, str]:
    """Return the value as the plain type `kind`, or None if it has another type, and a description of the type."""
    if kind is int:
        return whole_number(value), "a whole number"
    if kind is bool:
        return (value if isinstance(value, bool) else None), "True or False"
    if kind is str:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        return (text if isinstance(text, str) else None), "a text"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None, "a number"
    try:
        number = float(value)
    except OverflowError:
        number = math.nan
    return (None if math.isnan(number) else number), "a number that float64 can hold"
