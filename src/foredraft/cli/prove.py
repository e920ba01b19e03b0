"""`foredraft prove`: is the text the same, for this model, these methods and these settings?

Parses and prints; the comparison is `foredraft.bench.prove`.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from foredraft.cli.screen import counting, say, working


def prove(
    data: Annotated[Path, typer.Option(help="Folder of the tasks' files")],
    model: Annotated[str, typer.Option(help="Embedded model, hub id or folder")] = "demo",
    task: Annotated[list[str] | None, typer.Option(help="Repeatable [default: humaneval, gsm8k, mt_bench]")] = None,
    method: Annotated[list[str] | None, typer.Option(help='NAME or NAME:{"option": value}; repeatable')] = None,
    prompts: Annotated[int, typer.Option(help="Prompts in all, spread over the tasks")] = 30,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens a text")] = 128,
    temperature: Annotated[float, typer.Option(help="Of the sampled half of the comparison; 0 leaves it out")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Of the sampled half")] = 1.0,
    dtype: Annotated[str, typer.Option(help="float32 must hold without exception")] = "float32",
    seed: Annotated[int, typer.Option(help="Of the sampling")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Compare methods with plain decoding token for token; exit status 1 if anything but a near-tie differs."""
    from foredraft.api import load
    from foredraft.bench.method import parse_method
    from foredraft.bench.prove import prove as compare
    from foredraft.bench.tasks import DEFAULT_TASKS, load_task

    tasks = task or DEFAULT_TASKS
    methods = [parse_method(text) for text in (method or ["prompt_lookup", "adaptix"])]
    share = [prompts // len(tasks) + (i < prompts % len(tasks)) for i in range(len(tasks))]
    chosen = [prompt for name, count in zip(tasks, share, strict=True) for prompt in load_task(name, data, count)]
    settings: list[tuple[str, dict[str, Any]]] = [("greedy", {})]
    if temperature:
        settings.append((f"T={temperature:g}", {"temperature": temperature, "top_p": top_p}))
    total = len(settings) * (len(methods) + 1) * len(chosen)
    rows = []
    with working("comparing") as tell:
        generator = load(model, method="none", dtype=dtype, progress=tell)
        done = counting(tell, total, "comparing")
        for name, arguments in settings:
            given = {**arguments, "max_new_tokens": max_new_tokens}
            rows += [(name, proof) for proof in compare(generator, methods, chosen, given, seed=seed, done=done)]
    exact = dtype in ("float32", "float64")
    failed = [proof for _, proof in rows if (proof.differences if exact else not proof.holds)]
    if as_json:
        print(
            json.dumps([{"setting": name, **asdict(proof)} for name, proof in rows], indent=1)
        )  # the command's output
    else:
        _show(rows, dtype)
    if failed:
        say(f"Not proved: {len(failed)} of {len(rows)} comparisons differ beyond rounding.")
        raise typer.Exit(1)


def _show(rows: list[tuple[str, Any]], dtype: str) -> None:
    console = Console()
    table = Table("setting", "method", "dtype", "texts", "identical", "tokens compared", "near-ties", "beyond rounding")
    for name, proof in rows:
        ties = sum(difference.near_tie for difference in proof.differences)
        table.add_row(
            name, proof.method, dtype, str(proof.texts), str(proof.identical), str(proof.tokens), str(ties),
            str(len(proof.differences) - ties),
        )  # fmt: skip
    console.print(table)
    for name, proof in rows:
        for each in proof.differences:
            kind = "near-tie" if each.near_tie else "DIFFERENCE"
            console.print(
                f"{kind}: {name} {proof.method} {each.task}[{each.number}] token {each.position}, "
                f"top-2 gap {each.gap:.3g}, rounding {each.tolerance:.3g}",
                highlight=False,
            )
