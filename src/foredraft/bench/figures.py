"""The report's pictures, as PNG files in memory.

Knows summaries and matplotlib, which is an optional extra. Colours belong to methods and are the same in every picture.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foredraft.bench.summary import PARTS, Summary
from foredraft.contracts import CostCurve
from foredraft.errors import UsageError

COLORS = ("#0b66b0", "#c8500a", "#07825f", "#a8437f", "#8a6a00", "#5a57c9", "#6b7280", "#b02a37")
"""Of methods, in order."""
_MARKERS = "osD^vP*X"
_INK, _FAINT = "#1f2328", "#d8dde3"
_WIDTH, _RESOLUTION = 6.4, 160  # inches, dots per inch
_DEEPEST = 12  # depths that a picture shows
_LONGEST_LABEL = 44  # characters


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn figure.

    Attributes:
        name: of its file, without suffix.
        alt: what it shows, in words.
        png: the file's bytes.
    """

    name: str
    alt: str
    png: bytes


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


def picture(name: str, alt: str, height: float, draw: Callable[[Any], None]) -> Picture:
    """Draw onto a matplotlib figure `height` inches high, without a window system."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: Any = {  # matplotlib types the keys one by one
        "font.size": 11.5, "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _FAINT, "xtick.color": _INK,
        "ytick.color": _INK, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
        "grid.color": _FAINT, "grid.linewidth": 0.7,
    }  # fmt: skip
    with mpl.rc_context(style):
        figure = Figure(figsize=(_WIDTH, height), dpi=_RESOLUTION, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return Picture(name, alt, file.getvalue())


def speed_ups(summaries: Sequence[Summary], methods: Sequence[str], name: str) -> Picture:
    """Draw each method's speed-up on each task, with its interval."""
    tasks = list(dict.fromkeys(each.task for each in summaries))
    rows = {(each.task, each.method): each.speed_up for each in summaries if each.texts}
    drawn = [method for method in methods if any(method == other for _, other in rows)]

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.axvline(1, color=_INK, linewidth=1, linestyle=(0, (3, 3)))
        offsets = np.linspace(-0.34, 0.34, len(drawn)) if len(drawn) > 1 else np.zeros(1)
        for method, offset in zip(drawn, offsets, strict=True):
            found = [(place + offset, rows[task, method]) for place, task in enumerate(tasks) if (task, method) in rows]
            values, low, high = np.array([(ratio.value, ratio.low, ratio.high) for _, ratio in found]).T
            lengths = np.array([values - low, high - values])
            reach = np.where(np.isfinite(lengths) & (lengths < values), np.clip(lengths, 0, None), 0)
            axes.errorbar(
                values, [place for place, _ in found], xerr=reach, linestyle="none", **_look(method, methods),
                markersize=5, linewidth=1.6, label=short(method),
            )  # fmt: skip
        axes.set_yticks(range(len(tasks)), [task.removeprefix("embedded/") for task in tasks])
        axes.set_ylim(len(tasks) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_xlabel("times as fast as plain decoding (95% interval)")
        _legend(figure, axes)

    height = 1.5 + len(tasks) * (0.22 + 0.15 * len(drawn)) + 0.12 * len(drawn)
    return picture(name, "Speed-up over plain decoding by task and method, with 95% intervals.", height, draw)


def acceptance_by_depth(summaries: Sequence[Summary], methods: Sequence[str], name: str) -> Picture:
    """Draw the share of drafting steps whose accepted path reached each depth."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for each in summaries:
            if each.counts.accepted_by_depth and each.statistics.drafting_steps:
                reached = np.array(each.counts.accepted_by_depth[:_DEEPEST]) / each.statistics.drafting_steps
                depths = np.arange(1, len(reached) + 1)
                axes.plot(depths, reached, **_look(each.method, methods), markersize=5, label=short(each.method))
        axes.set_ylim(0, 1)
        axes.set_xticks(range(1, _DEEPEST + 1))
        axes.grid()
        axes.set_xlabel("depth in the draft")
        axes.set_ylabel("share of drafting steps")
        _legend(figure, axes)

    return picture(name, "Share of drafting steps accepted at least to each depth.", 3.8, draw)


def time_split(summaries: Sequence[Summary], name: str) -> Picture:
    """Draw where the milliseconds of an emitted token go."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        left = np.zeros(len(summaries))
        for part, color in zip(PARTS, (1, 0, 2, 4, 6), strict=True):
            widths = np.array([each.milliseconds[part] for each in summaries])
            axes.barh(range(len(summaries)), widths, left=left, color=COLORS[color], label=part, height=0.6)
            left += widths
        axes.set_yticks(range(len(summaries)), [short(each.method) for each in summaries])
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        axes.set_xlabel("milliseconds of an emitted token")
        _legend(figure, axes)

    return picture(name, "Milliseconds of an emitted token by part of the step.", 1.5 + 0.42 * len(summaries), draw)


def verification_cost(curve: CostCurve, name: str) -> Picture:
    """Draw what a forward pass costs by its rows."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.plot(curve.rows, 1e3 * np.array(curve.seconds), color=COLORS[0], marker="o", markersize=5)
        axes.set_ylim(bottom=0)
        axes.grid()
        axes.set_xlabel("rows of a pass: the last token and the drafted ones")
        axes.set_ylabel("milliseconds")

    return picture(name, "Milliseconds of a forward pass by its number of rows.", 3.2, draw)


def short(method: str) -> str:
    """Return a label that fits a picture."""
    plain = method.replace('"', "").replace(":{", " ").replace("}", "").replace("num_speculative_tokens:", "nodes ")
    return plain if len(plain) <= _LONGEST_LABEL else f"{plain[: _LONGEST_LABEL - 3]}..."


def _look(method: str, methods: Sequence[str]) -> dict[str, str]:
    place = list(methods).index(method)
    return {"color": COLORS[place % len(COLORS)], "marker": _MARKERS[place % len(_MARKERS)]}


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        columns = 3 if max(map(len, labels)) < 16 else 2 if max(map(len, labels)) < 30 else 1
        figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=9.5)
