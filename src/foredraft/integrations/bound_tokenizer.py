"""The tokenizer of a model that was loaded elsewhere, to check tables and stores against.

Does not depend on the drafting method.
"""

from collections.abc import Mapping
from typing import Any

from foredraft.errors import UsageError
from foredraft.model.loading import load_tokenizer

_BOUND = ("table", "store", "memory")
"""Options that name a file bound to one tokenizer."""


def tokenizer_for(name: str, given: Any, options: Mapping[str, Any]) -> Any | None:
    """Return the tokenizer `given`, an object or a name; else the one where the model was loaded from, or None.

    Args:
        name: the folder or hub id that the model was loaded from; empty if unknown.
        given: None looks there.
        options: the drafting method's; if one names a bound file, a tokenizer is required.

    Raises:
        UsageError: the named tokenizer cannot be loaded, or a required one is not found.
    """
    if given is not None:
        return load_tokenizer(given) if isinstance(given, str) else given
    problem = "it was not loaded from a folder or the hub."
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
