"""How far estimates were right, as a table: part of `explain`, `replay` and `bench profile`.

Knows the curve and how a terminal shows it.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from foredraft.bench.reliability import Reliability


def show_reliability(console: Console, title: str, curve: "Iterable[Reliability]") -> None:
    """Print a row for each bin of estimates that has nodes; nothing where a drafter gave no estimates."""
    filled = [each for each in curve if each.nodes]
    if not filled:
        return
    table = Table("estimate", "nodes", "believed", "accepted", title=title)
    for each in filled:
        table.add_row(f"{each.low:g} to {each.high:g}", str(each.nodes), f"{each.believed:.3f}", f"{each.happened:.3f}")
    console.print(table)
