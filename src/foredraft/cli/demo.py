"""`foredraft demo`: shows and measures drafting on three texts, from predictable to not.

Does not depend on the texts or on how they are measured; that is in `foredraft.bench.demonstration`.
"""

import os

import typer

from foredraft.cli import flags
from foredraft.cli.job import Job
from foredraft.cli.screen import Ink, say, show_table, working
from foredraft.errors import ForedraftError, UsageError
from foredraft.model.gguf.files import SMOLLM2


def demo(
    model: flags.ModelOption = SMOLLM2,
    method: flags.MethodOption = None,
    color: flags.ColorOption = None,
) -> None:
    """Time three texts, a rewritten file, code and a story, with transformers, plain decoding and drafting."""
    generator = Job(model=model, method=method).load({}, {}, {"do_sample": True})  # no scene waits for kernels
    from foredraft.bench.demonstration import SCENES, perform

    if getattr(generator.tokenizer, "chat_template", None) is None:
        raise UsageError(f"The tokenizer of {model} has no chat template; the demo needs a model that chats.")
    if generator.target.compiled is None and generator.target.device.type == "cpu":
        with working(f"compiling {model} for this machine, once (a minute or two on {os.cpu_count()} cores)") as tell:
            try:
                generator.compile(progress=tell)
            except ForedraftError as error:  # the model runs uncompiled
                say(str(error), "yellow")
    outcomes = []
    for scene in SCENES:
        typer.echo(f"\n{scene.title}\n")
        ink = Ink(color, generator.drafter.source_names)
        outcomes.append(perform(generator, scene, ink.print))
        ink.legend()
    names = {"none": "ours, plain", "transformers": "transformers generate"}
    times = [names.get(name, f"ours, {name}") + "|.1f" for name in outcomes[0].milliseconds]
    rows = [
        [each.scene.title, *each.milliseconds.values(), each.drafted.statistics.tokens_per_target_step]
        for each in outcomes
    ]
    show_table(("text", *times, "tokens per pass|.2f"), rows, "Milliseconds per token, including prefill")
    for outcome in outcomes:
        typer.echo(f"{outcome.scene.title}: {outcome.sentence()}")
