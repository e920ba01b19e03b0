"""`foredraft bench` and `foredraft recommend`: paired speed-ups, and recommendations.

Does not depend on how things are measured; that is in `foredraft.bench`.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft import __version__
from foredraft.atomic_file import check_place, store_file
from foredraft.bench.tasks import EMBEDDED, load_task, load_tasks
from foredraft.cli import flags
from foredraft.cli.info import cost_rows, show_cost, uncompiled
from foredraft.cli.job import load_plain, setting
from foredraft.cli.screen import counting, say, show_json, show_table, working
from foredraft.model.gguf.files import SMOLLM2

if TYPE_CHECKING:  # torch is imported when a command runs, so that help is fast
    from foredraft.bench.cell import Cell

_RUN_METHODS = ("prompt_lookup", "adaptix", "rest", "auto", "transformers")

_RUN_COLUMNS = (
    "task", "method", "identical", "tokens / step", "nodes / step", "ms / token", "speed-up [95%]",
    "without loops [95%]", "repeated 8-grams", "stalled",
)  # fmt: skip
_RECOMMEND_PROMPTS = 60  # of a task, at most; chosen
_RECOMMEND_COLUMNS = (
    "method", "speed-up [95%]", "without loops [95%]", "tokens / step", "nodes / step", "accepted / drafted",
    "ms / token",
)  # fmt: skip
_LEGEND = (
    "speed-up: summed over all texts; without loops: texts whose plain output repeats at most a fifth of its 8-grams "
    "(number of texts); ms / token: decode time, for transformers total time; stalled: share of the time by which "
    "other load delayed passes, excluded from all figures except those of transformers"
)

app = typer.Typer(no_args_is_help=True, help="Measure speed-ups.")


@app.command()
def run(
    *,
    data: flags.DataOption = None,
    model: flags.ModelOption = SMOLLM2,
    task: flags.TaskOption = None,
    method: flags.MethodsOption = None,
    prompts: flags.PromptsOption = 10,
    max_new_tokens: flags.TokensOption = 128,
    temperature: Annotated[
        list[float] | None, flags.in_text(help="0 is greedy; repeatable, each is measured; default: 0")
    ] = None,
    seed: Annotated[int, flags.in_text(help="Seed of the sampling and of the order of runs")] = 0,
    dtype: flags.DtypeOption = "auto",
    eager: flags.EagerOption = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write every text, its times and the machine to this file, as JSON lines")
    ] = None,
    as_json: flags.JsonOption = False,
) -> None:
    """Measure speed-ups over plain decoding, paired in one process; `--method transformers` adds its generate."""
    from foredraft.bench.method import chosen_methods
    from foredraft.bench.runner import Run
    from foredraft.bench.summary import summarize_cells, table
    from foredraft.model.machine import machine_facts
    from foredraft.model.rounding import dtype_name

    chosen, temperatures = chosen_methods(method or _RUN_METHODS), dict.fromkeys(temperature or [0.0])
    settings = [setting(each, max_new_tokens=max_new_tokens, seed=seed) for each in temperatures]
    loaded = load_tasks(task, data, prompts)
    if out is not None:
        check_place(out)
    with working("measuring") as tell:
        result = Run(load_plain(model, dtype, eager, tell), chosen, loaded, settings)
        result.measure(counting(tell, result.turns, "measuring"))
    if out is not None:
        kind = dtype_name(result.generator.target.outline)
        where = {"model": model, "dtype": kind, "machine": machine_facts(), "foredraft": __version__}
        store_file(out, "".join(json.dumps(asdict(cell) | where) + "\n" for cell in result.cells).encode())
    summaries = summarize_cells(result.cells)
    if as_json:
        show_json([summary.as_dict() for summary in summaries])
    else:
        for name in dict.fromkeys(summary.settings for summary in summaries):
            show_table(*table((each for each in summaries if each.settings == name), _RUN_COLUMNS), name)
        typer.echo(_LEGEND)
    _print_failures(result.failures)
    if result.failures:
        raise typer.Exit(1)


def _print_failures(failures: "Sequence[Cell]") -> None:
    for cell in failures:
        say(f"{cell.method} failed on {cell.task}[{cell.number}]: {cell.failure.rstrip('.')}.")


# --- recommend


def recommend(
    model: flags.ModelArgument = SMOLLM2,
    data: Annotated[
        str | None, flags.in_text(help="Your prompts: FILE or FILE:FIELD of JSON lines or Parquet; default: embedded")
    ] = None,
    temperature: flags.TemperatureOption = 0.0,
    minutes: Annotated[float, typer.Option(help="Time limit of the measurement, without loading", min=0.001)] = 3.0,
    dtype: flags.DtypeOption = "auto",
    eager: flags.EagerOption = False,
    as_json: flags.JsonOption = False,
) -> None:
    """Recommend a drafting method, with its speed-up on this machine; or none."""
    from foredraft.bench.recommendation import recommend as compare
    from foredraft.bench.summary import table

    sampling = setting(temperature)
    prompts = load_task(EMBEDDED if data is None else data, None, _RECOMMEND_PROMPTS)
    with working("loading") as tell:
        generator = load_plain(model, dtype, eager, tell)
        subject = f"comparing methods (minutes at most: {minutes:g})"
        tell(0.0, subject)
        found = compare(generator, model, prompts, sampling, 60 * minutes, lambda share: tell(share, subject))
    chat = bool(getattr(generator.tokenizer, "chat_template", None))
    recorded = generator.target.recordings is not None
    compiled = None if not (eager or recorded) else recorded
    command, python = _how_to_use(model, found.method, dtype, temperature, compiled=compiled, chat=chat)
    if as_json:
        show_json({
            "method": found.method, "prompts": found.prompts, "tokens": found.tokens,
            "cost": cost_rows(generator.cost), "methods": [each.as_dict() for each in found.ranked],
            "sentences": found.sentences, "failures": [cell.failure for cell in found.failures],
            "command": command, "python": python,
        })  # fmt: skip
        return
    show_cost(cost_rows(generator.cost))
    title = f"Compared with plain decoding (prompts: {found.prompts}, tokens at most: {found.tokens})"
    show_table(*table(found.ranked, _RECOMMEND_COLUMNS), title)
    for sentence in found.sentences:
        typer.echo(sentence)
    if recorded:
        typer.echo("Passes were recorded (CUDA graphs), as by the line of Python; the command does not record them.")
    elif generator.target.compiled is None and not eager:
        typer.echo(uncompiled(generator.target))
    typer.echo(f"\n{command}\n{python}")
    _print_failures(found.failures)


def _how_to_use(
    model: str, method: str, dtype: str, temperature: float, *, compiled: bool | None, chat: bool
) -> tuple[str, str]:
    """Return the command and the line of Python that use a method; `compiled` is what `load` is told, if anything."""
    options, load, generate = f"--model {shlex.quote(model)} --method {method}", f"{model!r}, method={method!r}", ""
    if dtype != "auto":
        options, load = f"{options} --dtype {dtype}", f"{load}, dtype={dtype!r}"
    if chat:
        generate = ", chat=True"
    if temperature:
        options, generate = f"{options} --temperature {temperature:g}", f"{generate}, temperature={temperature:g}"
    if compiled is not None:
        load = f"{load}, compile={compiled}"
    if compiled is False:
        options = f"{options} --eager"
    return f'foredraft generate {options} "..."', f'foredraft.load({load}).generate("..."{generate})'
