"""The controls, which decide how much to draft: from a name to its options, and to the control of one sequence.

A control never changes the text, only how many target passes it takes. Does not depend on drafters or models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from foredraft.contracts import Control, CostCurve
from foredraft.control import levels
from foredraft.control.levels import FixedControl, LevelControl, Rule
from foredraft.control.measured import MOST_NODES, MeasuredControl
from foredraft.control.payoff import StepCosts, cut
from foredraft.errors import UsageError
from foredraft.options import NoOptions, check_known, options_from, shown, whole_number

__all__ = [
    "CONTROLS", "MOST_NODES", "ControlChoice", "ControlKind", "FixedControl", "MeasuredControl", "StepCosts",
    "choose_control", "cut",
]  # fmt: skip


_MOST_REQUESTED = 1024  # nodes per step (chosen)


class ControlKind(NamedTuple):
    """A control's one-line summary, the dataclass of its options, and how it is made."""

    summary: str
    options: type = NoOptions
    rule: Callable[[Any, int], Rule] | None = None  # made of its options and a seed, if it decides level by level
    needs_cost: bool = False  # whether it needs the measured cost curve


CONTROLS: Mapping[str, ControlKind] = {
    "measured": ControlKind("The nodes and levels with the most expected tokens per measured second.", needs_cost=True),
    "fixed": ControlKind("num_speculative_tokens nodes in every step."),
    "beta_ts": ControlKind(
        "Levels by Thompson sampling of the acceptance rate (EESD's Beta-TS).", levels.BetaOptions, levels.BetaRule
    ),
    "exit_threshold": ControlKind(
        "Levels while the last token is probable enough (Self-SD).",
        levels.ExitThresholdOptions,
        levels.ExitThresholdRule,
    ),
    "cali_ts": ControlKind(
        "Levels by Thompson sampling of a calibrated estimate (EESD's Cali-TS).", levels.CaliOptions, levels.CaliRule
    ),
    "whole": ControlKind("The whole draft, while this writes more tokens per second than none.", needs_cost=True),
}


@dataclass(frozen=True, slots=True)
class ControlChoice:
    """A checked request for a control; each sequence gets a new control from it."""

    name: str  # one of `CONTROLS`
    options: Any  # an instance of its options
    most_nodes: int  # nodes per step at most; for `fixed`, exactly

    @property
    def needs_cost(self) -> bool:
        """Whether `make` calls for the cost curve."""
        return CONTROLS[self.name].needs_cost and self.most_nodes > 0

    def make(self, curve: Callable[[], CostCurve], seed: int, costs: StepCosts | None = None) -> Control:
        """Return a control for one sequence, which draws with `seed`.

        `curve` returns the cost of a pass by its rows; called only if needed, as it may have to measure it. `costs` is
        what `measured` learned in earlier sequences; updated in place.
        """
        nodes, rule = self.most_nodes, CONTROLS[self.name].rule
        if nodes == 0 or self.name == "fixed":
            return FixedControl(nodes)
        if rule is not None:
            cap = self.options.cap if rule is levels.ExitThresholdRule else None
            return LevelControl(rule(self.options, seed), nodes, cap)
        whole, known = self.name == "whole", curve()
        return MeasuredControl(lambda: known, nodes, None if whole else costs, whole=whole)


def choose_control(nodes: Any = None, control: Any = None, control_options: Any = None) -> ControlChoice:
    """Check a request for a control; `nodes` is `num_speculative_tokens`. UsageError for an invalid one.

    Without a `control` it is `fixed` if `nodes` is given, else `measured`.
    """
    count = whole_number(nodes)
    if nodes is not None and (count is None or not 0 <= count <= _MOST_REQUESTED):
        raise UsageError(
            f"num_speculative_tokens is {shown(nodes)}; it must be a whole number, 0 to {_MOST_REQUESTED}."
        )
    name = control if control is not None else "measured" if nodes is None else "fixed"
    check_known(name, CONTROLS, "There is no control", "Controls are")
    if name == "fixed" and nodes is None:
        raise UsageError("Control 'fixed' needs a number of nodes; give num_speculative_tokens.")
    given = {} if control_options is None else control_options
    options: Any = options_from(CONTROLS[name].options, given, f"Control {name!r}")
    return ControlChoice(name, options, MOST_NODES if count is None else count)
