"""The tokenizer of a model that somebody else has loaded: what tables and stores must have been made with.

Knows where a model was loaded from. Does not know which drafter asks.
"""

from collections.abc import Mapping
from typing import Any

from foredraft.errors import UsageError
from foredraft.model.loading import load_tokenizer

_BOUND = ("table", "store", "memory")
"""Options that name a file bound to a tokenizer."""


def tokenizer_for(name: str, given: Any, options: Mapping[str, Any]) -> Any | None:
    """Return the tokenizer `given`, an object or a name, or the one found where the model was loaded from, or None.

    Args:
        name: where the model was loaded from, a folder or a hub id; empty if nowhere.
        given: None looks there.
        options: the drafting method's; a file among them that is bound to a tokenizer needs one.

    Raises:
        UsageError: a name that cannot be loaded, or no tokenizer for a bound file.
    """
    if given is not None:
        return load_tokenizer(given) if isinstance(given, str) else given
    problem = "it was loaded from nowhere."
    if name:
        try:
            return load_tokenizer(name)
        except UsageError as error:
            problem = str(error)
    bound = [key for key in _BOUND if options.get(key) not in (None, "default", "none")]
    if bound:
        raise UsageError(
            f"{bound[0]} is bound to a tokenizer, and the model's is not found ({problem}) Give it as the option "
            "tokenizer, or load the model from a folder that has it."
        )
    return None
