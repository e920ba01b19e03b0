"""Tables on standard output: of any figures, and of those that several commands show.

Knows summaries, cost curves and how a terminal shows them. Does not know how they were measured.
"""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from foredraft.cli.screen import wide_console

if TYPE_CHECKING:
    from foredraft.bench.drafts import Reliability
    from foredraft.bench.runner import Account
    from foredraft.bench.serve import Load, Predicted, Turns
    from foredraft.bench.summary import Summary
    from foredraft.contracts import CostCurve

SUMMARY_COLUMNS = {
    "task": "task", "method": "method", "identical": "identical", "tokens_a_step": "tokens / step",
    "nodes_a_step": "nodes / step", "milliseconds": "ms / token", "speed_up": "speed-up [95%]",
    "honest": "without loops [95%]", "repeated": "repeated 8-grams", "stalled": "stalled",
}  # fmt: skip
"""Of `foredraft.bench.summary.shown`, what a table of `bench run` shows, and the heading."""


def show_table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print a table on standard output; columns of figures are set to the right."""
    rows = list(rows)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for place, heading in enumerate(headings):
        figures = all(row[place].lstrip("-")[:1].isdigit() or row[place] in ("", "-") for row in rows)
        table.add_column(heading, justify="right" if figures and place else "left")
    for row in rows:
        table.add_row(*row)
    wide_console().print(table)


def cost_rows(curve: "CostCurve") -> list[dict[str, float]]:
    """Return what a pass costs by its rows, for JSON."""
    return [
        {"rows": rows, "milliseconds": 1e3 * seconds, "relative": seconds / curve.seconds[0]}
        for rows, seconds in zip(curve.rows, curve.seconds, strict=True)
    ]


def show_cost(rows: list[dict[str, float]]) -> None:
    """Print what a pass costs by its rows."""
    shown = ((str(row["rows"]), f"{row['milliseconds']:.2f}", f"{row['relative']:.2f}") for row in rows)
    show_table(("rows", "ms", "relative to one row"), shown, "What verifying costs")


def show_reliability(title: str, curve: "Iterable[Reliability]") -> None:
    """Print how far estimates were right, a row for each bin; nothing where a drafter gave no estimates."""
    rows = [
        (f"{each.low:g} to {each.high:g}", str(each.nodes), f"{each.believed:.3f}", f"{each.happened:.3f}")
        for each in curve
    ]
    if rows:
        show_table(("estimate", "nodes", "believed", "accepted"), rows, title)


def show_summaries(summaries: "Iterable[Summary]", columns: dict[str, str], title: str) -> None:
    """Print a row for each summary.

    Args:
        summaries: of one setting.
        columns: names of `foredraft.bench.summary.shown`, and their headings.
        title: of the table.
    """
    from foredraft.bench.summary import shown

    rows = [shown(each) for each in summaries]
    show_table(tuple(columns.values()), [[row[name] for name in columns] for row in rows], title)


def show_run(summaries: "list[Summary]", account: "Account") -> None:
    """Print a table for each setting, and what the run itself came to."""
    for name in dict.fromkeys(summary.settings for summary in summaries):
        show_summaries((each for each in summaries if each.settings == name), SUMMARY_COLUMNS, name)
    typer.echo(
        "speed-up: of the sums over all texts; without loops: texts whose plain output repeats at most a fifth of its "
        "8-grams (their number); ms / token is decode time, and for transformers all of it; stalled: share of the time "
        "that the machine held passes up, in none of the figures"
    )
    measured = len(account.cells) - account.found
    typer.echo(
        f"{measured} cells measured, {account.found} found; the harness took {account.harness_share:.2%} of "
        f"{account.seconds:.0f} s."
    )


def show_loads(loads: "Sequence[Load]") -> None:
    """Print a row for each number of streams: tokens a second in every way, and how they compare."""
    rates: dict[tuple[int, str], list[Load]] = {}
    for load in loads:
        rates.setdefault((load.streams, load.way), []).append(load)
    ways = list(dict.fromkeys(load.way for load in loads))
    counts = list(dict.fromkeys(load.streams for load in loads))
    speed = {place: median(each.tokens_a_second for each in found) for place, found in rates.items()}
    rows = []
    for count in counts:
        row = [str(count)]
        for way in ways:
            first = median(each.first for each in rates[count, way])
            times = f"{speed[count, way] / speed[counts[0], way]:.2f}"
            row += [f"{speed[count, way]:.0f}", times, f"{1e3 * first:.0f}"]
        turns = zip(*(rates[count, way] for way in ways), strict=True)
        ratios = [two.tokens_a_second / one.tokens_a_second for one, two in turns] if len(ways) == 2 else []
        rows.append([*row, f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"])
    heads = [head for way in ways for head in (f"{way} tokens/s", "of one stream's", "ms to first")]
    same = len({load.texts for load in loads}) == 1
    title = f"Streams at once; {'all texts are the same in every way' if same else 'THE TEXTS DIFFER'}"
    show_table(("streams", *heads, "drafted / plain"), rows, title)


def show_predictions(found: "Sequence[Predicted]") -> None:
    """Print what a prediction is worth, and what a wrong one costs."""
    if not found:
        return
    rows = []
    for name in ("plain", "drafted", "edited", "wrong"):
        seconds = median(getattr(each, name) for each in found)
        times = median(each.plain / getattr(each, name) for each in found)
        beside = median(getattr(each, name) / each.drafted for each in found)
        rows.append([name, f"{seconds:.2f}", f"{times:.2f}", f"{beside:.2f}"])
    same = "all texts are the same" if all(each.same for each in found) else "THE TEXTS DIFFER"
    counted = f"{found[0].tokens} tokens, {found[0].accepted} of them from the edited prediction"
    show_table(("prediction", "seconds", "times as fast as plain", "time of drafted's"), rows, f"{counted}; {same}")


def show_turns(found: "Sequence[Turns]") -> None:
    """Print how soon two turns of a conversation are answered."""
    first, second = (median(1e3 * getattr(each, name) for each in found) for name in ("first", "second"))
    share = median(each.second / each.first for each in found)
    title = f"Two turns of a conversation; the first has {found[0].prompt_tokens} tokens"
    show_table(
        ("first turn, ms to text", "second", "share"), [[f"{first:.0f}", f"{second:.0f}", f"{share:.3f}"]], title
    )
