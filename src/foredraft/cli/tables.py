"""Tables of figures that several commands show, or that take some arithmetic.

Knows cost curves and what a server was measured to do. Does not know how anything was measured.
"""

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from foredraft.cli.screen import show_table

if TYPE_CHECKING:
    from foredraft.bench.serve import Load, Predicted, Turns
    from foredraft.contracts import CostCurve

RUN_COLUMNS = {
    "task": "task", "method": "method", "identical": "identical", "tokens_per_step": "tokens / step",
    "nodes_per_step": "nodes / step", "milliseconds": "ms / token", "speed_up": "speed-up [95%]",
    "speed_up_without_loops": "without loops [95%]", "repeated": "repeated 8-grams", "stalled": "stalled",
}  # fmt: skip
"""Of `foredraft.bench.summary.shown`, what `bench run` shows, and the headings."""

PROFILE_COLUMNS = {
    "method": "method", "tokens_per_step": "tokens / step", "nodes_per_step": "nodes / step",
    "acceptance": "accepted / drafted", "share": "accepted / emitted", "harmonic_mean": "HM",
    "reached": "reached depth 1, 2, ...", "split": "ms / token: draft + forward + other", "speed_up": "speed-up [95%]",
}  # fmt: skip

RECOMMEND_COLUMNS = {
    "method": "method", "speed_up": "speed-up [95%]", "speed_up_without_loops": "without loops [95%]",
    "tokens_per_step": "tokens / pass", "nodes_per_step": "drafted / pass", "acceptance": "accepted",
    "milliseconds": "ms / token",
}  # fmt: skip


def cost_rows(curve: "CostCurve") -> list[dict[str, float]]:
    """Return what a pass costs by its rows, for JSON."""
    return [
        {"rows": rows, "milliseconds": 1e3 * seconds, "relative": seconds / curve.seconds[0]}
        for rows, seconds in zip(curve.rows, curve.seconds, strict=True)
    ]


def show_cost(rows: list[dict[str, float]]) -> None:
    """Print what a pass costs by its rows."""
    shown = [(str(row["rows"]), f"{row['milliseconds']:.2f}", f"{row['relative']:.2f}") for row in rows]
    show_table(("rows", "ms", "relative to one row"), shown, "What verifying costs")


def show_loads(loads: "Sequence[Load]") -> None:
    """Print a row for each number of streams: tokens a second in every way, and how they compare."""
    groups: dict[tuple[int, str], list[Load]] = {}
    for load in loads:
        groups.setdefault((load.streams, load.way), []).append(load)
    counts, ways = list(dict.fromkeys(load.streams for load in loads)), list(dict.fromkeys(load.way for load in loads))
    speed = {key: median(each.tokens_per_second for each in group) for key, group in groups.items()}
    rows = []
    for count in counts:
        row = [str(count)]
        for way in ways:
            first = median(each.first for each in groups[count, way])
            times = f"{speed[count, way] / speed[counts[0], way]:.2f}"
            row += [f"{speed[count, way]:.0f}", times, f"{1e3 * first:.0f}"]
        rounds = zip(*(groups[count, way] for way in ways), strict=True)
        ratios = [two.tokens_per_second / one.tokens_per_second for one, two in rounds] if len(ways) == 2 else []
        rows.append([*row, f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"])
    heads = [head for way in ways for head in (f"{way} tokens/s", "of one stream's", "ms to first")]
    written = [[[each.texts for each in groups[count, way]] for way in ways] for count in counts]
    same = all(way == found[0] for found in written for way in found)
    title = f"Streams at once; {'all texts are the same in every way' if same else 'THE TEXTS DIFFER'}"
    show_table(("streams", *heads, "drafted / plain"), rows, title)


def show_predictions(found: "Sequence[Predicted]") -> None:
    """Print what a prediction is worth, and what a wrong one costs."""
    if not found:
        return
    rows = []
    for name in found[0].seconds:
        seconds = median(each.seconds[name] for each in found)
        times = median(each.seconds["plain"] / each.seconds[name] for each in found)
        of_drafted = median(each.seconds[name] / each.seconds["drafted"] for each in found)
        rows.append([name, f"{seconds:.2f}", f"{times:.2f}", f"{of_drafted:.2f}"])
    same = "all texts are the same" if all(each.same for each in found) else "THE TEXTS DIFFER"
    counted = f"{found[0].tokens} tokens, {found[0].accepted} of them from the edited prediction"
    show_table(("prediction", "seconds", "times as fast as plain", "time of drafted's"), rows, f"{counted}; {same}")


def show_turns(found: "Sequence[Turns]") -> None:
    """Print how soon two turns of a conversation are answered."""
    first, second = median(1e3 * each.first for each in found), median(1e3 * each.second for each in found)
    row = [f"{first:.0f}", f"{second:.0f}", f"{median(each.second / each.first for each in found):.3f}"]
    title = f"Two turns of a conversation; the first has {found[0].prompt_tokens} tokens"
    show_table(("first turn, ms to text", "second", "share"), [row], title)
