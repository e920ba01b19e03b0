"""The door to the controls, which say how much to draft next: a name to its options and to a control for a sequence.

No control changes the text: what is drafted decides how many passes it takes. Does not know drafters or models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.contracts import Control, CostCurve
from foredraft.control.cost_aware import CostAwareRule
from foredraft.control.fixed import FixedControl, cut
from foredraft.control.levels import LevelControl, Rule
from foredraft.control.measured import MOST_NODES, BatchControl, MeasuredControl, WholeControl
from foredraft.control.payoff import StepCosts
from foredraft.control.rules import (
    BetaOptions,
    BetaRule,
    CaliOptions,
    CaliRule,
    ConfidenceOptions,
    ConfidenceRule,
    ExitThresholdOptions,
    ExitThresholdRule,
)
from foredraft.errors import UsageError
from foredraft.options import nearest, options_from, shown

__all__ = [
    "CONTROLS", "MOST_NODES", "BatchControl", "ControlChoice", "ControlKind", "FixedControl", "MeasuredControl",
    "StepCosts", "choose_control", "cut",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class NoOptions:
    """No options beside `num_speculative_tokens`."""


@dataclass(frozen=True, slots=True)
class ControlKind:
    """What a name stands for: a sentence, the dataclass of its options, and whether it asks what a pass costs."""

    summary: str
    options: type = NoOptions
    needs_cost: bool = False


CONTROLS: Mapping[str, ControlKind] = {
    "measured": ControlKind("As many nodes as the measured cost of verifying them repays.", needs_cost=True),
    "fixed": ControlKind("num_speculative_tokens nodes at every step."),
    "confidence": ControlKind("Levels while the drafter believes in its best path.", ConfidenceOptions),
    "beta_ts": ControlKind("Levels by Thompson sampling of the acceptance rate (EESD's Beta-TS).", BetaOptions),
    "exit_threshold": ControlKind(
        "Levels while the last token is probable, by a threshold that keeps a share accepted (Self-SD's).",
        ExitThresholdOptions,
    ),
    "cali_ts": ControlKind(
        "Levels by Thompson sampling about the drafter's estimate, calibrated by counts (EESD's Cali-TS).", CaliOptions
    ),
    "cost_aware": ControlKind("Levels while the tokens they promise are worth the measured seconds.", needs_cost=True),
    "whole": ControlKind(
        "The whole draft, while drafted steps write more tokens a second than plain ones.", needs_cost=True
    ),
}
"""Every control by name."""


@dataclass(frozen=True, slots=True)
class ControlChoice:
    """A control that was asked for; checked, and made anew for each sequence.

    Attributes:
        name: one of `CONTROLS`.
        options: an instance of its options.
        nodes: `num_speculative_tokens`: the number of `fixed`, a cap for the others; None where it was not given.
    """

    name: str
    options: Any
    nodes: int | None

    @property
    def most_nodes(self) -> int:
        """The most nodes that a step will ask for."""
        return MOST_NODES if self.nodes is None else self.nodes

    @property
    def needs_cost(self) -> bool:
        """Whether `make` will ask for the cost curve."""
        return CONTROLS[self.name].needs_cost and self.nodes != 0

    @property
    def is_measured(self) -> bool:
        """Whether measured costs alone decide, which they can do for several sequences together."""
        return self.name == "measured" and self.nodes != 0

    def make(self, curve: Callable[[], CostCurve], seed: int, costs: StepCosts | None = None) -> Control:
        """Return the control of one sequence.

        Args:
            curve: what a pass costs by its rows; called only if it is needed, as it may have to be measured.
            seed: decides every random draw.
            costs: what `measured` found in earlier sequences, kept up to date.
        """
        nodes, options = self.most_nodes, self.options
        if nodes == 0 or self.name == "fixed":
            return FixedControl(nodes)
        if self.name == "measured":
            return MeasuredControl(curve(), nodes, costs)
        if self.name == "whole":
            return WholeControl(curve(), nodes)
        rules: dict[str, Callable[[], Rule]] = {
            "confidence": lambda: ConfidenceRule(options),
            "exit_threshold": lambda: ExitThresholdRule(options),
            "beta_ts": lambda: BetaRule(options, seed),
            "cali_ts": lambda: CaliRule(options, seed),
            "cost_aware": lambda: CostAwareRule(curve(), nodes),
        }
        return LevelControl(rules[self.name](), nodes, options.cap if self.name == "exit_threshold" else None)


def choose_control(nodes: int | None = None, control: Any = None, control_options: Any = None) -> ControlChoice:
    """Check what was asked for.

    Args:
        nodes: `num_speculative_tokens`, or None.
        control: one of `CONTROLS`; None for `fixed` where `nodes` is given, else `measured`.
        control_options: the control's own; None for its defaults.

    Raises:
        UsageError: an unknown name, a negative number, `fixed` without one, options that are no mapping, or one that
            the control does not have.
    """
    if nodes is not None:
        FixedControl(nodes)  # refuses a negative number now, not at the first token
    name = control if control is not None else "measured" if nodes is None else "fixed"
    if not isinstance(name, str) or name not in CONTROLS:
        hint = nearest(name, CONTROLS) if isinstance(name, str) else ""
        raise UsageError(f"There is no control {shown(name)}.{hint} Controls are: {', '.join(CONTROLS)}.")
    if name == "fixed" and nodes is None:
        raise UsageError("Control 'fixed' needs a number of nodes; give num_speculative_tokens.")
    given = {} if control_options is None else control_options
    if not isinstance(given, Mapping):
        raise UsageError(f'control_options is {shown(given)}; give a mapping such as {{"threshold": 0.5}}.')
    return ControlChoice(name, options_from(CONTROLS[name].options, given, f"Control {name!r}"), nodes)
