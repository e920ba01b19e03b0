"""`foredraft compile`: compile a model's forward for this machine, and say what it gains.

Parses and prints; `foredraft.model.compiled.build` does the work. Does not catch errors: the command's main function
turns them into a sentence and an exit status.
"""

import json
import os
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.screen import working
from foredraft.model.gguf import SMOLLM2

if TYPE_CHECKING:
    from foredraft.model.compiled.package import CompiledRecord


def compile_model(
    model: Annotated[str, typer.Argument(help="smollm2, a GGUF file, a hub id, or a folder")] = SMOLLM2,
    dtype: Annotated[str, typer.Option(help="auto takes the checkpoint's")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to compile for; else torch's number")] = None,
    again: Annotated[bool, typer.Option("--again", help="Compile also what was compiled before")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    background: Annotated[bool, typer.Option("--background", help="Give way to other processes")] = False,
) -> None:
    """Compile a model's forward for this machine; generation then uses it by itself."""
    if background and hasattr(os, "nice"):
        with suppress(OSError):
            os.nice(10)
    with working(f"loading {model}") as tell:
        import torch

        from foredraft.cache_folder import cache_folder
        from foredraft.model.compiled.build import compile_forward
        from foredraft.model.loading import load_model

        if threads is not None:
            torch.set_num_threads(threads)
        loaded = load_model(model, dtype, "cpu")
        folder, record = compile_forward(loaded, cache_folder(), again=again, progress=tell)
        size = sum((folder / package.file).stat().st_size for package in record.packages)
    if as_json:
        milliseconds = {name: [1e3 * each for each in times] for name, times in _times(record).items()}
        facts = {"folder": str(folder), "bytes": size, "rows": _rows(record), "milliseconds": milliseconds}
        packages = [asdict(package) for package in record.packages]
        facts |= {"same_bits": record.same_bits, "packages": packages, "torch": record.torch, "warning": record.warning}
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print(record)
        typer.echo(f"{size / 2**20:,.0f} MiB in {folder}")
        if record.same_bits:
            typer.echo("A row comes out the same to the last bit, alone and beside others.")
        for sentence in record.told():
            typer.echo(sentence)


def _times(record: "CompiledRecord") -> dict[str, list[float]]:
    """Return seconds by the timed row counts: of the model as it is, and of what generation will use."""
    from foredraft.model.compiled.package import EAGER, MOST_ROWS

    quickest = record.quickest()
    tables = {name: curve.table(MOST_ROWS).tolist() for name, curve in record.costs.items()}
    rows = _rows(record)
    return {EAGER: [tables[EAGER][n] for n in rows], "used": [tables[quickest[n]][n] for n in rows]}


def _rows(record: "CompiledRecord") -> tuple[int, ...]:
    """Return the row counts that were timed."""
    from foredraft.model.compiled.package import EAGER

    return record.costs[EAGER].rows


def _print(record: "CompiledRecord") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="What a pass costs", title_justify="left")
    for heading in ("rows", "as it is, ms", "compiled, ms", "times as fast", "package"):
        table.add_column(heading, justify="right")
    times, quickest = _times(record), record.quickest()
    for rows, eager, used in zip(_rows(record), times["eager"], times["used"], strict=True):
        table.add_row(str(rows), f"{1e3 * eager:.2f}", f"{1e3 * used:.2f}", f"{eager / used:.2f}", quickest[rows])
    Console(highlight=False).print(table)
