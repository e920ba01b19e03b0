"""The table of `foredraft bench run`, on standard output.

Knows summaries and how a terminal shows them.
"""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from foredraft.bench.runner import Account
    from foredraft.bench.summary import Summary


_UNBROKEN = 160
"""Columns of a table that no terminal limits."""


def show_summaries(summaries: "list[Summary]", account: "Account") -> None:
    """Print a row for each setting, task and method, and what the run itself came to."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_UNBROKEN)
    for name in dict.fromkeys(summary.settings for summary in summaries):
        table = Table(
            "task", "method", "identical", "tokens / step", "nodes / step", "ms / token", "speed-up [95%]",
            "without loops [95%]", "repeated 8-grams", "stalled", title=name,
        )  # fmt: skip
        for each in summaries:
            if each.settings != name:
                continue
            table.add_row(
                each.task, each.method, f"{each.identical}/{each.texts}",
                f"{each.statistics.tokens_per_target_step:.2f}", f"{each.nodes_per_step:.1f}",
                f"{1e3 * each.statistics.decode_seconds_per_token:.2f}", str(each.speed_up),
                without_loops(each),
                f"{each.repeated:.2f}", f"{each.stalled:.1%}",
            )  # fmt: skip
        console.print(table)
    console.print(
        "speed-up: of the sums over all texts; without loops: texts whose plain output "
        "repeats at most a fifth of its 8-grams (their number); ms / token is decode time, and for "
        "transformers all of it; stalled: share of the time that the machine held passes up, in none of the figures",
        highlight=False,
    )
    measured = len(account.cells) - account.found
    console.print(
        f"{measured} cells measured, {account.found} found; the harness took {account.harness_share:.2%} of "
        f"{account.seconds:.0f} s.",
        highlight=False,
    )


def without_loops(each: "Summary") -> str:
    """Return the speed-up over the texts that do not loop, and how many those are."""
    return f"{each.speed_up_without_loops} ({each.texts_without_loops})" if each.texts_without_loops else "- (0)"
