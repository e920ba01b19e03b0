"""One column of a comparison: a method with its options, its draft length, and its memory between texts.

Does not depend on prompts, timing or results.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from foredraft.api import Generator
from foredraft.contracts import Verification
from foredraft.drafters import method_names
from foredraft.errors import UsageError
from foredraft.options import nearest
from foredraft.speculation import checked_verification, pop_amount

BASE = "none"
PEER = "transformers"
"""A pseudo-method, "the peer", that runs transformers' `generate`; its options are that function's arguments."""

Memory = Literal["", "cold", "warm"]
"""For a method that shares what it learns between texts: reset before each, or has read the task's earlier ones."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method and its options."""

    label: str  # its name in the report
    name: str  # the method, or `transformers` for the peer
    options: Mapping[str, Any] = field(default_factory=dict)
    amount: Mapping[str, Any] = field(default_factory=dict)  # `nodes`, `control`, `control_options` of `Generator.use`
    verification: Verification = "matched"  # under rejection, sampled texts differ from plain decoding's
    memory: Memory = ""


def parse_method(text: str) -> Method:
    """Parse `NAME` or `NAME:{"option": value, ...}`; UsageError for options that are not JSON, or an invalid one.

    They may include `num_speculative_tokens`, `control`, `control_options` and `verification`.
    """
    name, _, rest = text.partition(":")
    try:
        options = json.loads(rest or "{}")
    except ValueError as error:
        raise UsageError(f"The options of {name!r} are not JSON ({error}): {rest}") from error
    if not isinstance(options, dict):
        raise UsageError(f'The options of {name!r} must be a JSON object such as {{"num_speculative_tokens": 16}}.')
    if name == PEER:
        return Method(text, name, options)
    amount, verification = pop_amount(options), checked_verification(options.pop("verification", None))
    return Method(text, name, options, amount, verification)


def chosen_methods(texts: Sequence[str]) -> list[Method]:
    """Parse methods; UsageError for an unknown one, with a near-match hint, and for a duplicate."""
    methods = [parse_method(text) for text in texts]
    names = [*method_names(), PEER]
    for method in methods:
        if method.name not in names:
            raise UsageError(
                f"There is no method {method.name!r}.{nearest(method.name, names)} Methods are: {', '.join(names)}."
            )
        if texts.count(method.label) > 1:
            raise UsageError(f"The method {method.label} is given twice; give each once.")
    return methods


def cold_and_warm(methods: Sequence[Method]) -> list[Method]:
    """Return the methods; each one that shares what it learns between texts appears twice, cold and warm."""
    columns = []
    for method in methods:
        shares = method.options.get("share") is True or method.options.get("learn") == "shared"
        kinds: tuple[Memory, ...] = ("cold", "warm") if shares else ("",)
        columns += [replace(method, label=f"{method.label} {kind}".strip(), memory=kind) for kind in kinds]
    return columns


def use(generator: Generator, method: Method) -> None:
    """Set the generator's method."""
    generator.use(method.name, method.options, **method.amount, verification=method.verification)
