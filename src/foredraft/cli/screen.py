"""Output of the command line: messages and progress on standard error, texts and tables on standard output.

Does not depend on what is printed, except for pieces of text and their sources.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, cycle
from threading import Timer
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from foredraft.generation import Piece

PALETTE = ("green", "cyan", "magenta", "yellow", "blue", "red")  # of a drafter's sources, in order

_PIPE_WIDTH = 180  # columns of a table without a terminal: those of `bench run` fit (chosen)
# control sequences begin with ESC, or with one of the C1 codes
_CONTROLS = {0x1B: "\N{SYMBOL FOR ESCAPE}", **dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}")}
_PATIENCE = 2.0  # seconds before a phase is announced without a terminal (chosen)


def say(sentence: str, style: str = "red") -> None:
    """Print one line to standard error, without wrapping."""
    console = Console(stderr=True, highlight=False)
    console.print(Text(" ".join(sentence.split()), style), soft_wrap=True)


def show_json(value: object) -> None:
    """Print a value as one line of JSON on standard output."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")


def show_facts(facts: Mapping[str, object]) -> None:
    """Print a line for each fact that is not empty."""
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        if value not in (None, ""):
            sys.stdout.write(f"{name:{width}}  {f'{value:,}' if isinstance(value, int) else value}\n")


def show_table(headings: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None) -> None:
    """Print a table on standard output, with number columns right-aligned; nothing without rows.

    A heading may end in the format of its column's values, as in `seconds|.2f`; NaN and None are shown as `-`.
    """
    if not rows:
        return
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    columns: list[list[Text]] = []
    for heading, values in zip(headings, zip(*rows, strict=True), strict=True):
        name, _, form = heading.partition("|")
        texts = ["nan" if value is None else format(value, form) for value in values]
        figures = all(text.lstrip("-")[:1].isdigit() or text in ("", "-", "nan") for text in texts)
        table.add_column(name, justify="right" if figures and columns else "left", overflow="fold")
        columns.append([Text("-" if text == "nan" else text) for text in texts])
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    console.print(table)


@contextmanager
def working(subject: str) -> Iterator[Callable[[float, str], None]]:
    """Show progress on standard error: a bar, or without a terminal one line for each phase that takes long.

    Yields a function to call with the share done, 0 to 1, and a description.
    """
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if console.is_terminal:
        left = (TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left"))
        described = TextColumn("{task.description}", markup=False)  # a path may have brackets
        columns = (SpinnerColumn(), described, BarColumn(), TimeElapsedColumn(), *left)
        with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
            task = bar.add_task(subject, total=None)
            yield lambda share, what: bar.update(task, total=1.0, completed=share, description=what)
        return
    said, timer = "", Timer(0, say)

    def tell(_share: float, what: str) -> None:
        nonlocal said, timer
        if what != said:
            timer.cancel()
            said, timer = what, Timer(_PATIENCE, say, (f"{what} ...", "dim"))
            timer.daemon = True
            timer.start()

    tell(0.0, subject)
    try:
        yield tell
    finally:
        timer.cancel()


@contextmanager
def working_in_phases(subject: str) -> Iterator[Callable[[str, int, int], None]]:
    """As `working`; what is yielded takes a phase, the work done, and its total."""
    with working(subject) as tell:
        yield lambda phase, done, total: tell(done / max(total, 1), phase)


def counting(tell: Callable[[float, str], None], total: int, subject: str) -> Callable[[], None]:
    """Return a function to call after each of `total` pieces of work; it passes the share done to `tell`."""
    counts = count(1)
    return lambda: tell(next(counts) / total, subject)


class Ink:
    """Prints pieces of text to standard output, drafted ones in the colour of their source.

    `color` is None for colours if standard output is a terminal and NO_COLOR is not set.
    """

    def __init__(self, color: bool | None, sources: Sequence[str]) -> None:
        if color is None:
            color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._system = ColorSystem.STANDARD if color else None
        self._styles = {name: Style.parse(each) for name, each in zip(sources, cycle(PALETTE), strict=False)}
        self._at_line_start, self._has_drafts = True, False

    def print(self, pieces: "Iterable[Piece]") -> None:
        """Print pieces as they come, and end the last line."""
        try:
            for piece in pieces:
                self.write(piece)
        finally:
            if not self._at_line_start:
                sys.stdout.write("\n")
                sys.stdout.flush()

    def write(self, piece: "Piece") -> None:
        shown = piece.text
        if self._system or sys.stdout.isatty():  # a text must not send control sequences to the terminal
            shown = shown.translate(_CONTROLS)
        sys.stdout.write(
            self._styles.get(piece.drafted_by or "", Style.null()).render(shown, color_system=self._system)
        )
        sys.stdout.flush()
        self._has_drafts |= piece.drafted_by is not None
        if shown:
            self._at_line_start = shown.endswith("\n")

    def legend(self) -> None:
        """Print the colours of the sources to standard error, if any was used."""
        if self._system and self._has_drafts:
            names = ", ".join(style.render(name, color_system=self._system) for name, style in self._styles.items())
            sys.stderr.write(f"Drafted by {names}; the rest was not drafted.\n")
