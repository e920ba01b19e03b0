"""The report of a folder of cells: an HTML page that needs no network, its pictures as PNG files, and Markdown.

What the figures are is in `summary`, what they say in `recommendation`. The page and the Markdown hold the same
sections. Colours belong to methods and are the same in every picture; matplotlib, which draws, is an optional extra.
"""

import base64
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.atomic_file import write_file
from foredraft.bench.cell import Cell, check_alike, read_cells, read_cost
from foredraft.bench.recommendation import advise
from foredraft.bench.summary import ALL, PARTS, Rows, Summary, overall, shown, source_table, summarize_cells, table
from foredraft.contracts import CostCurve
from foredraft.errors import UsageError

PAGE, MARKDOWN, PICTURES = "report.html", "report.md", "pictures"

_COLUMNS = {
    "method": "method", "task": "task", "texts": "texts", "speed_up": "speed-up [95%]",
    "speed_up_without_loops": "without loops [95%]", "speed_up_macro": "mean over texts [95%]",
    "tokens_per_step": "tokens / step", "tokens_per_step_macro": "its mean over texts",
    "nodes_per_step": "nodes / step",
    "acceptance": "accepted / drafted", "share": "accepted / emitted", "harmonic_mean": "HM",
    "length": "acceptance length", "milliseconds": "ms / token", "prefill": "prefill, ms", "identical": "identical",
    "repeated": "repeated 8-grams", "stalled": "stalled",
}  # fmt: skip

