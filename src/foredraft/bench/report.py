"""The report of a folder of cells: an HTML page that needs no network, its pictures as PNG files, and Markdown.

Knows what the report shows of the figures; what they are is in `summary`, what they say in `recommendation`, how they
are drawn in `figures`. The page and the Markdown hold the same sections.
"""

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.atomic_file import write_file
from foredraft.bench import figures
from foredraft.bench.cell import Cell, check_alike, read_cells, read_cost
from foredraft.bench.figures import Picture
from foredraft.bench.recommendation import advise
from foredraft.bench.summary import ALL, Summary, overall, shown, source_table, summarize_cells, table
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

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Headings and rows of a table."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the report.

    Attributes:
        heading: what it is about.
        sentences: what the figures say.
        pictures: drawn.
        tables: by title.
    """

    heading: str
    sentences: Sequence[str]
    pictures: Sequence[Picture]
    tables: Mapping[str, Rows]


def write_report(folder: Path, out: Path, tell: Callable[[float, str], None] = lambda *_: None) -> list[Path]:
    """Write the report of the cells in `folder` into `out`; return the page, the Markdown and the folder of pictures.

    Raises:
        UsageError: no matplotlib, no cells, cells of unlike environments, or a folder that cannot be written to.
    """
    figures.check_matplotlib()
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
        sections.append(Section("What verifying costs", (), [figures.verification_cost(curve, "verification")], {}))
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
    drawn = [figures.speed_ups(summaries, methods, f"speed-up-{name}")]
    if any(each.statistics.drafted for each in whole):
        drawn.append(figures.acceptance_by_depth(whole, methods, f"acceptance-by-depth-{name}"))
    timed = [each for each in whole if not each.whole_time and each.texts]
    return [*drawn, figures.time_split(timed, f"time-{name}")] if timed else drawn


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
