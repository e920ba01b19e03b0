"""`foredraft generate` and `foredraft explain`: generate a text, compare with plain decoding, or report on its drafts.

Does not depend on how texts are generated; the figures are defined by `foredraft.engine.statistics`.
"""

import math
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import flags
from foredraft.cli.flags import generation_flag, in_drafting, in_text
from foredraft.cli.job import Job, prompt_text, setting, speculative_options
from foredraft.cli.screen import Ink, say, show_json, show_table, wants_color, working
from foredraft.errors import UsageError
from foredraft.model.gguf import SMOLLM2

if TYPE_CHECKING:
    from foredraft.api import Generator, Prompt
    from foredraft.bench.drafts import Account
    from foredraft.bench.prove import Difference
    from foredraft.generation import Generation, Stream

_FIGURES = {
    "tokens": "tokens per step with a draft",
    "plain_milliseconds": "ms per pass without a draft",
    "drafted_milliseconds": "ms per pass with a draft",
    "overhead_milliseconds": "ms of overhead per step with a draft",
}


def generate(
    prompt: flags.PromptArgument = None,
    file: flags.FileOption = None,
    model: flags.ModelOption = SMOLLM2,
    dtype: flags.DtypeOption = "auto",
    device: flags.DeviceOption = None,
    eager: flags.EagerOption = False,
    method: flags.MethodOption = None,
    speculative_config: flags.ConfigOption = None,
    draft_model: Annotated[str | None, in_drafting(help="The draft model, for methods that use one")] = None,
    num_speculative_tokens: flags.NodesOption = None,
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
        list[str] | None,
        generation_flag("stop_strings", "the text ends after this, and includes it; repeatable"),
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
    drafting = {"num_speculative_tokens": num_speculative_tokens, "model": draft_model, "memory": memory}
    config = speculative_options(speculative_config, verification=verification, **drafting)
    job = Job(
        model, dtype, device, eager, method, config,
        {name: value for name, value in options.items() if value not in (None, [])},
        system, raw, color=wants_color(color) and not as_json,
    )  # fmt: skip
    generator = job.load()
    ink = None if as_json else Ink(job.color, generator.drafter.source_names)
    (_compare if compare else _write)(generator, job, job.prompt(generator, text), ink)


def write(generator: "Generator", job: Job, prompt: "Prompt", ink: Ink | None) -> "tuple[Generation, bool]":
    """Generate a text and print it to `ink`; return the result so far, and whether Ctrl-C ended it."""
    stream = generator.stream(prompt, **job.options)
    interrupted = False
    try:
        for piece in stream:
            if ink is not None:
                ink.write(piece)
    except KeyboardInterrupt:  # keep the text so far
        interrupted = True
    finally:
        if ink is not None:
            ink.finish()
    return stream.generation, interrupted


def summary(generation: "Generation", *, seed: bool, interrupted: bool = False) -> str:
    """Return a summary in one line: counts, rates, finish reason, and the seed if it matters."""
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


def _write(generator: "Generator", job: Job, prompt: "Prompt", ink: Ink | None) -> None:
    generation, interrupted = write(generator, job, prompt, ink)
    generator.save()
    samples = job.samples(generator)
    if ink is None:
        steps = [
            {
                "emitted": step.emitted,
                "accepted": step.accepted,
                "drafted": step.drafted,
                "sources": step.sources,
                "microseconds": {part: nanoseconds / 1e3 for part, nanoseconds in step.nanoseconds.items()},
            }
            for step in generation.steps
        ]
        show_json({
            "text": generation.text,
            "token_ids": generation.token_ids,
            "finish_reason": "interrupted" if interrupted else generation.finish_reason,
            "prompt_length": generation.prompt_length,
            "seed": generation.seed if samples else None,
            "statistics": generation.statistics.as_dict(),
            "steps": steps,
        })  # fmt: skip
    else:
        ink.legend()
        say(summary(generation, seed=samples, interrupted=interrupted), "dim")
    if interrupted:
        raise KeyboardInterrupt


# --- --compare


@dataclass(frozen=True, slots=True)
class _Pair:
    """The comparison of a method with plain decoding, with the repetition of median time of each."""

    drafted: "Generation"
    plain: "Generation"
    repeated: float  # share of repeated 8-grams in the text
    difference: "Difference | None"  # None if the texts are equal or need not be
    dtype: str
    exact: bool  # whether no difference is allowed
    compared: bool = True  # whether the texts must be equal; sampling under rejection keeps only the distribution

    @property
    def speed_up(self) -> float:
        """Plain time per token / the method's."""
        own = _time(self.drafted)
        return _time(self.plain) / own if own else 1.0


def _compare(generator: "Generator", job: Job, prompt: "Prompt", ink: Ink | None) -> None:
    """Compare the generator's method with plain decoding, and print the figures of both.

    In 16-bit arithmetic, a pass over several rows rounds differently, so a difference is reported but is no failure,
    unless all passes are compiled and round identically.

    Raises:
        UsageError: the method is plain decoding itself.
        typer.Exit: with status 1, if the texts differ but must be equal.
    """
    from foredraft.bench.demonstration import ROUNDS
    from foredraft.bench.metrics import LOOP_SHARE

    method = generator.method
    if method == "none":
        raise UsageError("--compare compares a method with plain decoding, which is method none; choose another one.")
    options, samples = {**job.options, "seed": job.options.get("seed", secrets.randbits(32))}, job.samples(generator)
    compared = not (samples and generator.verification == "rejection")
    pair = _run(generator, prompt, options, ink, compared)
    difference = pair.difference
    if ink is None:
        show_json({
            "text": pair.plain.text,
            "token_ids": pair.plain.token_ids,
            "method": method,
            "seed": options["seed"] if samples else None,
            "dtype": pair.dtype,
            "repetitions": ROUNDS,
            "statistics": {method: pair.drafted.statistics.as_dict(), "none": pair.plain.statistics.as_dict()},
            "speed_up": pair.speed_up,
            "repeated_8_grams": pair.repeated,
            "identical": difference is None if pair.compared else None,
            "first_difference": None if difference is None else difference.position + 1,
            "top_2_gap": None if difference is None else difference.gap,
        })  # fmt: skip
    else:
        ink.legend()
        headings = ("method", "tokens", "target steps", "tokens per target step", "drafted", "kept", "ms per token")
        show_table(headings, [_row(method, pair.drafted), _row("none", pair.plain)])
        looping = pair.repeated > LOOP_SHARE
        note = " (the text loops, which favours drafters; do not rely on the speed-up)" if looping else ""
        typer.echo(f"speed-up: {pair.speed_up:.2f}")
        typer.echo(f"share of repeated 8-grams: {pair.repeated:.2f}{note}")
        typer.echo(f"identical: {_verdict(pair)}")
        shared = " With share, later repetitions had learned the text." if job.config.get("share") else ""
        seed = f", seed {options['seed']}" if samples else ""
        say(f"Median of {ROUNDS} repetitions in {pair.dtype}{seed}.{shared}", "dim")
    if difference is not None and pair.exact:
        raise typer.Exit(1)


def _run(
    generator: "Generator", prompt: "Prompt", options: Mapping[str, Any], ink: Ink | None, compared: bool
) -> _Pair:
    """Generate the repetitions of both, and print the first drafted text to `ink`, if any."""
    from foredraft.bench.demonstration import write_in_rounds
    from foredraft.bench.metrics import repeated_share
    from foredraft.bench.prove import difference_between, is_exact
    from foredraft.model.rounding import dtype_name

    with ExitStack() as screen:
        tell = screen.enter_context(working("warming up"))

        def show(stream: "Stream") -> None:
            nonlocal tell
            screen.close()  # hide the progress while the text is printed
            for piece in stream:
                if ink is not None:
                    ink.write(piece)
            if ink is not None:
                ink.finish()
            tell = screen.enter_context(working("repeating"))

        repeating = "repeating, with and without drafting"
        drafted, plain = write_in_rounds(generator, prompt, options, show, lambda share: tell(share, repeating))
    pairs = [(one.token_ids, other.token_ids) for one, other in zip(drafted, plain, strict=True)]
    unequal = next((pair for pair in pairs if compared and pair[0] != pair[1]), None)
    return _Pair(
        _of_median_time(drafted), _of_median_time(plain), repeated_share(plain[0].token_ids),
        None if unequal is None else difference_between(generator, prompt, options, *unequal),
        dtype_name(generator.target.model), is_exact(generator), compared,
    )  # fmt: skip


def _time(run: "Generation") -> float:
    return run.statistics.decode_seconds_per_token


def _of_median_time(runs: "list[Generation]") -> "Generation":
    return sorted(runs, key=_time)[len(runs) // 2]


def _verdict(pair: _Pair) -> str:
    if not pair.compared:
        return "not compared (sampled under rejection, both texts have the same distribution, not the same tokens)"
    if pair.difference is None:
        return "yes"
    if pair.exact:
        explanation = f"this is a bug in {pair.dtype}, please report it"
    else:
        explanation = f"{pair.dtype} can swap nearly tied tokens, --dtype float32 is exact"
    position = pair.difference.position + 1
    return f"no (first difference at token {position}; top-2 gap {pair.difference.gap:.2g}; {explanation})"


def _row(name: str, run: "Generation") -> list[str]:
    counts = run.statistics
    return [
        name, str(counts.emitted), str(counts.steps), f"{counts.tokens_per_target_step:.2f}", str(counts.drafted),
        str(counts.accepted), f"{1e3 * counts.decode_seconds_per_token:.2f}",
    ]  # fmt: skip


# --- explain


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
    """Generate a text and report its drafts: sources, accepted and wasted, expected against measured cost."""
    text = prompt_text(prompt, file)
    config = speculative_options(speculative_config, num_speculative_tokens=num_speculative_tokens)
    options = setting(temperature, max_new_tokens=max_new_tokens, seed=seed)
    job = Job(model, dtype, device, eager, method, config, options, color=wants_color(color))
    generator = job.load()
    with working("writing"):
        from foredraft.bench.drafts import account_for
        from foredraft.generation import pieces

        account = account_for(generator, job.prompt(generator, text), job.options)
    if as_json:
        show_json({"text": account.generation.text, **account.as_dict()})
        return
    ink = Ink(job.color, generator.drafter.source_names)
    for piece in pieces(account.generation.steps, generator.tokenizer):
        ink.write(piece)
    ink.finish()
    ink.legend()
    _print_account(account)


def _print_account(account: "Account") -> None:
    from foredraft.bench.summary import reliability_table

    counts = account.generation.statistics
    typer.echo(
        f"{counts.emitted} tokens in {counts.steps} steps, {account.plain_steps} of them without a draft: "
        f"{counts.tokens_per_target_step:.2f} tokens per step, {1e3 * counts.decode_seconds_per_token:.2f} ms per token"
    )
    sources = [[str(value) for value in each.values()] for each in account.sources]
    show_table(("source", "drafted", "accepted", "wasted"), sources, "draft sources")
    show_table(*reliability_table(account.counts.reliability), "estimated and actual acceptance")
    pairs = {name: (account.expected.get(name, math.nan), account.measured[name]) for name in _FIGURES}
    rows = [[_FIGURES[name], *("-" if math.isnan(each) else f"{each:.2f}" for each in pairs[name])] for name in pairs]
    show_table(("", "expected", "measured"), rows, "tokens and cost of steps")
