"""Traces for `foredraft train`: the texts that a model wrote itself, and what it would have said at each place.

Brings together a model, the texts it is asked to continue, and a folder. Does not depend on what learns from them.
"""

import ast
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from foredraft.atomic_file import check_place, store_file
from foredraft.cli import flags
from foredraft.cli.job import load_plain
from foredraft.cli.screen import say, working, working_in_phases
from foredraft.errors import UsageError
from foredraft.options import options_from

_SOURCES = "sources.json"  # in a folder of traces: what they are made of, from the start

if TYPE_CHECKING:  # torch is imported when a verb runs, so that help stays quick
    from foredraft.api import Generator
    from foredraft.training.sources import Source
    from foredraft.training.traces import Asked, TraceOptions, Traces

T = TypeVar("T")

Model = Annotated[str, typer.Option(help="The model to draft for: smollm2, a GGUF file, a hub id, or a folder")]
Data = Annotated[
    list[Path],
    typer.Option(
        help="Texts: .jsonl of messages or text (also .gz), .txt, a folder; or a folder of traces. A file named again "
        "has its prompts answered again, sampled"
    ),
]


def traces(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="The folder to write; a killed run goes on in it")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, such as written_tokens=50000, open_tokens=0")
    ] = None,
    device: flags.DeviceOption = None,
    dtype: flags.DtypeOption = "auto",
) -> None:
    """Let the model write texts, mix them with open text, and note what it would have said at each place."""
    from foredraft.training.traces import TraceOptions

    options = assigned(TraceOptions, settings, "--set")
    with alone(out):
        check_texts(out, data, options)
        with working(f"loading {model}") as tell:
            generator = load_plain(model, dtype, False, tell, device)
        made_traces(generator, model, data, out, options)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder in which a killed run goes on; StoreError if another process does."""
    from foredraft.index.storage import write_lock

    check_place(folder, folder=True)
    folder.mkdir(parents=True, exist_ok=True)
    with write_lock(folder / "lock", folder):
        try:
            yield
        finally:
            if [path.name for path in folder.iterdir()] == ["lock"]:  # the command was refused
                shutil.rmtree(folder, ignore_errors=True)  # Windows keeps files that are open


def check_texts(traces: Path, data: list[Path], options: "TraceOptions") -> None:
    """Keep in the folder `traces` what they are made of; UsageError if they were made of something else.

    Texts are compared by name and size. If they are gone, complete traces serve without them.
    """
    from foredraft.corpus.documents import find_inputs
    from foredraft.training.traces import TEXTS, is_traces

    kept, run = traces / _SOURCES, traces.resolve()
    for path in data:
        if (path / _SOURCES).exists() and not is_traces(path):
            raise UsageError(f"{path} holds unfinished traces; first repeat the command that began to make them.")
    if is_traces(traces) and not all(path.exists() for path in data):
        return
    files = [file.resolve() for file in find_inputs(data) if run not in file.resolve().parents]
    sizes = {str(file): file.stat().st_size for file in files}
    inputs = [str(path.resolve()) for path in data]  # one that is named twice is answered twice
    told = json.dumps({"inputs": inputs, "bytes": sizes, "options": asdict(options)}, indent=1)
    if not (traces / TEXTS).exists():
        store_file(kept, told.encode())
    elif kept.exists() and kept.read_text("utf-8") != told:
        raise UsageError(
            f"The traces in {traces} were made of other texts, or with other options of traces; give the same, or "
            f"another --out, or remove {traces}."
        )


def made_traces(
    generator: "Generator", model: str, data: list[Path], folder: Path, options: "TraceOptions"
) -> "Traces":
    """Return the traces in a folder, made if they are not complete, and print how many tokens of which kind there are.

    UsageError for those of another model than `model`, and for a window longer than the model's.
    """
    from foredraft.model.fingerprint import fingerprint
    from foredraft.training.traces import KINDS, is_traces, open_traces

    if not is_traces(folder):
        _make_traces(generator, data, folder, options)
    opened = open_traces(folder)
    if opened.fingerprint != fingerprint(generator.target.model):
        raise UsageError(
            f"The traces in {folder} were written by another model than {model}; make its own with `foredraft train "
            "traces`."
        )
    counts = [f"{int((opened.kinds == number).sum()) * opened.window:,} {kind}" for number, kind in enumerate(KINDS)]
    typer.echo(f"{folder}: {', '.join(counts)} tokens, {int(opened.held.sum()) * opened.window:,} of them held out.")
    return opened


def _make_traces(generator: "Generator", data: list[Path], out: Path, options: "TraceOptions") -> None:
    from foredraft.corpus.documents import ReadReport
    from foredraft.model.fingerprint import fingerprint
    from foredraft.training.sources import in_turns, read_sources
    from foredraft.training.traces import label_texts, write_texts

    report, identity, window = ReadReport(), fingerprint(generator.target.model), generator.target.window
    if window is not None and max(options.window, options.answer_tokens + 1) > window:
        raise UsageError(
            f"The model's window is {window} tokens; the traces' window of {options.window} may not be larger, and "
            f"answer_tokens, {options.answer_tokens}, must be less."
        )
    readers = [read_sources(path, generator.tokenizer, report) for path in data]

    def fits(source: "Source") -> bool:
        """Return whether a prompt has room for its answer; one that is cut would be another prompt."""
        room = window is None or len(source.prompt) + options.answer_tokens <= window
        report.unusable_rows += not room
        return room

    sources = filter(fits, in_turns(readers))

    def begin(text: "Asked", most: int) -> Any:
        how = {"do_sample": True, "temperature": options.temperature, "seed": text.seed} if text.sampled else {}
        return generator.begin(generator.encode(text.prompt), **generator.arguments({"max_new_tokens": most, **how}))

    def write(texts: "Sequence[Asked]", most: int) -> list[list[int]]:
        runs = generator.write([begin(text, most) for text in texts])
        return [list(generator.result(run).token_ids) for run in runs]

    with working_in_phases("writing") as tell:
        write_texts(out, sources, write, options, identity, tell)
        if report.left_out:
            say(f"{sum(report.left_out.values())} lines or rows were left out.", "yellow")
        label_texts(out, generator.target, options, identity, tell)


def assigned(kind: type[T], settings: list[str] | None, what: str) -> T:
    """Build options from strings such as `steps=500`; UsageError for others."""
    given: dict[str, Any] = {}
    for setting in settings or []:
        name, sign, value = setting.partition("=")
        if not sign or not name:
            raise UsageError(f"{setting!r} is not of the form NAME=VALUE.")
        if name in given:
            raise UsageError(f"{name} is given twice. Give it once.")
        try:
            given[name] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # it is a text
            given[name] = value
    return options_from(kind, given, what)
