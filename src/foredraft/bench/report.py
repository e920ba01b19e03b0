"""The report of a folder of cells: an HTML page that needs no network, its pictures as PNG files, a Markdown table.

Knows what the page shows of the figures; what they are is in `summary`, what they say in `recommendation`, how they are
drawn in `figures`.
"""

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foredraft.atomic_file import write_file
from foredraft.bench import figures
from foredraft.bench.cell import Cell, CellFolder, read_cell
from foredraft.bench.curves import BudgetCurve, read_cost, read_sweep
from foredraft.bench.figures import Picture
from foredraft.bench.method import BASE
from foredraft.bench.recommendation import advise
from foredraft.bench.summary import ALL, Summary, check_alike, overall, shown, summarize_cells
from foredraft.errors import StoreError, UsageError

PAGE, TABLE, PICTURES = "report.html", "report.md", "pictures"
_SHOWN_WASTE = 4
"""Thrown-away tokens of a step that an example shows; the others are counted."""

Tell = Callable[[float, str], None]


def write_report(folder: Path, out: Path, tell: Tell = lambda *_: None) -> list[Path]:
    """Write the report of the cells in `folder` into `out`; return the page, the table and the folder of pictures.

    Raises:
        UsageError: no matplotlib, no cells, cells of unlike environments, or a folder that cannot be written to.
    """
    figures.check_matplotlib()
    cells, damaged = read_cells(folder)
    environment = cells[0].environment
    summaries = summarize_cells(cells)
    methods = list(dict.fromkeys(cell.place.method for cell in cells))
    curves, pictures, settings = read_sweep(folder), [], []
    names = list(dict.fromkeys(summary.settings for summary in summaries))
    for number, name in enumerate(names):
        tell(number / len(names), "drawing")
        mine = [summary for summary in summaries if summary.settings == name]
        drawn = _pictures(mine, [curve for curve in curves if curve.settings == name], methods, name)
        pictures += drawn
        settings.append(
            {
                "heading": _heading(name),
                "advice": advise(mine, environment),
                "pictures": drawn,
                "rows": _rows(mine, methods),
                "sources": _sources(mine),
                "examples": _examples([cell for cell in cells if cell.place.settings == name]),
            }
        )
    curve = read_cost(folder)
    cost = figures.verification_cost(curve, "verification") if curve is not None else None
    page = _page(
        {
            "model": environment["model"], "machine": environment["machine"], "count": len(cells), "damaged": damaged,
            "settings": settings, "cost": cost, "facts": _facts(cells), "light": figures.LIGHT.series,
            "dark": figures.DARK.series,
        }
    )  # fmt: skip
    every = [*pictures, *([cost] if cost is not None else [])]
    return _written(out, page, markdown(summaries, environment, names), every)


def read_cells(folder: Path) -> tuple[list[Cell], list[str]]:
    """Return the cells of a folder, and a sentence on each that is damaged.

    Raises:
        UsageError: no folder, no cell, another version's, or cells of unlike environments.
    """
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}; give the one that `foredraft bench run --out` wrote.")
    cells, damaged = [], []
    for path in CellFolder(folder).paths():
        try:
            cells.append(read_cell(path))
        except StoreError as error:
            damaged.append(str(error))
    if not cells:
        raise UsageError(f"{folder} holds no cell that can be read; give a folder of `foredraft bench run --out`.")
    check_alike(cells)
    return cells, damaged


def _pictures(
    summaries: Sequence[Summary], curves: Sequence[BudgetCurve], methods: Sequence[str], name: str
) -> list[Picture]:
    whole = overall(summaries)
    drawn = [figures.speed_ups(summaries, methods, f"speed-up-{name}")]
    if curves or any(each.statistics.drafted for each in whole):
        drawn.append(figures.tokens_by_budget(whole, curves, methods, f"tokens-by-nodes-{name}"))
        drawn.append(figures.acceptance_by_depth(whole, methods, f"acceptance-by-depth-{name}"))
    if any(not each.whole_time and each.texts for each in whole):
        drawn.append(figures.time_split(whole, f"time-{name}"))
    return drawn


def _heading(settings: str) -> str:
    sampled, limit, seed = settings.rsplit("-", 2)
    named = re.sub(r"(?<=[a-z])(?=[0-9])", " ", sampled).replace("-", ", ")
    words = "Greedy" if sampled == "greedy" else f"Sampled at {named}"
    return f"{words}, up to {limit} tokens a text, {seed.replace('seed', 'seed ')}"


