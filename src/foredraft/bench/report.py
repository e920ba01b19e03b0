"""The report of a folder of cells: a self-contained HTML page, the same sections in Markdown, and PNG pictures.

A method has the same colour in every picture. Needs matplotlib, an optional extra. Does not depend on how cells are
measured.
"""

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.atomic_file import store_file
from foredraft.bench.cell import COST_FILE, Cell, differences, read_cells
from foredraft.bench.recommendation import advise
from foredraft.bench.summary import ALL, Rows, Summary, overall, shown, source_table, summarize_cells, table
from foredraft.contracts import CostCurve
from foredraft.errors import UsageError
from foredraft.model.cost import read_curve

PAGE, MARKDOWN, PICTURES = "report.html", "report.md", "pictures"

COLORS = ("#0b66b0", "#c8500a", "#07825f", "#a8437f", "#8a6a00", "#5a57c9", "#6b7280", "#b02a37")  # of methods
_MARKERS = "osD^vP*X"
_INK, _FAINT = "#1f2328", "#d8dde3"
STYLE: Any = {  # matplotlib types the keys one by one
    "font.size": 11.5, "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _FAINT, "xtick.color": _INK,
    "ytick.color": _INK, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "grid.color": _FAINT, "grid.linewidth": 0.7,
}  # fmt: skip
_WIDTH, _RESOLUTION = 6.4, 160  # inches, dots per inch
_LEFT_OUT = ("reached depth 1, 2, ...", "ms / token: draft + forward + other")  # of the table, as pictures show them
_DEEPEST = 12  # maximum depth in a picture
_LONGEST_LABEL = 44  # characters


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture: its file name without suffix, its text alternative, and the file's bytes."""

    name: str
    alt: str
    png: bytes


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the report: heading, sentences, pictures, and tables by title."""

    heading: str
    sentences: Sequence[str]
    pictures: Sequence[Picture]
    tables: Mapping[str, Rows]


def write_report(folder: Path, out: Path, tell: Callable[[float, str], None] = lambda *_: None) -> list[Path]:
    """Write the report of the cells in `folder` to `out`; return the paths of page, Markdown and pictures' folder.

    UsageError without matplotlib and as `checked_cells`, StoreError if `out` cannot be written.
    """
    check_matplotlib()
    from matplotlib import rc_context

    cells, damaged = checked_cells(folder)
    environment, summaries = cells[0].environment, summarize_cells(cells)
    methods = list(dict.fromkeys(cell.place.method for cell in cells))
    names = list(dict.fromkeys(summary.settings for summary in summaries))
    sections = []
    with rc_context(STYLE):
        for number, name in enumerate(names):
            tell(number / len(names), "drawing")
            chosen = [summary for summary in summaries if summary.settings == name]
            pictures, tables = _pictures(chosen, methods, name), _tables(chosen, methods)
            sections.append(Section(_heading(name), advise(chosen, environment), pictures, tables))
        if (curve := read_curve(folder / COST_FILE)) is not None:
            sections.append(Section("Cost of verification", (), [_verification_cost(curve)], {}))
    commits = sorted({cell.environment["code"]["commit"] for cell in cells} - {""})
    facts = [[name, value] for part in ("model", "machine", "versions") for name, value in environment[part].items()]
    facts += [["commit", ", ".join(commits) or "unknown"], ["cells", str(len(cells))]]
    sections.append(Section("Measured on", damaged, (), {"": (["", ""], facts)}))
    return _written(out, f"{environment['model']['name']}, {environment['model']['dtype']}", sections)


def checked_cells(folder: Path) -> tuple[list[Cell], list[str]]:
    """Return the cells of a folder, and a message for each damaged one; UsageError for none or several environments."""
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}; give the one that `foredraft bench run --out` wrote.")
    by_place, damaged = read_cells(folder)
    cells = list(by_place.values())
    if not cells:
        raise UsageError(f"{folder} has no readable cell; give a folder of `foredraft bench run --out`.")
    for cell in cells[1:]:
        if found := differences(cells[0].environment, cell.environment):
            raise UsageError(
                f"The cells {cells[0].place} and {cell.place} have different environments ({found}), so they cannot be "
                "compared; report each folder separately."
            )
    return cells, damaged


def _heading(settings: str) -> str:
    sampled, limit, seed = settings.rsplit("-", 2)
    options = re.sub(r"(?<=[a-z])(?=[0-9])", " ", sampled).replace("-", ", ")
    decoding = "Greedy" if sampled == "greedy" else f"Sampled at {options}"
    return f"{decoding}, up to {limit} tokens per text, {seed.replace('seed', 'seed ')}"


def _tables(summaries: Sequence[Summary], methods: Sequence[str]) -> dict[str, Rows]:
    """Return the tables of a setting: speed-ups with a column for each task, all figures, and draft sources."""
    tasks = sorted({each.task for each in summaries}, key=lambda task: (task != ALL, task))
    found = {(each.method, each.task): str(each.speed_up) for each in summaries}
    rows = [[method, *(found.get((method, task), "-") for task in tasks)] for method in methods]
    by_task = ["method", *tasks], [row for row in rows if set(row[1:]) != {"-"}]
    ordered = sorted(summaries, key=lambda each: (methods.index(each.method), each.task != ALL))
    columns = [name for name in shown(ordered[0]) if name not in _LEFT_OUT]
    sources = source_table(overall(summaries))
    tables = {"Speed-up by task": by_task, "Figures": table(ordered, columns)}
    return tables | ({"Draft sources": sources} if sources[1] else {})


def _written(out: Path, title: str, sections: Sequence[Section]) -> list[Path]:
    from jinja2 import Environment, FileSystemLoader, select_autoescape

    loader = FileSystemLoader(Path(__file__).parent / "templates")
    templates: Any = Environment(loader=loader, autoescape=select_autoescape(["html.j2"]))
    templates.filters["base64"] = lambda data: base64.b64encode(data).decode()
    files = {f"{PICTURES}/{each.name}.png": each.png for section in sections for each in section.pictures}
    for name in (MARKDOWN, PAGE):
        files[name] = f"{templates.get_template(f'{name}.j2').render(title=title, sections=sections)}\n".encode()
    for name, data in files.items():
        store_file(out / name, data)
    return [out / PAGE, out / MARKDOWN, out / PICTURES]


# --- pictures


def check_matplotlib() -> None:
    """Raise UsageError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise UsageError(
            'A report needs matplotlib, which is not installed; install it with: pip install "foredraft[report]".'
        )


