"""Tools: told to the model by its chat template, and calls of them found in what it writes.

Knows the calls of Hermes, Qwen and their kin: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.errors import UsageError
from foredraft.request import templated

OPENING = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def worded(messages: Any, tools: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """Return the ids of a conversation that has to do with tools.

    Raises:
        UsageError: a chat template that knows no tools, or calls in a form that is not known here.
    """
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if tools and ("tools" not in template or OPENING not in template):
        raise UsageError(
            "This model's chat template has no tools in a form that is known here (<tool_call>); leave tools out."
        )
    ids: list[int] = tokenizer(templated(messages, tokenizer, tools or None), add_special_tokens=False).input_ids
    return ids


def calls_in(text: str) -> list[dict[str, Any]] | None:
    """Return the calls that a text makes, as OpenAI words them; None where it makes none, or one cannot be read."""
    found = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if not isinstance(name, str):
            return None
        worded_arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        found.append(
            {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function",
             "function": {"name": name, "arguments": worded_arguments}}
        )  # fmt: skip
    return found or None
