"""`foredraft info` and `foredraft compile`: what a model is, what a pass costs here, and what compiling gains.

Reads the configuration first, so that an unsupported model is refused before its weights are loaded.
"""

import os
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import flags
from foredraft.cli.screen import show_facts, show_json, show_table, working
from foredraft.errors import UsageError
from foredraft.model.gguf import SMOLLM2

if TYPE_CHECKING:  # torch and transformers are imported when a verb runs, so that help stays quick
    from pathlib import Path

    from foredraft.contracts import CostCurve
    from foredraft.model.compiled.package import CompiledRecord

NOT_COMPILED = "Nothing is compiled of this model for this machine; `foredraft compile MODEL` does it (CPU only)."


def info(
    model: flags.ModelArgument = SMOLLM2,
    as_json: flags.JsonOption = False,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Read the configuration, load no weights")] = False,
    dtype: flags.DtypeOption = "auto",
    device: flags.DeviceOption = None,
) -> None:
    """Say whether and how a model is supported, and measure what verifying drafts costs."""
    with working(f"reading {model}"):
        facts = _described(model)
    if not no_measure:
        try:
            facts |= _measured(model, dtype, device)
        except UsageError as error:  # the configuration says much without the weights
            facts |= {"note": f"Not measured. {error}"}
    if as_json:
        show_json(facts)
    else:
        _print(facts)


def _described(model: str) -> dict[str, Any]:
    """Return what the configuration tells; raises `UnsupportedModelError` where it rules the model out."""
    from foredraft.model.loading import build_without_weights, load_config
    from foredraft.model.support import inspect

    config = load_config(model)
    support = inspect(config)
    empty = build_without_weights(config)
    return {
        "model": model,
        "family": support.family,
        "supported": True,
        "tested": support.tested,
        "layers": len(support.layer_types),
        "attention": dict(Counter(support.layer_types)),
        "sliding_window": next((window for window in support.windows if window is not None), None),
        "window": support.window,
        "window_note": support.window_note,
        "vocabulary": int(empty.get_output_embeddings().weight.shape[0]),
        "parameters": sum(parameter.numel() for parameter in empty.parameters()),
        "dtype": str(config.dtype or "float32").removeprefix("torch."),
    }


def _measured(model: str, dtype: str, device: str | None) -> dict[str, Any]:
    """Load the weights; return what only they tell, and what passes cost by their rows."""
    with working(f"loading {model}") as tell:
        from foredraft.cache_folder import cache_path
        from foredraft.model.compiled.package import kept_forward
        from foredraft.model.cost import measured_cost
        from foredraft.model.loading import load_model
        from foredraft.model.rounding import dtype_name
        from foredraft.model.target import TorchTarget

        loaded = load_model(model, dtype, device)
        target = TorchTarget(loaded, kept_forward(loaded))
        tell(0.0, "measuring what verification costs")
        curve = measured_cost(target, cache_path())  # the figures that generation uses on this machine
    return {
        "dtype": dtype_name(target.model),
        "device": str(target.device),
        "cost": cost_rows(curve),
        "compiled": target.compiled.record.told() if target.compiled is not None else [NOT_COMPILED],
    }


def _print(facts: dict[str, Any]) -> None:
    tested = "compared with plain decoding in foredraft's tests" if facts["tested"] else (
        "not among those foredraft's tests cover; a tree is compared with plain rows when it is loaded"
    )  # fmt: skip
    attention = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in facts["attention"].items())
    sliding = f" over {facts['sliding_window']:,} tokens" if facts["sliding_window"] else ""
    window = f"{facts['window']:,} tokens" if facts["window"] else "no limit in the configuration"
    lines = {
        "model": facts["model"],
        "family": f"{facts['family']}, {tested}",
        "attention": f"{attention}{sliding}",
        "window": f"{window} ({facts['window_note']})" if facts["window_note"] else window,
        "vocabulary": f"{facts['vocabulary']:,}",
        "parameters": f"{facts['parameters']:,}",
        "dtype": f"{facts['dtype']} on {facts['device']}" if "device" in facts else facts["dtype"],
        "supported": "every method, chains and trees; greedy decoding and sampling",
        "note": facts.get("note", ""),
    }
    show_facts(lines)
    if "cost" in facts:
        show_cost(facts["cost"])
    for sentence in facts.get("compiled", ()):
        typer.echo(sentence)