def new_figure(height: float) -> Any:
    """Return an empty matplotlib figure, `height` inches high."""
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), dpi=_RESOLUTION, layout="constrained")


def png(figure: Any) -> bytes:
    """Return a figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _picture(name: str, alt: str, axes: Any) -> Picture:
    """Return a picture of one pair of axes, with a legend above if there are labels."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        longest = max(map(len, labels))
        columns = 3 if longest < 16 else 2 if longest < 30 else 1
        axes.figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=9.5)
    return Picture(name, alt, png(axes.figure))


def _pictures(summaries: Sequence[Summary], methods: Sequence[str], name: str) -> list[Picture]:
    """Draw what the summaries have: speed-ups, acceptance by depth, and times."""
    totals = overall(summaries)
    pictures = [_speed_ups(summaries, methods, f"speed-up-{name}")]
    if any(each.statistics.drafted for each in totals):
        pictures.append(_acceptance_by_depth(totals, methods, f"acceptance-by-depth-{name}"))
    if timed := [each for each in totals if not each.whole_time and each.texts]:
        pictures.append(_time_split(timed, f"time-{name}"))
    return pictures


def _speed_ups(summaries: Sequence[Summary], methods: Sequence[str], name: str) -> Picture:
    tasks = list(dict.fromkeys(each.task for each in summaries))
    rows = {(each.task, each.method): each.speed_up for each in summaries if each.texts}
    present = [method for method in methods if any(method == other for _, other in rows)]
    axes = new_figure(1.5 + len(tasks) * (0.22 + 0.15 * len(present)) + 0.12 * len(present)).add_subplot()
    axes.axvline(1, color=_INK, linewidth=1, linestyle=(0, (3, 3)))
    offsets = np.linspace(-0.34, 0.34, len(present)) if len(present) > 1 else np.zeros(1)
    for method, offset in zip(present, offsets, strict=True):
        points = [(row, rows[task, method]) for row, task in enumerate(tasks) if (task, method) in rows]
        places, values, low, high = np.array([(row, each.value, each.low, each.high) for row, each in points]).T
        lengths = np.array([values - low, high - values])
        errors = np.where(np.isfinite(lengths) & (lengths < values), np.clip(lengths, 0, None), 0)
        style = _style(method, methods)
        axes.errorbar(values, places + offset, xerr=errors, linestyle="none", linewidth=1.6, **style)
    _label_rows(axes, [task.removeprefix("embedded/") for task in tasks])
    axes.set_xlabel("times as fast as plain decoding (95% interval)")
    return _picture(name, "Speed-up over plain decoding by task and method, with 95% intervals.", axes)


