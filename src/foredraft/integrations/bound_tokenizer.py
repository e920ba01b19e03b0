"""The tokenizer of a model that was loaded elsewhere, to check tables and stores against.

Does not depend on the drafting method.
"""

from collections.abc import Mapping
from typing import Any

from foredraft.errors import UsageError
from foredraft.model.loading import load_tokenizer
from foredraft.model.text_part import text_tokenizer
from foredraft.options import shown


def tokenizer_for(name: str, given: Any, options: Mapping[str, Any]) -> Any | None:
    """Return the tokenizer `given`, an object or a name; else that of `name`, where the model was loaded from, or None.

    UsageError if the given one cannot be loaded, or there is none and one of the drafting method's `options` names a
    file that is bound to a tokenizer.
    """
    if given is not None:
        if not isinstance(given, str) and not callable(getattr(given, "decode", None)):
            raise UsageError(f"The option tokenizer is {shown(given)}; give a tokenizer or the name of one.")
        return load_tokenizer(given) if isinstance(given, str) else text_tokenizer(given)
    problem = "it was not loaded from a folder or the hub."
    if name:
        try:
            return load_tokenizer(name)
        except UsageError as error:
            problem = str(error)
    for key in ("table", "store"):
        if options.get(key) not in (None, "default", "none"):
            raise UsageError(
                f"{key} is bound to a tokenizer, and the model's is not found ({problem}) Give it as the option "
                "tokenizer, or load the model from a folder that has it."
            )
    return None


def refuse_memory(options: Mapping[str, Any]) -> None:
    """Raise UsageError for a method's option `memory`, which nobody would save where another library runs the model."""
    if options.get("memory") is not None:
        raise UsageError(
            f"memory is {shown(options['memory'])}, and is only written by `save` of a generator from foredraft.load; "
            "give its folder as the option store, which is read."
        )