def compile_model(
    model: flags.ModelArgument = SMOLLM2,
    dtype: Annotated[str, flags.in_model(help="auto takes the checkpoint's")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to compile for; else torch's number")] = None,
    again: Annotated[bool, typer.Option("--again", help="Compile also what was compiled before")] = False,
    as_json: flags.JsonOption = False,
    background: Annotated[bool, typer.Option("--background", help="Give way to other processes")] = False,
    method: Annotated[
        str | None, flags.in_drafting(help='Also the models that this method runs: NAME or NAME:{"option": value}')
    ] = None,
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
        models = [(load_model(model, dtype, "cpu"), None)] if method is None else _models_of(method, model, dtype)
        made = [compile_forward(each, cache_folder(), passage, again=again, progress=tell) for each, passage in models]
    if as_json:
        told = [_record_facts(folder, record) for folder, record in made]
        show_json(told[0] | ({"drafting": told[1:]} if method else {}))
        return
    for number, (folder, record) in enumerate(made):
        _print_record(
            folder, record, f"What a pass of drafting model {number} costs" if number else "What a pass costs"
        )


def _models_of(method: str, model: str, dtype: str) -> list[tuple[Any, Any]]:
    """Return the model and what a method runs besides, with the passage of those that are parts of it."""
    from foredraft.api import load
    from foredraft.bench.method import parse_method

    asked = parse_method(method)
    generator = load(
        model, method=asked.name, speculative_config=asked.options, dtype=dtype, device="cpu", compile=False
    )
    return [(each.model, each.passage) for each in (generator.target, *generator.drafter.needs.models)]


def _record_facts(folder: "Path", record: "CompiledRecord") -> dict[str, Any]:
    """Return what was compiled, for JSON."""
    rows, times = _times(record)
    facts = asdict(record)
    del facts["costs"]
    milliseconds = {name: [1e3 * each for each in found] for name, found in times.items()}
    return {"folder": str(folder), "bytes": _size(folder, record), "rows": rows, "milliseconds": milliseconds, **facts}


def _size(folder: "Path", record: "CompiledRecord") -> int:
    return sum((folder / package.file).stat().st_size for package in record.packages)


def _print_record(folder: "Path", record: "CompiledRecord", title: str) -> None:
    rows, times = _times(record)
    quickest = record.quickest()
    shown = [
        (str(n), f"{1e3 * eager:.2f}", f"{1e3 * used:.2f}", f"{eager / used:.2f}", quickest[n])
        for n, eager, used in zip(rows, times["eager"], times["used"], strict=True)
    ]
    show_table(("rows", "as it is, ms", "compiled, ms", "times as fast", "package"), shown, title)
    typer.echo(f"{_size(folder, record) / 2**20:,.0f} MiB in {folder}")
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


def cost_rows(curve: "CostCurve") -> list[dict[str, float]]:
    """Return what a pass costs by its rows, for JSON."""
    return [
        {"rows": rows, "milliseconds": 1e3 * seconds, "relative": seconds / curve.seconds[0]}
        for rows, seconds in zip(curve.rows, curve.seconds, strict=True)
    ]


def show_cost(rows: list[dict[str, float]]) -> None:
    """Print what a pass costs by its rows."""
    shown = [(str(row["rows"]), f"{row['milliseconds']:.2f}", f"{row['relative']:.2f}") for row in rows]
    show_table(("rows", "ms", "relative to one row"), shown, "What verifying costs")
