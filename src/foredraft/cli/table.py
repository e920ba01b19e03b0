"""`foredraft table`: build, describe and check tri-gram tables.

Parses, prints, and brings together the tokenizer, the reader and the builder. Does not catch errors: the command's
main function turns them into a sentence and an exit status.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from foredraft.errors import UsageError

if TYPE_CHECKING:  # reading, counting and tokenising are imported when a verb runs, so that help stays quick
    from tokenizers import Tokenizer

    from foredraft.corpus.build import BuildProgress, BuildReport
    from foredraft.corpus.shards import ReadReport, Render

app = typer.Typer(no_args_is_help=True, help="Build, describe and check tri-gram tables.")


@dataclass(frozen=True, slots=True)
class _Words:
    """How text becomes ids: the tokenizer, the id that ends a document (if known), and how a chat is worded."""

    tokenizer: "Tokenizer"
    eos_token_id: int | None
    render: "Render"


@app.command()
def build(
    inputs: Annotated[list[Path], typer.Argument(help="Files or folders: .txt .md .py .jsonl (also .gz), .parquet")],
    out: Annotated[Path, typer.Option(help="The table to write")],
    model: Annotated[str | None, typer.Option(help="Model whose tokenizer to use: a name, a folder, or demo")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json, or a folder that has one")] = None,
    keep: Annotated[int, typer.Option(help="Successors kept of each pair of tokens")] = 12,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first line that cannot be used")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists")] = False,
) -> None:
    """Count the tri-grams of a corpus into a table."""
    from foredraft.corpus.build import build_trigram_table
    from foredraft.corpus.fingerprint import vocabulary_size
    from foredraft.corpus.shards import ReadReport, find_inputs, read_documents, total_bytes

    if (model is None) == (tokenizer is None):
        raise UsageError("Give either --model or --tokenizer, so that the text can be turned into ids.")
    files = find_inputs(inputs)
    words = _words_of_model(model) if model is not None else _words_of_file(Path(tokenizer or ""))
    read = ReadReport()
    with _progress() as bar:
        report = build_trigram_table(
            read_documents(files, report=read, render=words.render, strict=strict),
            words.tokenizer,
            vocabulary_size(words.tokenizer),
            out,
            keep=keep,
            eos_token_id=words.eos_token_id,
            overwrite=overwrite,
            metadata={"inputs": [path.name for path in inputs]},
            progress=_shown(bar, total_bytes(files)),
        )
    _print_report(report, read)


@app.command()
def info(
    file: Annotated[Path, typer.Argument(help="The table")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Describe a table."""
    from foredraft.index.trigram import table_info

    fields = table_info(file)
    if as_json:
        typer.echo(json.dumps(fields, indent=2))
        return
    for name, value in (fields | fields.pop("metadata")).items():
        typer.echo(f"{name.replace('_', ' '):18} {f'{value:,}' if isinstance(value, int) else value}")


@app.command()
def check(file: Annotated[Path, typer.Argument(help="The table")]) -> None:
    """Verify a table to the last byte: checksums and structure."""
    from foredraft.index.trigram import check_table

    table = check_table(file)
    typer.echo(f"{file} is sound: {len(table.arrays.second):,} bigrams, {len(table.arrays.tokens):,} tri-grams.")


# --- progress and report


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def _shown(bar: Progress, size: int) -> "Callable[[BuildProgress], None]":
    """Return a function that shows a build's progress: its phase, its rate, and the time left."""
    tasks: dict[str, Any] = {}

    def show(progress: "BuildProgress") -> None:
        total = size if progress.total is None else progress.total
        if progress.phase not in tasks:
            tasks[progress.phase] = bar.add_task(progress.phase, total=total, rate="")
        task = bar.tasks[tasks[progress.phase]]
        done, unit = (progress.tokens, "tokens") if progress.phase == "reading" else (progress.done, "tri-grams")
        rate = f"{done / task.elapsed:,.0f} {unit}/s" if task.elapsed else ""
        bar.update(task.id, completed=progress.done, rate=rate)

    return show


def _print_report(report: "BuildReport", read: "ReadReport") -> None:
    typer.echo(
        f"{report.path}: {report.bytes / 2**20:,.1f} MiB, {report.bigrams:,} bigrams, {report.trigrams:,} of "
        f"{report.distinct_trigrams:,} tri-grams kept, from {report.tokens:,} tokens in {report.documents:,} documents."
    )
    if read.skipped:
        counts = {name: count for name, count in asdict(read).items() if count and name not in ("files", "documents")}
        typer.echo(
            "Skipped: " + ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())
            + ". Use --strict to stop at the first."
        )  # fmt: skip


# --- tokenizers


def _words_of_model(name: str) -> _Words:
    """Take the tokenizer of a model, as transformers loads it."""
    from foredraft.model.loading import load_tokenizer

    tokenizer = load_tokenizer(name)

    def render(messages: list[dict[str, str]]) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # a template may raise anything about a chat it does not take
            raise UsageError(f"{type(error).__name__}: {error}") from error

    has_template = bool(getattr(tokenizer, "chat_template", None))
    return _Words(tokenizer.backend_tokenizer, tokenizer.eos_token_id, render if has_template else _join_contents)


def _join_contents(messages: list[dict[str, str]]) -> str:
    """Word a chat for a model that was made for none: what is said, without who says it."""
    return "\n".join(message["content"] for message in messages)


def _words_of_file(path: Path) -> _Words:
    """Take tokenizer.json and, where they lie beside it, the end-of-text token and the chat template."""
    from tokenizers import Tokenizer

    from foredraft.corpus.shards import join_messages

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"The tokenizer {file} does not exist. Give a tokenizer.json, or a folder that has one.")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise UsageError(f"{file} is not a tokenizer.json that the tokenizers library reads ({error}).") from error
    config_file, template_file = file.with_name("tokenizer_config.json"), file.with_name("chat_template.jinja")
    try:
        config = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
    except ValueError as error:
        raise UsageError(f"{config_file} is not JSON ({error}). Mend it, or move it away.") from error
    specials = {name: _token(config.get(name)) for name in ("bos_token", "eos_token")}
    render = _template(template_file.read_text("utf-8"), specials) if template_file.is_file() else join_messages
    eos = specials["eos_token"]
    return _Words(tokenizer, tokenizer.token_to_id(eos) if eos else None, render)


def _token(value: Any) -> str:
    """Return a special token's text, which tokenizer_config.json holds plain or as {"content": ...}."""
    return str((value.get("content") if isinstance(value, dict) else value) or "")


def _template(source: str, specials: dict[str, str]) -> "Render":
    """Return a function that words chats by a Jinja chat template, set up as transformers does."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise UsageError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UsageError(f"chat_template.jinja is not a Jinja template ({error}). Mend it, or move it away.") from error

    def render(messages: list[dict[str, str]]) -> str:
        try:
            return template.render(messages=messages, add_generation_prompt=False, **specials)
        except (jinja2.TemplateError, TypeError) as error:
            raise UsageError(f"the chat template raised {type(error).__name__}: {error}") from error

    return render
