"""Curves of a run, kept beside its cells: what a pass over n rows costs, and tokens a target step by node budget.

The latter are plain decoding's texts, replayed through the run's drafters. Knows texts as ids, and the files' place and
form. Drafters that take long a step, such as draft models, are left out: their replay would take as long as the run.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from foredraft.api import Generator
from foredraft.bench.cell import Cell, write_result
from foredraft.bench.method import BASE, PEER, Method, use
from foredraft.bench.replay import replay
from foredraft.contracts import CostCurve, TokenIds
from foredraft.model.cost import sound_curve

T = TypeVar("T")

BUDGETS = (1, 2, 4, 8, 16, 32, 64)
SWEEP_FILE, COST_FILE = "budgets.json", "verification.json"
_VERSION = 1
_LONG = 1e-3
"""Seconds of drafting a step from which a drafter is left out."""


@dataclass(frozen=True, slots=True)
class BudgetCurve:
    """One method's replay in one setting.

    Attributes:
        settings: the setting whose plain texts were replayed.
        method: the label.
        nodes: node budgets, ascending.
        tokens_per_target_step: with at most that many nodes; feedback from the target's distribution left out.
    """

    settings: str
    method: str
    nodes: tuple[int, ...]
    tokens_per_target_step: tuple[float, ...]


def sweep_budgets(
    generator: Generator, methods: Sequence[Method], cells: Sequence[Cell], prompts: dict[str, list[Any]]
) -> list[BudgetCurve]:
    """Replay every quick drafter over the texts of every setting.

    Args:
        generator: whose resources the drafters are built with; its method is changed.
        methods: of the run, as they were asked for.
        cells: of the run.
        prompts: by setting, pairs of prompt ids and plain decoding's ids.
    """
    curves = []
    for settings, texts in prompts.items():
        for method in methods:
            mine = [cell for cell in cells if cell.place.settings == settings and _is_of(cell, method)]
            if texts and mine and method.name not in (BASE, PEER) and _drafting_seconds(mine) < _LONG:
                curves.append(BudgetCurve(settings, method.label, BUDGETS, _replayed(generator, method, texts)))
    return curves


def _is_of(cell: Cell, method: Method) -> bool:
    return cell.place.method in (method.label, f"{method.label} cold")


def _drafting_seconds(cells: Sequence[Cell]) -> float:
    written = [cell.own for cell in cells if cell.own is not None]
    steps = sum(each.steps for each in written)
    return sum(each.parts.get("draft", 0.0) for each in written) / steps if steps else float("inf")


def _replayed(generator: Generator, method: Method, texts: Sequence[tuple[TokenIds, TokenIds]]) -> tuple[float, ...]:
    tokens = []
    for nodes in BUDGETS:
        use(generator, method)
        tokens.append(replay(generator.drafter, texts, nodes, generator.target.vocabulary).tokens_per_target_step)
    return tuple(tokens)


def write_sweep(curves: Sequence[BudgetCurve], folder: Path) -> None:
    """Keep curves beside the cells; those of other settings and methods stay.

    Raises:
        StoreError: the file cannot be written.
    """
    kept = {(curve.settings, curve.method): curve for curve in [*read_sweep(folder), *curves]}
    _write(folder / SWEEP_FILE, {"curves": [asdict(curve) for _, curve in sorted(kept.items())]})


def read_sweep(folder: Path) -> list[BudgetCurve]:
    """Return the curves beside the cells; none where there is no file that can be read."""

    def parsed(body: Mapping[str, Any]) -> list[BudgetCurve]:
        return [
            BudgetCurve(
                str(each["settings"]), str(each["method"]), tuple(map(int, each["nodes"])),
                tuple(map(float, each["tokens_per_target_step"])),
            )
            for each in body["curves"]
        ]  # fmt: skip

    return _read(folder / SWEEP_FILE, parsed) or []


def keep_cost(generator: Generator, model: str, folder: Path) -> None:
    """Write the generator's cost curve into the folder of cells, unless there is one.

    Raises:
        StoreError: it cannot be written.
    """
    if read_cost(folder) is None:
        _write(folder / COST_FILE, {"model": model, **asdict(generator.cost)})


def read_cost(folder: Path) -> CostCurve | None:
    """Return the cost curve; None where there is none that can be read."""
    return _read(folder / COST_FILE, lambda body: sound_curve(body["rows"], body["seconds"]))


def _write(path: Path, body: Mapping[str, Any]) -> None:
    write_result(path, (json.dumps({"version": _VERSION, **body}) + "\n").encode())


def _read(path: Path, parsed: Callable[[Mapping[str, Any]], T]) -> T | None:
    """Return what a file holds; None where it is not there, damaged, or of another version."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        return parsed(body) if body["version"] == _VERSION else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
