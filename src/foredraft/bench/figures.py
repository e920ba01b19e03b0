"""The report's pictures, as PNG files in memory: each once for light pages and once for dark ones.

Knows summaries and matplotlib, which is an optional extra. Colours belong to methods and are the same in every picture.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foredraft.bench.curves import BudgetCurve
from foredraft.bench.summary import PARTS, Summary
from foredraft.contracts import CostCurve
from foredraft.errors import UsageError

WIDTH, RESOLUTION = 6.4, 160
DEEPEST = 12


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of a page.

    Attributes:
        name: "light" or "dark".
        ink: of text.
        faint: of lines behind the data.
        paper: of the background.
        series: of methods, in order.
    """

    name: str
    ink: str
    faint: str
    paper: str
    series: tuple[str, ...]


LIGHT = Theme(
    "light", "#1f2328", "#d8dde3", "#ffffff",
    ("#0b66b0", "#c8500a", "#07825f", "#a8437f", "#8a6a00", "#5a57c9", "#6b7280", "#b02a37"),
)  # fmt: skip
DARK = Theme(
    "dark", "#e6e8eb", "#3a4049", "#15181d",
    ("#5aa9e6", "#f0833a", "#3fc39a", "#e58abf", "#e0b83c", "#9d9af5", "#a9b0bb", "#ef6a75"),
)  # fmt: skip
MARKERS = "osD^vP*X"

Draw = Callable[[Any, Theme], None]
"""Draws onto a matplotlib figure."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn figure.

    Attributes:
        name: of its files, without suffix.
        alt: what it shows, in words.
        png: by the theme's name, the file's bytes.
    """

    name: str
    alt: str
    png: Mapping[str, bytes]


def check_matplotlib() -> None:
    """Refuse to draw without matplotlib.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import matplotlib as _  # noqa: F401, ICN001  # to know that it is there
    except ImportError as error:
        raise UsageError(
            'A report needs matplotlib, which is not installed; install it with: pip install "foredraft[report]".'
        ) from error


def picture(name: str, alt: str, height: float, draw: Draw) -> Picture:
    """Draw a figure `height` inches high in both themes, without a window system."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    png = {}
    for theme in (LIGHT, DARK):
        style: Any = {  # matplotlib types the keys one by one
            "font.size": 11.5, "text.color": theme.ink, "axes.labelcolor": theme.ink, "axes.edgecolor": theme.faint,
            "xtick.color": theme.ink, "ytick.color": theme.ink, "axes.facecolor": theme.paper,
            "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
            "grid.color": theme.faint, "grid.linewidth": 0.7,
        }  # fmt: skip
        with mpl.rc_context(style):
            figure = Figure(figsize=(WIDTH, height), dpi=RESOLUTION, facecolor=theme.paper, layout="constrained")
            FigureCanvasAgg(figure)
            draw(figure, theme)
            file = io.BytesIO()
            figure.savefig(file, format="png", facecolor=theme.paper)
        png[theme.name] = file.getvalue()
    return Picture(name, alt, png)


def speed_ups(summaries: Sequence[Summary], methods: Sequence[str], name: str) -> Picture:
    """Draw each method's speed-up on each task, with its interval."""
    tasks = list(dict.fromkeys(each.task for each in summaries))
    rows = {(each.task, each.method): each.speed_up for each in summaries if each.texts}
    drawn = [method for method in methods if any(method == other for _, other in rows)]

    def draw(figure: Any, theme: Theme) -> None:
        axes = figure.add_subplot()
        axes.axvline(1, color=theme.ink, linewidth=1, linestyle=(0, (3, 3)))
        offsets = np.linspace(-0.34, 0.34, len(drawn)) if len(drawn) > 1 else np.zeros(1)
        for method, offset in zip(drawn, offsets, strict=True):
            found = [(place + offset, rows[task, method]) for place, task in enumerate(tasks) if (task, method) in rows]
            values = np.array([ratio.value for _, ratio in found])
            lengths = [
                values - [ratio.low for _, ratio in found],
                np.array([ratio.high for _, ratio in found]) - values,
            ]
            reach = np.where(np.isfinite(lengths) & (np.array(lengths) < values), np.clip(lengths, 0, None), 0)
            axes.errorbar(
                values, [place for place, _ in found], xerr=reach, linestyle="none",
                **_look(method, methods, theme), markersize=5, linewidth=1.6, label=short(method),
            )  # fmt: skip
        axes.set_yticks(range(len(tasks)), [task.removeprefix("embedded/") for task in tasks])
        axes.set_ylim(len(tasks) - 0.5, -0.5)
        for place in range(1, len(tasks)):
            axes.axhline(place - 0.5, color=theme.faint, linewidth=0.7)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_xlabel("times as fast as plain decoding (95% interval)")
        _legend(figure, axes, len(drawn))

    height = 1.5 + len(tasks) * (0.22 + 0.15 * len(drawn)) + 0.12 * len(drawn)
    return picture(name, "Speed-up over plain decoding by task and method, with 95% intervals.", height, draw)


