"""`foredraft recommend`: which method to use for a model on this machine, and what that is worth.

The comparison and the words are `foredraft.bench.recommendation`'s.
"""

import shlex
from typing import Annotated

import typer

from foredraft.cli import flags
from foredraft.cli.info import NOT_COMPILED, cost_rows, show_cost
from foredraft.cli.job import load_plain, setting
from foredraft.cli.screen import say, show_json, show_table, working
from foredraft.errors import UsageError
from foredraft.model.gguf import SMOLLM2

_PROMPTS_OF_A_TASK = 60
_COLUMNS = {
    "method": "method", "speed_up": "speed-up [95%]", "speed_up_without_loops": "without loops [95%]",
    "tokens_per_step": "tokens / pass", "nodes_per_step": "drafted / pass", "acceptance": "accepted",
    "milliseconds": "ms / token",
}  # fmt: skip


def recommend(
    model: flags.ModelArgument = SMOLLM2,
    data: Annotated[
        str | None, flags.in_text(help="Your prompts: FILE or FILE:FIELD of JSON lines or Parquet [default: embedded]")
    ] = None,
    temperature: flags.TemperatureOption = 0.0,
    minutes: Annotated[float, typer.Option(help="Time to measure, once the model is loaded")] = 3.0,
    dtype: flags.DtypeOption = "auto",
    eager: flags.EagerOption = False,
    as_json: flags.JsonOption = False,
) -> None:
    """Say which drafting method to use, how much faster it is here, and why; or that none helps."""
    from foredraft.bench.recommendation import recommend as compare
    from foredraft.bench.summary import table
    from foredraft.bench.tasks import EMBEDDED, load_task

    if not minutes > 0:
        raise UsageError(f"minutes is {minutes:g}; it must be above 0.")
    sampling = setting(temperature)
    prompts = load_task(data or EMBEDDED, None, _PROMPTS_OF_A_TASK)
    with working("loading") as tell:
        generator = load_plain(model, dtype, eager, tell)
        subject = f"comparing methods (minutes at most: {minutes:g})"
        tell(0.0, subject)
        found = compare(generator, model, prompts, sampling, 60 * minutes, lambda share: tell(share, subject))
    chat = bool(getattr(generator.tokenizer, "chat_template", None))
    command, python = _how_to_use(model, found.method, dtype, temperature, eager=eager, chat=chat)
    if as_json:
        show_json({
            "method": found.method,
            "prompts": found.prompts,
            "tokens": found.tokens,
            "cost": cost_rows(found.curve),
            "methods": [each.as_dict() for each in found.ranked],
            "sentences": found.sentences,
            "failures": [cell.failure for cell in found.failures],
            "command": command,
            "python": python,
        })  # fmt: skip
        return
    show_cost(cost_rows(found.curve))
    title = f"Compared with plain decoding (prompts: {found.prompts}, tokens at most: {found.tokens})"
    show_table(*table(found.ranked, _COLUMNS), title)
    for sentence in found.sentences:
        typer.echo(sentence)
    if generator.target.compiled is None and not eager:
        typer.echo(NOT_COMPILED)
    typer.echo(f"\n{command}\n{python}")
    for cell in found.failures:
        say(f"{cell.place.method} failed on {cell.place.task}[{cell.place.number}]: {cell.failure}.")


def _how_to_use(model: str, method: str, dtype: str, temperature: float, *, eager: bool, chat: bool) -> tuple[str, str]:
    """Return the command and the line of Python that use a method."""
    given = ["--model", shlex.quote(model), "--method", method]
    loading, asked = f"{model!r}, method={method!r}", ""
    if dtype != "auto":
        given += ["--dtype", dtype]
        loading += f", dtype={dtype!r}"
    if chat:
        asked += ", chat=True"
    if temperature:
        given += ["--temperature", f"{temperature:g}"]
        asked += f", temperature={temperature:g}"
    if eager:
        given.append("--eager")
        loading += ", compile=False"
    return (
        f'foredraft generate {" ".join(given)} "..."',
        f'foredraft.load({loading}).generate("..."{asked})',
    )