COLORS = ("#0b66b0", "#c8500a", "#07825f", "#a8437f", "#8a6a00", "#5a57c9", "#6b7280", "#b02a37")
"""Of methods, in order."""
_MARKERS = "osD^vP*X"
_INK, _FAINT = "#1f2328", "#d8dde3"
_WIDTH, _RESOLUTION = 6.4, 160  # inches, dots per inch
_DEEPEST = 12  # depths that a picture shows
_LONGEST_LABEL = 44  # characters


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn figure: the name of its file without suffix, what it shows in words, and the file's bytes."""

    name: str
    alt: str
    png: bytes


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the report: its heading, what the figures say, and pictures and tables, these by title."""

    heading: str
    sentences: Sequence[str]
    pictures: Sequence[Picture]
    tables: Mapping[str, Rows]


def write_report(folder: Path, out: Path, tell: Callable[[float, str], None] = lambda *_: None) -> list[Path]:
    """Write the report of the cells in `folder` into `out`; return the page, the Markdown and the folder of pictures.

    Raises:
        UsageError: no matplotlib, no cells, cells of unlike environments, or a folder that cannot be written to.
    """
    check_matplotlib()
    cells, damaged = checked_cells(folder)
    environment, summaries = cells[0].environment, summarize_cells(cells)
    methods = list(dict.fromkeys(cell.place.method for cell in cells))
    names = list(dict.fromkeys(summary.settings for summary in summaries))
    sections = []
    for number, name in enumerate(names):
        tell(number / len(names), "drawing")
        mine = [summary for summary in summaries if summary.settings == name]
        tables = {"Speed-up by task": _by_task(mine, methods), "Figures": table(_ordered(mine, methods), _COLUMNS)}
        sources = source_table(overall(mine))
        tables |= {"Who drafted what": sources} if sources[1] else {}
        sections.append(Section(_heading(name), advise(mine, environment), _pictures(mine, methods, name), tables))
    curve = read_cost(folder)
    if curve is not None:
        sections.append(Section("What verifying costs", (), [_verification_cost(curve, "verification")], {}))
    commits = sorted({cell.environment["code"]["commit"] for cell in cells} - {""})
    facts = [[name, value] for part in ("model", "machine", "versions") for name, value in environment[part].items()]
    facts += [["commit", ", ".join(commits) or "not known"], ["cells", str(len(cells))]]
    sections.append(Section("Measured on", damaged, (), {"": (["", ""], facts)}))
    return _written(out, f"{environment['model']['name']}, {environment['model']['dtype']}", sections)


def checked_cells(folder: Path) -> tuple[list[Cell], list[str]]:
    """Return the cells of a folder, and a sentence on each that is damaged.

    Raises:
        UsageError: no folder, no cell, another version's, or cells of unlike environments.
    """
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}; give the one that `foredraft bench run --out` wrote.")
    found, damaged = read_cells(folder)
    cells = list(found.values())
    if not cells:
        raise UsageError(f"{folder} holds no cell that can be read; give a folder of `foredraft bench run --out`.")
    check_alike(cells)
    return cells, damaged


def _pictures(summaries: Sequence[Summary], methods: Sequence[str], name: str) -> list[Picture]:
    whole = overall(summaries)
    drawn = [_speed_ups(summaries, methods, f"speed-up-{name}")]
    if any(each.statistics.drafted for each in whole):
        drawn.append(_acceptance_by_depth(whole, methods, f"acceptance-by-depth-{name}"))
    timed = [each for each in whole if not each.whole_time and each.texts]
    return [*drawn, _time_split(timed, f"time-{name}")] if timed else drawn


def _heading(settings: str) -> str:
    sampled, limit, seed = settings.rsplit("-", 2)
    named = re.sub(r"(?<=[a-z])(?=[0-9])", " ", sampled).replace("-", ", ")
    words = "Greedy" if sampled == "greedy" else f"Sampled at {named}"
    return f"{words}, up to {limit} tokens a text, {seed.replace('seed', 'seed ')}"


def _ordered(summaries: Sequence[Summary], methods: Sequence[str]) -> list[Summary]:
    """Return the rows method by method, each with its row over all tasks first."""
    return sorted(summaries, key=lambda each: (methods.index(each.method), each.task != ALL))


def _by_task(summaries: Sequence[Summary], methods: Sequence[str]) -> Rows:
    tasks = sorted({each.task for each in summaries}, key=lambda task: (task != ALL, task))
    found = {(each.method, each.task): shown(each)["speed_up"] for each in summaries}
    rows = [[method, *(found.get((method, task), "-") for task in tasks)] for method in methods]
    return ["method", *tasks], [row for row in rows if set(row[1:]) != {"-"}]


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def _markdown(title: str, sections: Sequence[Section]) -> str:
    parts = [f"# {title}\n"]
    for section in sections:
        parts.append(f"## {section.heading}\n")
        parts += [f"{sentence}\n" for sentence in section.sentences]
        parts += [f"![{each.alt}]({PICTURES}/{each.name}.png)\n" for each in section.pictures]
        for name, (headings, rows) in section.tables.items():
            parts += [f"### {name}\n"] if name else []
            parts.append(markdown_table(headings, rows))
    return "\n".join(parts)


def _page(title: str, sections: Sequence[Section]) -> str:
    from jinja2 import Environment, FileSystemLoader

    def encoded(each: Picture) -> str:
        return base64.b64encode(each.png).decode()

    loader = FileSystemLoader(Path(__file__).parent / "templates")
    template: Any = Environment(loader=loader, autoescape=True).get_template("report.html.j2")
    return str(template.render(title=title, sections=sections, encoded=encoded))


def _written(out: Path, title: str, sections: Sequence[Section]) -> list[Path]:
    folder = out / PICTURES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for each in (drawn for section in sections for drawn in section.pictures):
            write_file(folder / f"{each.name}.png", each.png)
        write_file(out / MARKDOWN, _markdown(title, sections).encode())
        write_file(out / PAGE, _page(title, sections).encode())
    except OSError as error:
        raise UsageError(
            f"The report cannot be written to {out} ({error.strerror}); give another folder as --out."
        ) from error
    return [out / PAGE, out / MARKDOWN, folder]


# --- pictures


def check_matplotlib() -> None:
    """Raise `UsageError` where there is no matplotlib to draw with."""
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


def _speed_ups(summaries: Sequence[Summary], methods: Sequence[str], name: str) -> Picture:
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
                markersize=5, linewidth=1.6, label=_short(method),
            )  # fmt: skip
        axes.set_yticks(range(len(tasks)), [task.removeprefix("embedded/") for task in tasks])
        axes.set_ylim(len(tasks) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_xlabel("times as fast as plain decoding (95% interval)")
        _legend(figure, axes)

    height = 1.5 + len(tasks) * (0.22 + 0.15 * len(drawn)) + 0.12 * len(drawn)
    return picture(name, "Speed-up over plain decoding by task and method, with 95% intervals.", height, draw)


def _acceptance_by_depth(summaries: Sequence[Summary], methods: Sequence[str], name: str) -> Picture:
    """Draw the share of drafting steps whose accepted path reached each depth."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for each in summaries:
            if each.counts.accepted_by_depth and each.statistics.drafting_steps:
                reached = np.array(each.counts.accepted_by_depth[:_DEEPEST]) / each.statistics.drafting_steps
                depths = np.arange(1, len(reached) + 1)
                axes.plot(depths, reached, **_look(each.method, methods), markersize=5, label=_short(each.method))
        axes.set_ylim(0, 1)
        axes.set_xticks(range(1, _DEEPEST + 1))
        axes.grid()
        axes.set_xlabel("depth in the draft")
        axes.set_ylabel("share of drafting steps")
        _legend(figure, axes)

    return picture(name, "Share of drafting steps accepted at least to each depth.", 3.8, draw)


def _time_split(summaries: Sequence[Summary], name: str) -> Picture:
    """Draw where the milliseconds of an emitted token go."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        left = np.zeros(len(summaries))
        for part, color in zip(PARTS, (1, 0, 2, 4, 6), strict=True):
            widths = np.array([each.milliseconds[part] for each in summaries])
            axes.barh(range(len(summaries)), widths, left=left, color=COLORS[color], label=part, height=0.6)
            left += widths
        axes.set_yticks(range(len(summaries)), [_short(each.method) for each in summaries])
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        axes.set_xlabel("milliseconds of an emitted token")
        _legend(figure, axes)

    return picture(name, "Milliseconds of an emitted token by part of the step.", 1.5 + 0.42 * len(summaries), draw)


def _verification_cost(curve: CostCurve, name: str) -> Picture:
    """Draw what a forward pass costs by its rows."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.plot(curve.rows, 1e3 * np.array(curve.seconds), color=COLORS[0], marker="o", markersize=5)
        axes.set_ylim(bottom=0)
        axes.grid()
        axes.set_xlabel("rows of a pass: the last token and the drafted ones")
        axes.set_ylabel("milliseconds")

    return picture(name, "Milliseconds of a forward pass by its number of rows.", 3.2, draw)


def _short(method: str) -> str:
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
