"""`foredraft explain`: write a text, and account for its drafts: who drafted what, what was wasted, what was expected.

Parses and prints; the account is `foredraft.bench.drafts`.
"""

import math
from typing import TYPE_CHECKING

import typer

from foredraft.cli import flags
from foredraft.cli.job import Job, prompt_text, setting, speculative_options
from foredraft.cli.screen import Ink, show_json, show_table, wants_color, working
from foredraft.model.gguf import SMOLLM2

if TYPE_CHECKING:
    from foredraft.api import Generator
    from foredraft.bench.drafts import Account

_FIGURES = {
    "tokens": "tokens of a step with a draft",
    "plain_milliseconds": "ms of a plain pass",
    "drafted_milliseconds": "ms of a pass with a draft",
    "overhead_milliseconds": "ms of overhead of a step with a draft",
}


def explain(
    prompt: flags.PromptArgument = None,
    file: flags.FileOption = None,
    model: flags.ModelOption = SMOLLM2,
    dtype: flags.DtypeOption = "auto",
    device: flags.DeviceOption = None,
    eager: flags.EagerOption = False,
    method: flags.MethodOption = None,
    speculative_config: flags.ConfigOption = None,
    num_speculative_tokens: flags.NodesOption = None,
    max_new_tokens: flags.TokensOption = 128,
    temperature: flags.TemperatureOption = 0.0,
    seed: flags.SeedOption = 0,
    as_json: flags.JsonOption = False,
    color: flags.ColorOption = None,
) -> None:
    """Write a text and say which sources drafted it, what each contributed, what was wasted, and what was expected."""
    text = prompt_text(prompt, file)
    config = speculative_options(speculative_config, num_speculative_tokens=num_speculative_tokens)
    options = setting(temperature, max_new_tokens=max_new_tokens, seed=seed)
    job = Job(model, dtype, device, eager, method, config, options, color=wants_color(color))
    generator = job.load()
    with working("writing"):
        from foredraft.bench.drafts import account_for

        account = account_for(generator, job.worded(generator, text), job.options)
    if as_json:
        show_json({"text": account.generation.text, **account.as_dict()})
        return
    _write(generator, account, job.color)
    _print(account)


def _write(generator: "Generator", account: "Account", color: bool) -> None:
    """Write the text again, now that it is whole, each token in the colour of its source."""
    from foredraft.generation import pieces

    ink = Ink(color, generator.drafter.source_names)
    for piece in pieces(account.generation.steps, generator.tokenizer):
        ink.write(piece)
    ink.finish()
    ink.legend()


def _print(account: "Account") -> None:
    from foredraft.bench.summary import reliability_table

    counts = account.generation.statistics
    typer.echo(
        f"{counts.emitted} tokens in {counts.steps} steps, {account.plain_steps} of them without a draft: "
        f"{counts.tokens_per_target_step:.2f} tokens a step, {1e3 * counts.decode_seconds_per_token:.2f} ms a token"
    )
    sources = [[str(value) for value in each.values()] for each in account.sources]
    show_table(("source", "drafted", "accepted", "wasted"), sources, "who drafted")
    show_table(*reliability_table(account.counts.reliability), "how far estimates were right")
    pairs = {name: (account.expected.get(name, math.nan), account.measured[name]) for name in _FIGURES}
    rows = [[_FIGURES[name], *("-" if math.isnan(each) else f"{each:.2f}" for each in pairs[name])] for name in pairs]
    show_table(("", "expected", "measured"), rows, "what steps cost and gave")