def _rows(summaries: Sequence[Summary], methods: Sequence[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for color, method in enumerate(methods):
        mine = sorted((each for each in summaries if each.method == method), key=lambda each: each.task != ALL)
        rows += [{**shown(each), "first": place == 0, "color": color % 8} for place, each in enumerate(mine)]
    return rows


def _sources(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    return [
        {
            "method": each.method,
            "source": source,
            "drafted": drafted,
            "accepted": each.counts.accepted_by_source.get(source, 0),
            "share": f"{each.counts.accepted_by_source.get(source, 0) / drafted:.2f}",
        }
        for each in overall(summaries)
        for source, drafted in sorted(each.counts.drafted_by_source.items())
        if drafted
    ]


def _examples(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return one example of each method that drafts: of the tasks' first prompts, the one with most drafted text."""
    best: dict[str, Cell] = {}
    for cell in cells:
        if not cell.example or cell.place.method == BASE or cell.own is None:
            continue
        known = best.get(cell.place.method)
        if known is None or known.own is None or cell.own.accepted > known.own.accepted:
            best[cell.place.method] = cell
    return [_example(cell) for cell in best.values()]


def _example(cell: Cell) -> dict[str, Any]:
    colors: dict[str, int] = {}
    pieces: list[dict[str, Any]] = []
    for step in cell.example:
        for text, source in zip(step.emitted, step.sources, strict=True):
            if source is None:
                pieces.append({"kind": "own", "text": text})
            else:
                color = colors.setdefault(source, len(colors) % 8)
                pieces.append({"kind": "drafted", "text": text, "color": color})
        if step.wasted:
            shown = " ".join(repr(text)[1:-1].strip() or "\N{OPEN BOX}" for text in step.wasted[:_SHOWN_WASTE])
            more = f" +{len(step.wasted) - _SHOWN_WASTE}" if len(step.wasted) > _SHOWN_WASTE else ""
            # after the drafted run and before the target's own token, which is what came instead
            own = [] if step.sources and step.sources[-1] is not None else [pieces.pop()]
            pieces += [{"kind": "wasted", "text": shown + more}, *own]
    legend = [{"name": name, "color": color} for name, color in colors.items()]
    return {"method": cell.place.method, "task": cell.place.task, "pieces": pieces, "legend": legend}


def _facts(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    environment = cells[0].environment
    commits = sorted({cell.environment["code"]["commit"] for cell in cells} - {""})
    facts = [(name, value) for part in ("machine", "versions", "model") for name, value in environment[part].items()]
    return [*facts, ("commit", ", ".join(commits) or "not known")]


def _page(values: Mapping[str, Any]) -> str:
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup, escape

    def drawn(picture: Picture, wide: bool) -> Markup:
        light, dark = (base64.b64encode(picture.png[name]).decode() for name in ("light", "dark"))
        return Markup(  # noqa: S704  # base64 of our own pictures, and an escaped sentence
            f"<figure{' class=wide' if wide else ''}><picture>"
            f'<source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
            f'<img alt="{escape(picture.alt)}" src="data:image/png;base64,{light}"></picture>'
            f"<figcaption>{escape(picture.alt)}</figcaption></figure>"
        )

    loader = FileSystemLoader(Path(__file__).parent / "templates")
    return Environment(loader=loader, autoescape=True).get_template("report.html.j2").render(**values, drawn=drawn)


def markdown(summaries: Sequence[Summary], environment: Mapping[str, Mapping[str, str]], names: Sequence[str]) -> str:
    """Return a table for a README: the speed-up of each method by task, one table for each setting."""
    lines = []
    for name in names:
        mine = [summary for summary in summaries if summary.settings == name]
        tasks = sorted({each.task for each in mine}, key=lambda task: task != ALL)
        lines += [f"{environment['model']['name']}, {environment['model']['dtype']}: {_heading(name)}.", ""]
        heads = ["method", "tokens a step", f"{tasks[0]}, without loops", *tasks]
        lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        for method in dict.fromkeys(each.method for each in mine):
            found = {each.task: each for each in mine if each.method == method}
            whole = found.get(ALL) or next(iter(found.values()))
            cells = [shown(found[task])["speed_up"] if task in found else "-" for task in tasks]
            row = shown(whole)
            lines.append(f"| `{method}` | {row['tokens_a_step']} | {row['honest']} | {' | '.join(cells)} |")
        lines += ["", *advise(mine, environment), ""]
    return "\n".join(lines)


def _written(out: Path, page: str, table: str, pictures: Sequence[Picture]) -> list[Path]:
    folder = out / PICTURES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for each in pictures:
            for theme, png in each.png.items():
                write_file(folder / f"{each.name}-{theme}.png", png)
        write_file(out / TABLE, table.encode())
        write_file(out / PAGE, page.encode())
    except OSError as error:
        raise UsageError(
            f"The report cannot be written to {out} ({error.strerror}); give another folder as --out."
        ) from error
    return [out / PAGE, out / TABLE, folder]