def tokens_by_budget(
    summaries: Sequence[Summary], curves: Sequence[BudgetCurve], methods: Sequence[str], name: str
) -> Picture:
    """Draw tokens a target step against drafted nodes: measured points, and replayed curves over fixed budgets."""
    points = [each for each in summaries if each.statistics.drafted]

    def draw(figure: Any, theme: Theme) -> None:
        axes = figure.add_subplot()
        for curve in curves:
            look = _look(curve.method, methods, theme)
            axes.plot(curve.nodes, curve.tokens_per_target_step, color=look["color"], linewidth=1.6)
        labelled = {each.method for each in points} | {curve.method for curve in curves}
        for each in points:
            axes.plot(
                each.nodes_per_step, each.statistics.tokens_per_target_step, linestyle="none",
                **_look(each.method, methods, theme), markersize=8, markeredgecolor=theme.paper,
            )  # fmt: skip
        for method in methods:
            if method in labelled:
                axes.plot([], [], **_look(method, methods, theme), linewidth=1.6, label=short(method))
        axes.set_xscale("symlog", base=2, linthresh=1)
        ticks = [0, 1, 2, 4, 8, 16, 32, 64]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=1)
        axes.grid()
        axes.set_xlabel("drafted nodes a step")
        axes.set_ylabel("tokens a target step")
        _legend(figure, axes, len(labelled))

    return picture(name, "Tokens written a target step against drafted nodes a step.", 4.2, draw)


def acceptance_by_depth(summaries: Sequence[Summary], methods: Sequence[str], name: str) -> Picture:
    """Draw the share of drafting steps whose accepted path reached each depth."""
    drawn = [each for each in summaries if each.counts.accepted_by_depth and each.statistics.drafting_steps]

    def draw(figure: Any, theme: Theme) -> None:
        axes = figure.add_subplot()
        for each in drawn:
            reached = np.array(each.counts.accepted_by_depth[:DEEPEST]) / each.statistics.drafting_steps
            axes.plot(
                np.arange(1, len(reached) + 1), reached, **_look(each.method, methods, theme), linewidth=1.6,
                markersize=5, label=short(each.method),
            )  # fmt: skip
        axes.set_ylim(0, 1)
        axes.set_xticks(range(1, DEEPEST + 1))
        axes.grid()
        axes.set_xlabel("depth in the draft")
        axes.set_ylabel("share of drafting steps")
        _legend(figure, axes, len(drawn))

    return picture(name, "Share of drafting steps accepted at least to each depth.", 3.8, draw)


def time_split(summaries: Sequence[Summary], name: str) -> Picture:
    """Draw where the milliseconds of an emitted token go."""
    drawn = [each for each in summaries if not each.whole_time and each.texts]

    def draw(figure: Any, theme: Theme) -> None:
        axes = figure.add_subplot()
        left = np.zeros(len(drawn))
        for part, color in zip(PARTS, (1, 0, 2, 4, 6), strict=True):
            widths = np.array([each.milliseconds[part] for each in drawn])
            axes.barh(
                range(len(drawn)), widths, left=left, color=theme.series[color], label=part, height=0.6,
                edgecolor=theme.paper, linewidth=1,
            )  # fmt: skip
            left += widths
        axes.set_yticks(range(len(drawn)), [short(each.method) for each in drawn])
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        axes.set_xlabel("milliseconds of an emitted token")
        _legend(figure, axes, len(PARTS))

    return picture(name, "Milliseconds of an emitted token by part of the step.", 1.5 + 0.42 * len(drawn), draw)


def verification_cost(curve: CostCurve, name: str) -> Picture:
    """Draw what a forward pass costs by its rows."""

    def draw(figure: Any, theme: Theme) -> None:
        axes = figure.add_subplot()
        axes.plot(curve.rows, 1e3 * np.array(curve.seconds), color=theme.series[0], marker="o", markersize=5)
        axes.set_ylim(bottom=0)
        axes.grid()
        axes.set_xlabel("rows of a pass: the last token and the drafted ones")
        axes.set_ylabel("milliseconds")

    return picture(name, "Milliseconds of a forward pass by its number of rows.", 3.2, draw)


def short(method: str) -> str:
    """Return a label that fits a picture."""
    plain = method.replace('"', "").replace(":{", " ").replace("}", "").replace("num_speculative_tokens:", "nodes ")
    return plain if len(plain) <= 44 else f"{plain[:41]}..."


def _look(method: str, methods: Sequence[str], theme: Theme) -> dict[str, str]:
    place = list(methods).index(method)
    return {"color": theme.series[place % len(theme.series)], "marker": MARKERS[place % len(MARKERS)]}


def _legend(figure: Any, axes: Any, entries: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if entries:
        columns = 3 if max(map(len, labels)) < 16 else 2 if max(map(len, labels)) < 30 else 1
        figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=9.5)
