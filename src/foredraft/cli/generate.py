"""`foredraft generate`: generate a text.

Does not depend on how texts are generated; the figures are defined by `foredraft.engine.statistics`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import flags
from foredraft.cli.flags import generation_flag, in_drafting, in_text
from foredraft.cli.job import Job, prompt_for, prompt_text, samples
from foredraft.cli.screen import Ink, say, show_json
from foredraft.errors import UsageError

if TYPE_CHECKING:
    from foredraft.api import Generator, Prompt
    from foredraft.engine.batch import Batch
    from foredraft.generation import Generation


def generate(
    prompt: flags.PromptArgument = None,
    file: flags.FileOption = None,
    *,
    job: Job,
    draft_model: Annotated[str | None, in_drafting(help="The draft model, for methods that use one")] = None,
    memory: flags.MemoryOption = None,
    max_new_tokens: Annotated[int | None, generation_flag("max_new_tokens")] = None,
    do_sample: Annotated[
        bool | None,
        generation_flag("do_sample", "sample, or take the most probable token; default: by the other options"),
    ] = None,
    temperature: Annotated[float | None, generation_flag("temperature")] = None,
    top_k: Annotated[int | None, generation_flag("top_k")] = None,
    top_p: Annotated[float | None, generation_flag("top_p")] = None,
    min_p: Annotated[float | None, generation_flag("min_p")] = None,
    repetition_penalty: Annotated[float | None, generation_flag("repetition_penalty")] = None,
    stop_strings: Annotated[
        list[str] | None, generation_flag("stop_strings", "the text ends after this, and includes it; repeatable")
    ] = None,
    eos_token_id: Annotated[
        list[int] | None,
        generation_flag("eos_token_id", "id that ends the text, instead of the model's own; repeatable"),
    ] = None,
    seed: Annotated[int | None, generation_flag("seed", "seed of the sampling; default: random, and reported")] = None,
    raw: Annotated[bool, in_text("--raw", help="Continue the text without the chat template")] = False,
    system: flags.SystemOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with every step")] = False,
    color: flags.ColorOption = None,
) -> None:
    """Generate a completion of a prompt: the text of plain decoding, in fewer forward passes."""
    text = prompt_text(prompt, file)
    for pair, both in (("--json and --color", as_json and color), ("--raw and --system", raw and system is not None)):
        if both:
            raise UsageError(f"{pair} exclude each other; leave one of them out.")
    options = {
        "max_new_tokens": max_new_tokens, "do_sample": do_sample, "temperature": temperature, "top_k": top_k,
        "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty, "stop_strings": stop_strings,
        "eos_token_id": eos_token_id, "seed": seed,
    }  # fmt: skip
    options = {name: value for name, value in options.items() if value not in (None, [])}
    generator = job.load(job.config(model=draft_model, memory=memory), options)
    ink = None if as_json else Ink(color, generator.drafter.source_names)
    whole = prompt_for(generator, text, system, raw=raw)
    _write(generator, options, whole, ink)


def write(
    generator: "Generator", options: Mapping[str, Any], prompt: "Prompt", ink: Ink | None, batch: "Batch | None" = None
) -> "tuple[Generation, bool]":
    """Generate a text, and print it to `ink` with a summary; return the result, and whether Ctrl-C ended it."""
    stream, interrupted = generator.stream(prompt, batch=batch, **options), False
    try:
        if ink is not None:
            ink.print(stream)
        for _ in stream:
            pass
    except KeyboardInterrupt:  # keep the text so far
        stream.close()  # the batch takes the next message
        interrupted = True
    generation = stream.generation
    if ink is not None:
        counts = generation.statistics
        say(
            f"{counts.emitted} tokens; {counts.tokens_per_target_step:.2f} tokens per target step; "
            f"{counts.drafted} drafted, {counts.accepted} kept; {1e3 * counts.decode_seconds_per_token:.1f} ms per "
            f"token; prefill {1e3 * counts.prefill_seconds:.0f} ms; "
            f"finish: {'interrupted' if interrupted else generation.finish_reason}"
            + (f"; seed {generation.seed}" if samples(generator, options) else ""),
            "dim",
        )
    return generation, interrupted


def _write(generator: "Generator", options: Mapping[str, Any], prompt: "Prompt", ink: Ink | None) -> None:
    generation, interrupted = write(generator, options, prompt, ink)
    if ink is not None:
        ink.legend()
    else:
        steps = []
        for step in generation.steps:
            microseconds = {part: nanoseconds / 1e3 for part, nanoseconds in step.nanoseconds.items()}
            counts = {"emitted": step.emitted, "accepted": step.accepted, "drafted": step.drafted}
            steps.append(counts | {"sources": step.sources, "microseconds": microseconds})
        show_json({
            "text": generation.text, "token_ids": generation.token_ids,
            "finish_reason": "interrupted" if interrupted else generation.finish_reason,
            "prompt_length": generation.prompt_length,
            "seed": generation.seed if samples(generator, options) else None,
            "statistics": generation.statistics.as_dict(), "steps": steps,
        })  # fmt: skip
    generator.save()  # last: the text is not lost if it fails
    if interrupted:
        raise KeyboardInterrupt
