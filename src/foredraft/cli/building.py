"""What the verbs that build something from a corpus show and keep: progress, token shards, what was skipped.

Knows terminals, and the folder of token shards beside an output. Does not know what is built from them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from foredraft.cli.screen import say
from foredraft.errors import UsageError

if TYPE_CHECKING:  # reading is imported when a verb runs, so that help stays quick
    from foredraft.corpus.documents import ReadReport
    from foredraft.corpus.shards import ShardProgress


class Tell(Protocol):
    """Shows how far a phase is: `done` of `total`; and its rate, from a `count` of what `unit` names."""

    def __call__(self, phase: str, done: int, total: int, count: int, unit: str) -> None: ...  # noqa: D102  # the class says it


@contextmanager
def progress_bars() -> Iterator[Tell]:
    """Show a bar for each phase on standard error, until the block ends."""
    columns = (TaskProgressColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    phases: dict[str, TaskID] = {}
    with Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=Console(stderr=True)) as bar:

        def tell(phase: str, done: int, total: int, count: int, unit: str) -> None:
            if phase not in phases:
                phases[phase] = bar.add_task(phase, total=total, rate="")
            task = bar.tasks[phases[phase]]
            rate = f"{count / task.elapsed:,.0f} {unit}/s" if task.elapsed else ""
            bar.update(task.id, completed=done, rate=rate)

        yield tell


def tokenizing(tell: Tell, phase: str) -> "Callable[[ShardProgress], None]":
    """Return a function that shows, as `phase`, how far making token shards is."""
    return lambda state: tell(phase, state.done, state.total, state.tokens, "tokens")


@contextmanager
def resumable_shards(out: Path) -> Iterator[Path]:
    """Name the folder beside `out` for the token shards of a build, and remove it when the build ends well.

    It goes, too, where the build was refused for what the caller asked. Otherwise it stays, and a sentence says so.
    """
    from foredraft.corpus.shards import has_shards, remove_shards

    folder = out.with_name(out.name + ".shards")
    try:
        yield folder
    except UsageError:
        remove_shards(folder)
        raise
    except BaseException:
        if has_shards(folder):
            say(f"What was tokenised so far is kept in {folder}; the same command goes on from there.", "yellow")
        else:
            remove_shards(folder)
        raise
    remove_shards(folder)


def print_skipped(read: "ReadReport") -> None:
    """Say what was left out of the inputs, if anything."""
    if read.skipped:
        counts = {name: count for name, count in asdict(read).items() if count and name not in ("files", "documents")}
        typer.echo(
            "Skipped: " + ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())
            + ". Use --strict to stop at the first."
        )  # fmt: skip
