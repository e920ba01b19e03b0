"""`foredraft explain`: write a text, and account for its drafts: who guessed what, what was wasted, what was believed.

Parses and prints; the account is `foredraft.bench.account`.
"""

import json
import math
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.generate import (
    ColorOption,
    ConfigOption,
    DeviceOption,
    EagerOption,
    FileOption,
    Job,
    MethodOption,
    ModelOption,
    NodesOption,
    PromptArgument,
    prompt_text,
    speculative_options,
)
from foredraft.cli.screen import Ink, wants_color, working
from foredraft.cli.tables import show_reliability, show_table
from foredraft.model.gguf import SMOLLM2

if TYPE_CHECKING:
    from foredraft.api import Generator
    from foredraft.bench.account import Account


def explain(
    prompt: PromptArgument = None,
    file: FileOption = None,
    model: ModelOption = SMOLLM2,
    dtype: Annotated[str, typer.Option(help="auto takes the checkpoint's")] = "auto",
    device: DeviceOption = None,
    eager: EagerOption = False,
    method: MethodOption = None,
    speculative_config: ConfigOption = None,
    num_speculative_tokens: NodesOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens at most")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
    color: ColorOption = None,
) -> None:
    """Write a text and say which sources drafted it, what each contributed, what was wasted, and what was believed."""
    text = prompt_text(prompt, file) or ""
    options = {"max_new_tokens": max_new_tokens, "seed": seed}
    job = Job(
        model, dtype, device, method, speculative_options(speculative_config, num_speculative_tokens),
        {**options, "temperature": temperature} if temperature else options,
        None, color=wants_color(color), raw=False, as_json=as_json, eager=eager,
    )  # fmt: skip
    generator = job.load()
    with working("writing"):
        from foredraft.bench.account import account_for

        account = account_for(generator, job.worded(generator, text), job.options)
    if as_json:
        typer.echo(json.dumps({"text": account.generation.text, **account.as_dict()}))
        return
    _write(generator, account, job.color)
    _print(account)


def _write(generator: "Generator", account: "Account", color: bool) -> None:
    """Write the text again, now that it is whole, each token in the colour of who guessed it."""
    from foredraft.generation import Piece
    from foredraft.text import TextStream

    ink, stream = Ink(color, generator.drafter.source_names), TextStream(generator.tokenizer)
    for step in account.generation.steps:
        for token, source in zip(step.emitted, step.sources, strict=True):
            ink.write(Piece(stream.push(token), token, source))
    ink.write(Piece(stream.finish(), -1, None))
    ink.finish()
    ink.legend()


def _print(account: "Account") -> None:
    counts = account.generation.statistics
    typer.echo(
        f"{counts.emitted} tokens in {counts.steps} steps, {account.plain_steps} of them without a draft: "
        f"{counts.tokens_per_target_step:.2f} tokens a step, {1e3 * counts.decode_seconds_per_token:.2f} ms a token"
    )
    sources = [[str(value) for value in each.values()] for each in account.sources]
    show_table(("source", "drafted", "accepted", "wasted"), sources, "who drafted")
    show_reliability("how far estimates were right", account.counts.reliability)
    rows = (
        ("tokens of a step with a draft", account.tokens_believed, account.tokens_happened),
        ("ms of a plain pass", account.plain_milliseconds_believed, account.plain_milliseconds_happened),
        ("ms of a pass with a draft", account.drafted_milliseconds_believed, account.drafted_milliseconds_happened),
        ("ms beside a pass with a draft", math.nan, account.beside_milliseconds),
    )
    told = [[name, *("-" if math.isnan(figure) else f"{figure:.2f}" for figure in figures)] for name, *figures in rows]
    show_table(("", "believed", "happened"), told, "what steps cost and gave")