def _acceptance_by_depth(summaries: Sequence[Summary], methods: Sequence[str], name: str) -> Picture:
    axes = new_figure(3.8).add_subplot()
    for each in summaries:
        if each.counts.accepted_by_depth and each.statistics.drafting_steps:
            reached = np.array(each.counts.accepted_by_depth[:_DEEPEST]) / each.statistics.drafting_steps
            axes.plot(np.arange(1, len(reached) + 1), reached, **_style(each.method, methods))
    axes.grid()
    ticks = range(1, _DEEPEST + 1)
    axes.set(ylim=(0, 1), xticks=ticks, xlabel="depth in the draft", ylabel="share of drafting steps")
    return _picture(name, "Share of drafting steps accepted at least to each depth.", axes)


def _time_split(summaries: Sequence[Summary], name: str) -> Picture:
    axes, left = new_figure(1.5 + 0.42 * len(summaries)).add_subplot(), np.zeros(len(summaries))
    for part, color in zip(summaries[0].milliseconds, (1, 0, 2, 4, 6), strict=True):
        widths = np.array([each.milliseconds[part] for each in summaries])
        axes.barh(range(len(summaries)), widths, left=left, color=COLORS[color], label=part, height=0.6)
        left += widths
    _label_rows(axes, [_short(each.method) for each in summaries])
    axes.set_axisbelow(True)
    axes.set_xlabel("milliseconds per emitted token")
    return _picture(name, "Milliseconds per emitted token by part of the step.", axes)


def _verification_cost(curve: CostCurve) -> Picture:
    axes = new_figure(3.2).add_subplot()
    axes.plot(curve.rows, 1e3 * np.array(curve.seconds), color=COLORS[0], marker="o", markersize=5)
    axes.grid()
    axes.set_ylim(bottom=0)
    axes.set(xlabel="rows of a pass: the root and the drafted tokens", ylabel="milliseconds")
    return _picture("verification", "Milliseconds of a forward pass by its number of rows.", axes)


def _label_rows(axes: Any, labels: Sequence[str]) -> None:
    """Label the rows of a picture, the first one at the top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def _short(method: str) -> str:
    plain = method.replace('"', "").replace(":{", " ").replace("}", "").replace("num_speculative_tokens:", "nodes ")
    return plain if len(plain) <= _LONGEST_LABEL else f"{plain[: _LONGEST_LABEL - 3]}..."


def _style(method: str, methods: Sequence[str]) -> dict[str, Any]:
    index = methods.index(method) % len(COLORS)
    return {"color": COLORS[index], "marker": _MARKERS[index], "markersize": 5, "label": _short(method)}
