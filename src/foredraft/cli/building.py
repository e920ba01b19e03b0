"""What the verbs that build something from a corpus take, show and keep: a tokenizer, progress, token shards.

Knows terminals, what transformers' tokenizers carry, and the folder of token shards beside an output. Does not know
what is built.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from foredraft.cli.screen import say
from foredraft.errors import UsageError

if TYPE_CHECKING:  # reading is imported when a verb runs, so that help stays quick
    from foredraft.corpus.documents import ReadReport
    from foredraft.corpus.words import Words

Inputs = Annotated[list[Path], typer.Argument(help="Files or folders: .txt .md .py .jsonl (also .gz), .parquet")]
ModelOption = Annotated[
    str | None, typer.Option(help="Model whose tokenizer to use: smollm2, a GGUF file, a hub id, or a folder")
]
TokenizerOption = Annotated[Path | None, typer.Option(help="tokenizer.json, or a folder that has one")]
StrictOption = Annotated[bool, typer.Option("--strict", help="Stop at the first line that cannot be used")]

_UNITS = {"tokenising": "bytes", "merging": "tri-grams"}


class Tell(Protocol):
    """Shows how far a phase is, `done` of `total`, and its rate: of a `count` of what `unit` names; else of `done`."""

    def __call__(  # noqa: D102  # the class says it
        self, phase: str, done: int, total: int, count: int | None = None, unit: str | None = None
    ) -> None: ...


@contextmanager
def progress_bars() -> Iterator[Tell]:
    """Show a bar for each phase on standard error, until the block ends."""
    columns = (TaskProgressColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    phases: dict[str, TaskID] = {}
    with Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=Console(stderr=True)) as bar:

        def tell(phase: str, done: int, total: int, count: int | None = None, unit: str | None = None) -> None:
            if phase not in phases:
                phases[phase] = bar.add_task(phase, total=total, rate="")
            task = bar.tasks[phases[phase]]
            count, unit = done if count is None else count, unit or _UNITS.get(phase, "tokens")
            rate = f"{count / task.elapsed:,.0f} {unit}/s" if task.elapsed else ""
            bar.update(task.id, completed=done, rate=rate)

        yield tell


@contextmanager
def resumable_shards(out: Path) -> Iterator[Path]:
    """Name the folder beside `out` for the token shards of a build, and remove it when the build ends well.

    It goes, too, where the build was refused for what the caller asked. Otherwise it stays, and a sentence says so.
    """
    from foredraft.corpus.shards import has_shards, remove_shards

    folder = out.with_name(out.name + ".shards")
    kept = False
    try:
        yield folder
    except BaseException as error:
        kept = not isinstance(error, UsageError) and has_shards(folder)
        if kept:
            say(f"What was tokenised so far is kept in {folder}; the same command goes on from there.", "yellow")
        raise
    finally:
        if not kept:
            remove_shards(folder)


def print_skipped(read: "ReadReport") -> None:
    """Say what was left out of the inputs, if anything."""
    if read.left_out:
        counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in read.left_out.items())
        typer.echo(f"Skipped: {counts}. Use --strict to stop at the first.")


def words_of(model: str | None, tokenizer: Path | None) -> "Words":
    """Return how text becomes ids, from a model's name or a tokenizer's file.

    Args:
        model: `smollm2`, a GGUF file, a hub id, or a folder.
        tokenizer: a tokenizer.json, or a folder that has one.

    Raises:
        UsageError: not exactly one of them is given, or what is given cannot be loaded.
    """
    from foredraft.corpus.words import words_of_file

    if model is not None and tokenizer is None:
        return _words_of_model(model)
    if tokenizer is not None and model is None:
        return words_of_file(tokenizer)
    raise UsageError("Give either --model or --tokenizer, so that the text can be turned into ids.")


def _words_of_model(name: str) -> "Words":
    """Take the tokenizer of a model, as transformers loads it."""
    from foredraft.corpus.words import Words
    from foredraft.model.loading import load_tokenizer

    tokenizer: Any = load_tokenizer(name)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UsageError(
            f"The tokenizer of {name} is not one of the tokenizers library. Give --tokenizer with a tokenizer.json."
        )
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # several by name
        template = template.get("default")
    specials = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if not isinstance(value, list)}
    return Words(
        tokenizer.backend_tokenizer.to_str(),
        eos_token_id=tokenizer.eos_token_id,
        chat_template=template or None,
        special_tokens=specials,
    )
