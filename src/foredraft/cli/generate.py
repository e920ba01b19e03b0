"""`foredraft generate`: generate a text, or compare with plain decoding.

Does not depend on how texts are generated; the figures are defined by `foredraft.engine.statistics`.
"""

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import flags
from foredraft.cli.flags import generation_flag, in_drafting, in_text
from foredraft.cli.job import Job, prompt_for, prompt_text, samples
from foredraft.cli.screen import Ink, say, show_json, show_table, working
from foredraft.errors import UsageError

if TYPE_CHECKING:
    from foredraft.api import Generator, Prompt
    from foredraft.bench.prove import Difference
    from foredraft.engine.batch import Batch
    from foredraft.generation import Generation


def generate(
    prompt: flags.PromptArgument = None,
    file: flags.FileOption = None,
    *,
    job: Job,
    draft_model: Annotated[str | None, in_drafting(help="The draft model, for methods that use one")] = None,
    memory: flags.MemoryOption = None,
    verification: Annotated[
        str | None, in_drafting(help="matched (default), or rejection, which keeps only the distribution")
    ] = None,
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
    compare: Annotated[bool, typer.Option("--compare", help="Compare with plain decoding")] = False,
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
    generator = job.load(job.config(verification=verification, model=draft_model, memory=memory), options)
    ink = None if as_json else Ink(color, generator.drafter.source_names)
    whole = prompt_for(generator, text, system, raw=raw)
    if compare:
        _compare(generator, options, whole, ink)
    else:
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


# --- --compare


def _compare(generator: "Generator", options: Mapping[str, Any], prompt: "Prompt", ink: Ink | None) -> None:
    """Compare the generator's method with plain decoding, and print the figures of both.

    In 16-bit arithmetic, a pass over several rows rounds differently, so a difference is reported but is no failure,
    unless all passes are compiled and round identically: then the exit status is 1.
    """
    from foredraft.bench.demonstration import ROUNDS
    from foredraft.bench.prove import is_exact
    from foredraft.bench.summary import LOOP_SHARE, finite, repeated_share
    from foredraft.model.rounding import dtype_name

    method, sampled = generator.method, samples(generator, options)
    if method == "none":
        raise UsageError("--compare compares a method with plain decoding, which is method none; choose another one.")
    options = {"seed": secrets.randbits(32), **options}
    compared = not (sampled and generator.verification == "rejection")  # which keeps only the distribution
    drafted, plain, difference = _repeated(generator, prompt, options, ink, compared)
    own, base = (each.statistics.decode_seconds_per_token for each in (drafted, plain))
    speed_up, repeated = base / own if own else 1.0, repeated_share(plain.token_ids)
    dtype, exact = dtype_name(generator.target.outline), is_exact(generator)
    if ink is None:
        show_json({
            "text": plain.text, "token_ids": plain.token_ids, "method": method,
            "seed": options["seed"] if sampled else None, "dtype": dtype, "repetitions": ROUNDS,
            "statistics": {method: drafted.statistics.as_dict(), "none": plain.statistics.as_dict()},
            "speed_up": speed_up, "repeated_8_grams": repeated,
            "identical": difference is None if compared else None,
            "first_difference": None if difference is None else difference.position + 1,
            "gap": None if difference is None else finite(difference.gap),
        })  # fmt: skip
    else:
        ink.legend()
        rows = []
        for name, counts in ((method, drafted.statistics), ("none", plain.statistics)):
            per_step, milliseconds = counts.tokens_per_target_step, 1e3 * counts.decode_seconds_per_token
            rows.append((name, counts.emitted, counts.steps, per_step, counts.drafted, counts.accepted, milliseconds))
        each = ("method", "tokens", "target steps", "tokens per target step|.2f", "drafted", "kept", "ms per token|.2f")
        show_table(each, rows)
        looping = repeated > LOOP_SHARE
        note = " (the text loops, which favours drafters; do not rely on the speed-up)" if looping else ""
        typer.echo(f"speed-up: {speed_up:.2f}")
        typer.echo(f"share of repeated 8-grams: {repeated:.2f}{note}")
        typer.echo(f"identical: {_verdict(difference, dtype, exact=exact, compared=compared)}")
        seed = f", seed {options['seed']}" if sampled else ""
        say(f"Median of {ROUNDS} repetitions in {dtype}{seed}.", "dim")
    if difference is not None and (exact or not difference.near_tie):
        raise typer.Exit(1)


def _repeated(
    generator: "Generator", prompt: "Prompt", options: Mapping[str, Any], ink: Ink | None, compared: bool
) -> "tuple[Generation, Generation, Difference | None]":
    """Generate the repetitions of both, and print the drafted text to `ink`, if any.

    Return both repetitions of median time, the drafted one first, and if `compared` the first difference of any two
    texts.
    """
    from foredraft.bench.demonstration import write_in_rounds
    from foredraft.bench.prove import difference_between
    from foredraft.generation import pieces

    repeating = "repeating, with and without drafting"
    with working(repeating) as tell:
        runs = write_in_rounds(generator, prompt, options, lambda _: None, lambda share: tell(share, repeating))
    if ink is not None:
        ink.print(pieces(runs[0][0].steps, generator.tokenizer, generator.encode(prompt).tolist()))
    pairs = [(drafted.token_ids, plain.token_ids) for drafted, plain in zip(*runs, strict=True)]
    unequal = next((pair for pair in pairs if compared and pair[0] != pair[1]), None)
    difference = None if unequal is None else difference_between(generator, prompt, options, *unequal)
    by_time = [sorted(texts, key=lambda each: each.statistics.decode_seconds_per_token) for texts in runs]
    drafted, plain = (texts[len(texts) // 2] for texts in by_time)
    return drafted, plain, difference


def _verdict(difference: "Difference | None", dtype: str, *, exact: bool, compared: bool) -> str:
    if not compared:
        return "not compared (sampled under rejection, both texts have the same distribution, not the same tokens)"
    if difference is None:
        return "yes"
    bug, tie = "this is a bug in {}, please report it", "{} can swap nearly tied tokens, --dtype float32 is exact"
    explanation = (tie if difference.near_tie and not exact else bug).format(dtype)
    where = f"first difference at token {difference.position + 1}, {difference.gap:.2g} below the best"
    return f"no ({where}; {explanation})"
