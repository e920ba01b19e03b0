"""`foredraft compile`: compile a model's forward for this machine, and say what it gains.

Parses and prints; `foredraft.model.compiled.build` does the work. Does not catch errors: the command's main function
turns them into a sentence and an exit status.
"""

import os
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import flags
from foredraft.cli.screen import show_json, show_table, working
from foredraft.model.gguf import SMOLLM2

if TYPE_CHECKING:
    from foredraft.model.compiled.package import CompiledRecord


def compile_model(
    model: flags.ModelArgument = SMOLLM2,
    dtype: Annotated[str, flags.in_model(help="auto takes the checkpoint's")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to compile for; else torch's number")] = None,
    again: Annotated[bool, typer.Option("--again", help="Compile also what was compiled before")] = False,
    as_json: flags.JsonOption = False,
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
    rows, times = _times(record)
    if as_json:
        facts = asdict(record)
        del facts["costs"]
        milliseconds = {name: [1e3 * each for each in found] for name, found in times.items()}
        show_json({"folder": str(folder), "bytes": size, "rows": rows, "milliseconds": milliseconds, **facts})
        return
    quickest = record.quickest()
    shown = [
        (str(n), f"{1e3 * eager:.2f}", f"{1e3 * used:.2f}", f"{eager / used:.2f}", quickest[n])
        for n, eager, used in zip(rows, times["eager"], times["used"], strict=True)
    ]
    show_table(("rows", "as it is, ms", "compiled, ms", "times as fast", "package"), shown, "What a pass costs")
    typer.echo(f"{size / 2**20:,.0f} MiB in {folder}")
    if record.same_bits:
        typer.echo("A row comes out the same to the last bit, alone and beside others.")
    for sentence in record.told():
        typer.echo(sentence)


def _times(record: "CompiledRecord") -> tuple[tuple[int, ...], dict[str, list[float]]]:
    """Return the timed row counts, and seconds by them: of the model as it is, and of what generation will use."""
    from foredraft.model.compiled.package import EAGER, MOST_ROWS

    rows, quickest = record.costs[EAGER].rows, record.quickest()
    tables = {name: curve.table(MOST_ROWS).tolist() for name, curve in record.costs.items()}
    return rows, {"eager": [tables[EAGER][n] for n in rows], "used": [tables[quickest[n]][n] for n in rows]}
