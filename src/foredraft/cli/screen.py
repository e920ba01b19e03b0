"""What the command line writes with: sentences and progress on standard error, texts and tables on standard output.

Knows streams, terminals and colours, and pieces of text with the name of who drafted them. Does not know what for.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
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

PALETTE = ("green", "cyan", "magenta", "yellow", "blue", "red")
"""Colours of drafters, in the order of their sources; the model's own tokens keep the terminal's colour."""

_PICTURE_WIDTH = 90  # columns of a saved text
_PIPE_WIDTH = 160  # columns of a table where there is no terminal
_PATIENCE = 2.0  # seconds; what is done sooner is not worth a line


def say(sentence: str, style: str = "red") -> None:
    """Write one line to standard error, unbroken."""
    console = Console(stderr=True, highlight=False)
    console.print(Text(" ".join(sentence.split()), style), soft_wrap=True)


def show_json(value: object) -> None:
    """Print a value as one line of JSON on standard output."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")


def show_facts(facts: Mapping[str, object]) -> None:
    """Print a line for each fact that there is something to say of."""
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        if value not in (None, ""):
            sys.stdout.write(f"{name:{width}}  {f'{value:,}' if isinstance(value, int) else value}\n")


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Print a table on standard output, columns of figures set to the right; nothing where there is no row."""
    if not rows:
        return
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for place, heading in enumerate(headings):
        figures = all(row[place].lstrip("-")[:1].isdigit() or row[place] in ("", "-") for row in rows)
        table.add_column(heading, justify="right" if figures and place else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)).print(table)


def wants_color(asked: bool | None) -> bool:
    """Return whether to colour: as asked, else on a terminal unless NO_COLOR is set."""
    return asked if asked is not None else sys.stdout.isatty() and not os.environ.get("NO_COLOR")


@contextmanager
def working(subject: str) -> Iterator[Callable[[float, str], None]]:
    """Show on standard error that something is going on: a bar, or off a terminal a line for what takes its time.

    Yields:
        A function to tell the share done, 0 to 1, and what is being done.
    """
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if console.is_terminal:
        left = (TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left"))
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), *left)
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


def counting(tell: Callable[[float, str], None], total: int, subject: str) -> Callable[[], None]:
    """Return a function to call after each of `total` pieces of work, which tells `tell` the share done."""
    count = 0

    def done() -> None:
        nonlocal count
        count += 1
        tell(count / total, subject)

    return done


class Ink:
    """Writes pieces of text to standard output as they come, drafted ones in the colour of one of `sources`."""

    def __init__(self, color: bool, sources: Sequence[str]) -> None:
        self._color = color
        self._styles = {name: Style.parse(PALETTE[i % len(PALETTE)]) for i, name in enumerate(sources)}
        self._at_line_start = True
        self._colored = False
        self._written = Text()

    def write(self, piece: "Piece") -> None:
        """Write a piece at once."""
        if not piece.text:
            return
        self._at_line_start = piece.text.endswith("\n")
        shown = piece.text
        if self._color or sys.stdout.isatty():  # a text must not command the terminal that shows it
            shown = shown.replace("\x1b", "\N{SYMBOL FOR ESCAPE}")
        sys.stdout.write(self._painted(shown, piece.drafted_by))
        sys.stdout.flush()
        self._written.append(piece.text, self._styles.get(piece.drafted_by or "", ""))

    def picture(self, title: str) -> str:
        """Return what was written, in colour and with a legend, as an SVG picture."""
        console = Console(record=True, width=_PICTURE_WIDTH, file=StringIO(), highlight=False)
        drafted = {span.style for span in self._written.spans}
        legend = Text("\n").join(Text(name, style) for name, style in self._styles.items() if style in drafted)
        console.print(self._written, Text("\nDrafted by:"), legend, Text("the model's own"), sep="\n")
        return console.export_svg(title=title)

    def finish(self) -> None:
        """End the last line."""
        if not self._at_line_start:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._at_line_start = True

    def legend(self) -> None:
        """Say on standard error which colour is whose, if any was used."""
        if self._colored:
            names = ", ".join(self._painted(name, name) for name in self._styles)
            sys.stderr.write(f"Drafted by {names}; the rest is the model's own.\n")

    def _painted(self, text: str, source: str | None) -> str:
        style = self._styles.get(source) if self._color and source is not None else None
        if style is None:
            return text
        self._colored = True
        return style.render(text, color_system=ColorSystem.STANDARD)
