"""`foredraft info` and `foredraft compile`: a model's properties, the cost of its passes, and how it was compiled.

Reads the configuration first, so that an unsupported model is rejected before its weights are loaded. Does not depend
on drafters.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import flags
from foredraft.cli.cache import show_cache
from foredraft.cli.screen import show_facts, show_json, show_table, working
from foredraft.errors import UsageError
from foredraft.model.gguf.files import SMOLLM2

if TYPE_CHECKING:  # torch and transformers are imported when a command runs, so that help is fast
    from pathlib import Path

    from foredraft.contracts import CostCurve
    from foredraft.model.compiled.package import CompiledRecord
    from foredraft.model.target import TorchTarget

_NOT_COMPILED = "This model is not compiled for this machine; `foredraft compile MODEL` compiles it (CPU only)."


def info(
    model: flags.ModelArgument = SMOLLM2,
    as_json: flags.JsonOption = False,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Read the configuration, load no weights")] = False,
    dtype: flags.DtypeOption = "auto",
    device: flags.DeviceOption = None,
    cache: Annotated[bool, typer.Option("--cache", help="List the cache folder instead, whatever the model")] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="With --cache: remove what is unfinished or not used any more")
    ] = False,
) -> None:
    """Show whether and how a model is supported, and measure the cost of verifying drafts."""
    if prune and not cache:
        raise UsageError("--prune removes files of the cache folder; give --cache with it.")
    if cache:
        show_cache(prune=prune, as_json=as_json)
        return
    with working(f"reading {model}") as tell:
        facts = _described(model)
        if not no_measure:
            tell(0.0, f"loading {model}")
            try:
                facts |= _measured(model, dtype, device, tell)
            except UsageError as error:  # the configuration alone is useful
                facts |= {"note": f"Not measured. {error}"}
    if as_json:
        show_json(facts)
    else:
        _print(facts)


def _described(model: str) -> dict[str, Any]:
    """Return the facts in the configuration; UnsupportedModelError if the model is not supported."""
    from foredraft.model.gguf.files import weights_of
    from foredraft.model.gguf.reader import opened
    from foredraft.model.loading import has_other_parts, load_config, load_ends, located
    from foredraft.model.support import inspect
    from foredraft.model.text_part import empty_model, text_config

    config, ends = load_config(model), list[str]()
    with suppress(UsageError):  # a model without a tokenizer has other facts
        ends = load_ends(model)
    support = inspect(config)
    empty = empty_model(config)
    return {
        "model": model, "family": support.family, "supported": True, "tested": support.tested,
        "text_model_of": str(config.model_type) if has_other_parts(config) else None,
        "layers": len(support.layer_types), "attention": dict(Counter(support.layer_types)),
        "sliding_window": next((window for window in support.windows if window is not None), None),
        "window": support.window, "window_note": support.window_note,
        "vocabulary": int(empty.get_output_embeddings().weight.shape[0]),
        "parameters": sum(parameter.numel() for parameter in empty.parameters()),
        "dtype": str(text_config(config).dtype or "").removeprefix("torch.") or None, "ends": ends,  # or the weights'
        "formats": sorted(opened(files)[1].formats()) if (files := weights_of(located(model))) else [],
    }  # fmt: skip


def _measured(model: str, dtype: str, device: str | None, tell: Callable[[float, str], None]) -> dict[str, Any]:
    """Load the weights; return the remaining facts, and the measured cost of passes."""
    from foredraft.cache_folder import cache_path
    from foredraft.model.cost import measured_cost
    from foredraft.model.mtp import mtp_tensors
    from foredraft.model.named_target import load_target
    from foredraft.model.rounding import dtype_name

    target = load_target(model, dtype, device)
    tell(0.0, "measuring the cost of verification")
    return {
        "dtype": dtype_name(target.outline), "device": str(target.device),
        "mtp": bool(mtp_tensors(target.outline.config)),
        "cost": cost_rows(measured_cost(target, cache_path())),  # the curve that generation uses
        "compiled": target.compiled.record.told() if target.compiled is not None else [uncompiled(target)],
    }  # fmt: skip


def uncompiled(target: "TorchTarget") -> str:
    """Return why a target runs uncompiled, and what can be done."""
    from foredraft.model.quantised import UNCOMPILED

    return UNCOMPILED if getattr(target.model, "is_quantized", False) else _NOT_COMPILED


def _print(facts: dict[str, Any]) -> None:
    tested = "covered by foredraft's tests" if facts["tested"] else (
        "not covered by foredraft's tests; when it is loaded, it is compared with the model's own pass"
    )  # fmt: skip
    whole = facts["text_model_of"]
    part = f" (the text model of {whole}; images and sounds are not read)" if whole else ""
    attention = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in facts["attention"].items())
    sliding = f" over {facts['sliding_window']:,} tokens" if facts["sliding_window"] else ""
    window = f"{facts['window']:,} tokens" if facts["window"] else "no limit in the configuration"
    stored = f" ({', '.join(facts['formats'])} in the file)" if facts["formats"] else ""
    show_facts({
        "model": facts["model"],
        "family": f"{facts['family']}{part}, {tested}",
        "attention": f"{attention}{sliding}",
        "window": f"{window} ({facts['window_note']})" if facts["window_note"] else window,
        "vocabulary": f"{facts['vocabulary']:,}",
        "ends of turns": "  ".join(facts["ends"]),
        "parameters": f"{facts['parameters']:,}",
        "dtype": f"{facts['dtype'] or 'as stored'}{stored}" + (f" on {facts['device']}" if "device" in facts else ""),
        "drafters with it": "an MTP layer: --method mtp" if facts.get("mtp") else "",
        "supported": "every method, chains and trees; greedy decoding and sampling",
        "note": facts.get("note", ""),
    })  # fmt: skip
    if "cost" in facts:
        show_cost(facts["cost"])
    for sentence in facts.get("compiled", ()):
        typer.echo(sentence)


def compile_model(
    model: flags.ModelArgument = SMOLLM2,
    dtype: Annotated[str, flags.in_model(help="auto takes the checkpoint's")] = "auto",
    again: Annotated[bool, typer.Option("--again", help="Compile existing packages again")] = False,
    precise: Annotated[
        bool | None,
        typer.Option(
            help="Round rows to 15 bits rather than 8, where weights are integers; default: as compiled before"
        ),
    ] = None,
    as_json: flags.JsonOption = False,
    method: Annotated[
        str | None, flags.in_drafting(help='Also compile the models of this method: NAME or NAME:{"option": value}')
    ] = None,
) -> None:
    """Compile a model's forward for this machine; generation then uses it automatically."""
    with working(f"loading {model}") as tell:
        from foredraft.api import Generator
        from foredraft.bench.method import BASE, parse_method
        from foredraft.model.loading import load_tokenizer, location_of_files
        from foredraft.model.named_target import hash_of_files, load_target

        drafting = parse_method(method or BASE)
        files = hash_of_files(str(location_of_files(model, dtype, "cpu")), dtype)  # they may change meanwhile
        target = load_target(model, dtype, "cpu", compiled=False)
        tokenizer = None if method is None else load_tokenizer(model)
        generator = Generator(target, tokenizer, **drafting.drafting, progress=tell)
        made = generator.compile(again=again, precise=precise)
        if target.compiled is not None:
            target.compiled.remember(files)
        tell(0.0, "measuring the cost of passes")
        targets = (target, *generator.drafter.needs.models)
        facts = [_record_facts(*each, of) for each, of in zip(made, targets, strict=True)]
    if as_json:
        show_json(facts[0] | ({"drafting": facts[1:]} if method else {}))
        return
    for number, ((folder, record), own) in enumerate(zip(made, facts, strict=True)):
        show_cost(own["cost"], f"Cost of a pass of draft model {number}" if number else "Cost of a pass")
        typer.echo(f"{own['bytes'] / 2**20:,.0f} MiB in {folder}")
        typer.echo("A row's result is bit-identical with any number of other rows.")
        for sentence in record.told():
            typer.echo(sentence)


def _record_facts(folder: "Path", record: "CompiledRecord", target: "TorchTarget") -> dict[str, Any]:
    """Return the facts of a compiled model, with the measured cost of its passes."""
    from foredraft.cache_folder import cache_path
    from foredraft.model.cost import measured_cost

    size = sum(file.stat().st_size for file in folder.iterdir())
    cost = cost_rows(measured_cost(target, cache_path()))  # the curve that generation uses
    return {"folder": str(folder), "bytes": size, "cost": cost, **asdict(record)}


def cost_rows(curve: "CostCurve") -> list[dict[str, float]]:
    """Return the cost of a pass by its rows, for JSON."""
    return [
        {"rows": rows, "milliseconds": 1e3 * seconds, "relative": seconds / curve.seconds[0]}
        for rows, seconds in zip(curve.rows, curve.seconds, strict=True)
    ]


def show_cost(rows: list[dict[str, float]], title: str = "Cost of verification") -> None:
    """Print the cost of a pass by its rows."""
    shown = [tuple(row.values()) for row in rows]
    show_table(("rows", "ms|.2f", "relative to one row|.2f"), shown, title)
