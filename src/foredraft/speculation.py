"""Parses `speculative_config`: the method, the draft length, and the method's options.

Reads the keys that all methods share. Does not depend on any method; the remaining keys are the method's options.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foredraft.control import choose_control
from foredraft.errors import UsageError
from foredraft.options import shown, whole_number

DEFAULT_METHOD = "auto"


@dataclass(frozen=True, slots=True)
class Speculation:
    """A parsed configuration."""

    method: str  # not checked yet
    options: dict[str, Any] = field(default_factory=dict)  # the method's
    amount: dict[str, Any] = field(default_factory=dict)  # `nodes`, `control`, `control_options` of `Generator.use`

    @property
    def drafting(self) -> dict[str, Any]:
        """The arguments of `Generator.use`."""
        return {"method": self.method, "options": self.options, **self.amount}


def parse_speculation(method: str | None, config: Any) -> Speculation:
    """Parse a configuration, and a method given outside it; UsageError for two methods, or an invalid shared key."""
    if not isinstance(config, Mapping):
        raise UsageError(f'speculative_config is {shown(config)}; give a mapping such as {{"table": "none"}}.')
    options = dict(config)
    configured = options.pop("method", None)
    for value in (method, configured):
        if value is not None and not isinstance(value, str):
            raise UsageError(f"method is {shown(value)}; give a method's name as text.")
    if method is not None and configured is not None and method != configured:
        raise UsageError(f"method is {method!r} and speculative_config names {configured!r}; give one of them.")
    nodes = options.pop("num_speculative_tokens", None)
    amount = {
        "nodes": nodes if (count := whole_number(nodes)) is None else count,
        **{name: options.pop(name, None) for name in ("control", "control_options")},
    }
    choose_control(**amount)  # checks the control before the weights are loaded
    chosen = next(each for each in (method, configured, DEFAULT_METHOD) if each is not None)
    return Speculation(chosen, options, amount)
