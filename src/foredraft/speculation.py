"""Parses `speculative_config`: the method, the draft length, and the method's options.

Reads the keys that all methods share; the remaining keys are the method's options. Does not depend on any method.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from foredraft.control import choose_control
from foredraft.drafters import drafter_class, parse_options
from foredraft.errors import UsageError
from foredraft.options import check_known, shown

DEFAULT_METHOD = "auto"
_SHARED = ("method", "num_speculative_tokens", "control", "control_options")


@dataclass(frozen=True, slots=True)
class Speculation:
    """A parsed configuration."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)  # the method's
    amount: dict[str, Any] = field(default_factory=dict)  # `nodes`, `control`, `control_options` of `Generator.use`

    @property
    def drafting(self) -> dict[str, Any]:
        """The arguments of `Generator.use`."""
        return {"method": self.method, "options": self.options, **self.amount}


def parse_speculation(method: str | None, config: Any) -> Speculation:
    """Parse a configuration, and a method given outside it; UsageError for two methods, or an invalid method or key."""
    if not isinstance(config, Mapping):
        raise UsageError(f'speculative_config is {shown(config)}; give a mapping such as {{"table": "none"}}.')
    options = dict(config)
    configured = options.pop("method", None)
    for value in (method, configured):
        if value is not None and not isinstance(value, str):
            raise UsageError(f"method is {shown(value)}; give a method's name as text.")
    if method is not None and configured is not None and method != configured:
        raise UsageError(f"method is {method!r} and speculative_config names {configured!r}; give one of them.")
    nodes, control, given = (options.pop(name, None) for name in _SHARED[1:])
    amount = {"nodes": nodes, "control": control, "control_options": given}
    choose_control(**amount)  # all is checked before the weights are loaded
    chosen = next(each for each in (method, configured, DEFAULT_METHOD) if each is not None)
    known = [*(each.name for each in fields(drafter_class(chosen).Options)), *_SHARED]
    for key in options:
        check_known(key, known, f"Method {chosen!r} has no option", "The keys are")
    parse_options(chosen, options)
    return Speculation(chosen, options, amount)
