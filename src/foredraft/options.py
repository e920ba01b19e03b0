"""Frozen dataclasses of options from loose mappings: unknown keys are refused with the nearest known one.

Does not know what any option means; each dataclass is owned by the file that uses it and validates its own values.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from foredraft.errors import UsageError

T = TypeVar("T")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint such as `` Did you mean 'top_p'?`` for a misspelt word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def options_from(kind: type[T], given: Mapping[str, Any], what: str) -> T:
    """Build the frozen dataclass `kind` from `given`.

    Args:
        kind: a dataclass; its `__post_init__` validates values and raises `UsageError`.
        given: option name to value.
        what: what the options belong to, for the message, such as ``method 'adaptix'``.

    Raises:
        UsageError: an unknown key (with a near-match hint), or a value the dataclass refuses.
    """
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # T is a dataclass by contract
    for key in given:
        if key not in known:
            raise UsageError(
                f"{what} has no option {key!r}.{nearest(key, known)} Its options are: {', '.join(known) or 'none'}."
            )
    return kind(**given)
