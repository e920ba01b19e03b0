"""A column of a comparison: a method with its options, how much it drafts, and what it may remember between texts.

Does not know prompts, clocks or results.
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
"""The pseudo-method that runs transformers' own `generate`; its options are that function's arguments."""

Memory = Literal["", "cold", "warm"]


@dataclass(frozen=True, slots=True)
class Method:
    """A method and its options, as a column of the comparison.

    Attributes:
        label: what it is called in the report.
        name: the method, or `transformers` for the peer.
        options: the method's own.
        amount: how much to draft, as `Generator.use` takes it: `nodes`, `control`, `control_options`.
        verification: "matched" or "rejection"; under the latter sampled texts differ from plain decoding's.
        memory: "cold" where it shares what it learns between texts and is measured without having seen any; "warm"
            where it has read plain decoding's earlier texts of the task; "" where it keeps nothing between texts.
    """

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    amount: Mapping[str, Any] = field(default_factory=dict)
    verification: Verification = "matched"
    memory: Memory = ""


def parse_method(text: str) -> Method:
    """Read a method as the command line gives it: `NAME` or `NAME:{"option": value, ...}`.

    `num_speculative_tokens`, `control` and `control_options` among the options say how much to draft, `verification`
    how drafts are verified.

    Raises:
        UsageError: what follows the colon is not a JSON object, or an amount that cannot be honoured.
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
    """Read methods as `parse_method` does, and refuse what is unknown, with a near-match hint, or given twice."""
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
    """Return the methods, each one that shares what it learns between texts twice: cold, then warm."""
    columns = []
    for method in methods:
        shares = method.options.get("share") is True or method.options.get("learn") == "shared"
        kinds: tuple[Memory, ...] = ("cold", "warm") if shares else ("",)
        columns += [replace(method, label=f"{method.label} {kind}".strip(), memory=kind) for kind in kinds]
    return columns


def use(generator: Generator, method: Method) -> None:
    """Make the generator draft by `method`."""
    generator.use(method.name, method.options, **method.amount, verification=method.verification)
