"""`foredraft generate`: write the continuation of a prompt, once, or compared with plain decoding.

Parses and prints; does not know how texts are written.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import flags
from foredraft.cli.flags import generation_flag, in_drafting, in_text
from foredraft.cli.job import Job, prompt_text, speculative_options
from foredraft.cli.screen import Ink, say, show_json, wants_color
from foredraft.errors import ForedraftError, UsageError
from foredraft.model.gguf import SMOLLM2

if TYPE_CHECKING:
    from foredraft.api import Generator, Prompt
    from foredraft.generation import Generation


def generate(
    prompt: flags.PromptArgument = None,
    file: flags.FileOption = None,
    model: flags.ModelOption = SMOLLM2,
    dtype: flags.DtypeOption = "auto",
    device: flags.DeviceOption = None,
    eager: flags.EagerOption = False,
    method: flags.MethodOption = None,
    speculative_config: flags.ConfigOption = None,
    draft_model: Annotated[str | None, in_drafting(help="The model that drafts, for methods that use one")] = None,
    num_speculative_tokens: flags.NodesOption = None,
    memory: flags.MemoryOption = None,
    verification: Annotated[
        str | None, in_drafting(help="matched (the default), or rejection, which keeps the distribution")
    ] = None,
    max_new_tokens: Annotated[int | None, generation_flag("max_new_tokens")] = None,
    do_sample: Annotated[
        bool | None, generation_flag("do_sample", "draw tokens, or take the most probable; else as other options imply")
    ] = None,
    temperature: Annotated[float | None, generation_flag("temperature")] = None,
    top_k: Annotated[int | None, generation_flag("top_k")] = None,
    top_p: Annotated[float | None, generation_flag("top_p")] = None,
    min_p: Annotated[float | None, generation_flag("min_p")] = None,
    repetition_penalty: Annotated[float | None, generation_flag("repetition_penalty")] = None,
    stop_strings: Annotated[
        list[str] | None, generation_flag("stop_strings", "the text ends after this, which it includes; repeatable")
    ] = None,
    eos_token_id: Annotated[
        list[int] | None,
        generation_flag("eos_token_id", "id that ends the text, instead of the model's own; repeatable"),
    ] = None,
    seed: Annotated[int | None, generation_flag("seed", "of the sampling; else one is drawn and reported")] = None,
    raw: Annotated[bool, in_text("--raw", help="Continue the text as it is, without the chat template")] = False,
    system: flags.SystemOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="Write it with and without drafting")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with every step")] = False,
    color: flags.ColorOption = None,
) -> None:
    """Write the continuation of a prompt: the same text as plain decoding, in fewer forward passes."""
    text = prompt_text(prompt, file)
    _refuse_both("--json", as_json, "--color", bool(color))
    _refuse_both("--raw", raw, "--system", system is not None)
    options = {
        "max_new_tokens": max_new_tokens, "do_sample": do_sample, "temperature": temperature, "top_k": top_k,
        "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty, "stop_strings": stop_strings,
        "eos_token_id": eos_token_id, "seed": seed,
    }  # fmt: skip
    config = speculative_options(
        speculative_config, num_speculative_tokens=num_speculative_tokens, model=draft_model, verification=verification,
        memory=memory,
    )  # fmt: skip
    job = Job(
        model, dtype, device, eager, method, config,
        {name: value for name, value in options.items() if value not in (None, [])},
        system, raw, color=wants_color(color) and not as_json,
    )  # fmt: skip
    generator = job.load()
    write = _compare if compare else _write
    write(generator, job, job.worded(generator, text), as_json=as_json)


def _refuse_both(one: str, has_one: bool, other: str, has_other: bool) -> None:
    if has_one and has_other:
        raise UsageError(f"{one} and {other} exclude each other; leave one of them out.")


def summary(generation: "Generation", *, seed: bool, interrupted: bool = False) -> str:
    """Return a line about a generation: counts, rates, why it ended, and the seed where it matters."""
    counts = generation.statistics
    parts = [
        f"{counts.emitted} tokens",
        f"{counts.tokens_per_target_step:.2f} tokens per target step",
        f"{counts.drafted} drafted, {counts.accepted} kept",
        f"{1e3 * counts.decode_seconds_per_token:.1f} ms per token",
        f"prefill {1e3 * counts.prefill_seconds:.0f} ms",
        f"finish: {'interrupted' if interrupted else generation.finish_reason}",
    ]
    return "; ".join([*parts, f"seed {generation.seed}"] if seed else parts)


def _compare(generator: "Generator", job: Job, prompt: "Prompt", *, as_json: bool) -> None:
    from foredraft.cli.compare import compare_with_plain

    if not compare_with_plain(generator, job, prompt, as_json=as_json):
        raise typer.Exit(1)


def _write(generator: "Generator", job: Job, prompt: "Prompt", *, as_json: bool) -> None:
    stream = generator.stream(prompt, **job.options)
    ink = Ink(job.color, generator.drafter.source_names)
    interrupted = False
    try:
        for piece in stream:
            if not as_json:
                ink.write(piece)
    except KeyboardInterrupt:  # what has been written is worth having
        interrupted = True
    except ForedraftError:
        ink.finish()
        raise
    generator.save()
    generation, samples = stream.generation, job.samples(generator)
    if as_json:
        show_json(_as_json(generation, seed=samples, interrupted=interrupted))
    else:
        ink.finish()
        ink.legend()
        say(summary(generation, seed=samples, interrupted=interrupted), "dim")
    if interrupted:
        raise KeyboardInterrupt


def _as_json(generation: "Generation", *, seed: bool, interrupted: bool) -> dict[str, Any]:
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": "interrupted" if interrupted else generation.finish_reason,
        "prompt_length": generation.prompt_length,
        "seed": generation.seed if seed else None,
        "statistics": generation.statistics.as_dict(),
        "steps": [
            {
                "emitted": step.emitted,
                "accepted": step.accepted,
                "drafted": step.drafted,
                "sources": step.sources,
                "microseconds": {part: nanoseconds / 1e3 for part, nanoseconds in step.nanoseconds.items()},
            }
            for step in generation.steps
        ],
    }
