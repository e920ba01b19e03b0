"""What `speculative_config` asks for: the method, how much it drafts, how drafts are verified, and its own options.

Knows the keys that all methods share (vLLM's, and our own); what is left belongs to the method.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from foredraft.contracts import Verification
from foredraft.control import choose_control
from foredraft.errors import UsageError
from foredraft.options import nearest, shown, whole_number

DEFAULT_METHOD = "auto"


@dataclass(frozen=True, slots=True)
class Speculation:
    """A parsed configuration.

    Attributes:
        method: its name; not looked up yet.
        amount: how much to draft, as `Generator.use` takes it: `nodes`, `control`, `control_options`.
        verification: "matched" or "rejection".
        options: the method's own.
    """

    method: str
    amount: dict[str, Any]
    verification: Verification
    options: dict[str, Any]


def parse_speculation(method: str | None, config: Any) -> Speculation:
    """Read a configuration and a method named besides it.

    Raises:
        UsageError: something that is no mapping, two methods, or a shared key's value that cannot be honoured.
    """
    if not isinstance(config, Mapping):
        raise UsageError(f'speculative_config is {shown(config)}; give a mapping such as {{"table": "none"}}.')
    options = dict(config)
    named = options.pop("method", None)
    for value in (method, named):
        if value is not None and not isinstance(value, str):
            raise UsageError(f"method is {shown(value)}; give a method's name as text.")
    if method is not None and named is not None and method != named:
        raise UsageError(f"method is {method!r} and speculative_config names {named!r}; give one of them.")
    amount = take_amount(options)
    verification = take_verification(options)
    return Speculation(method or named or DEFAULT_METHOD, amount, verification, options)


def take_amount(options: dict[str, Any]) -> dict[str, Any]:
    """Take how much to draft out of `options`: `num_speculative_tokens` as `nodes`, `control`, `control_options`.

    Raises:
        UsageError: an amount that cannot be honoured.
    """
    given = options.pop("num_speculative_tokens", None)
    nodes = whole_number(given)
    if given is not None and (nodes is None or not 0 <= nodes <= 1024):
        raise UsageError(f"num_speculative_tokens is {shown(given)}; it must be a whole number, 0 to 1024.")
    amount = {
        "nodes": nodes,
        "control": options.pop("control", None),
        "control_options": options.pop("control_options", None),
    }
    choose_control(**amount)  # refused now, not after the weights
    return amount


def take_verification(options: dict[str, Any]) -> Verification:
    """Take how drafts are verified out of `options`; matched where they do not say.

    Raises:
        UsageError: another value, with a near-match hint.
    """
    return checked_verification(options.pop("verification", None))


def checked_verification(given: Any) -> Verification:
    """Return how drafts are verified; None stands for the default.

    Raises:
        UsageError: another value, with a near-match hint.
    """
    known = get_args(Verification)
    if given is None:
        return "matched"
    if given not in known:
        hint = nearest(given, known) if isinstance(given, str) else ""
        raise UsageError(f"verification is {shown(given)}; it must be one of {', '.join(known)}.{hint}")
    verification: Verification = given
    return verification
