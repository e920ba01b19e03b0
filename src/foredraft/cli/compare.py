"""`foredraft generate --compare`: a method and plain decoding on one prompt, side by side.

Runs both, in alternating order, and prints their figures and whether they wrote the same. Does not know how either
works; the figures' definitions are those of the library's statistics.
"""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from foredraft.cli.screen import Ink, say, show_json, show_table, working
from foredraft.errors import UsageError

if TYPE_CHECKING:
    from foredraft.api import Generator, Prompt
    from foredraft.bench.prove import Difference
    from foredraft.cli.job import Job
    from foredraft.generation import Generation, Stream


@dataclass(frozen=True, slots=True)
class _Pair:
    """What both wrote, the repetition of median time each, and what follows from it.

    Attributes:
        drafted: with the method.
        plain: without.
        repeated: share of 8-grams of the text that occurred in it before.
        difference: where the texts first differ, or None; None also where they need not be the same.
        dtype: of the model.
        exact: whether rounding excuses no difference.
        compared: whether both must be the same; sampled rejection keeps the distribution, not the tokens.
    """

    drafted: "Generation"
    plain: "Generation"
    repeated: float
    difference: "Difference | None"
    dtype: str
    exact: bool
    compared: bool = True

    @property
    def speed_up(self) -> float:
        """Plain time per token / drafted time per token."""
        own = _time(self.drafted)
        return _time(self.plain) / own if own else 1.0


def compare_with_plain(generator: "Generator", job: "Job", prompt: "Prompt", *, as_json: bool) -> bool:
    """Write with the generator's method and plainly, print both's figures; return whether they agree as they must.

    16-bit arithmetic rounds a pass over several rows differently, so there a difference is reported and excused; but
    not where all passes are compiled, which round alike.

    Raises:
        UsageError: the method is plain decoding itself.
    """
    from foredraft.bench.demonstration import ROUNDS
    from foredraft.bench.metrics import LOOP_SHARE

    if generator.method == "none":
        raise UsageError("--compare sets a method beside plain decoding, which is method none; name another method.")
    options, samples = {**job.options, "seed": job.options.get("seed", secrets.randbits(32))}, job.samples(generator)
    compared = not (samples and generator.verification == "rejection")
    ink = Ink(job.color, generator.drafter.source_names)
    pair = _run(generator, prompt, options, None if as_json else ink, compared)
    if as_json:
        show_json(_as_json(pair, generator.method, options["seed"] if samples else None, ROUNDS))
    else:
        ink.legend()
        _print_table({generator.method: pair.drafted, "none": pair.plain})
        looping = pair.repeated > LOOP_SHARE
        note = " (the text loops, which flatters drafters: no claim about speed can rest on it)" if looping else ""
        typer.echo(f"speed-up: {pair.speed_up:.2f}")
        typer.echo(f"share of repeated 8-grams: {pair.repeated:.2f}{note}")
        typer.echo(f"identical: {_verdict(pair)}")
        shared = " What is learned is shared, so later repetitions knew the text." if job.config.get("share") else ""
        seed = f", seed {options['seed']}" if samples else ""
        say(f"Median of {ROUNDS} repetitions in {pair.dtype}{seed}.{shared}", "dim")
    return pair.difference is None or not pair.exact


def _run(
    generator: "Generator", prompt: "Prompt", options: Mapping[str, Any], ink: Ink | None, compared: bool
) -> _Pair:
    """Write with both by turns, the first drafted text shown in `ink`, if any."""
    from foredraft.bench.demonstration import write_in_rounds
    from foredraft.bench.metrics import repeated_share
    from foredraft.bench.prove import difference_between, is_exact
    from foredraft.model.rounding import dtype_name

    with ExitStack() as screen:
        tell = screen.enter_context(working("warming up"))

        def show(stream: "Stream") -> None:
            nonlocal tell
            screen.close()  # no progress within the text
            for piece in stream:
                if ink is not None:
                    ink.write(piece)
            if ink is not None:
                ink.finish()
            tell = screen.enter_context(working("repeating"))

        repeating = "repeating, with and without drafting"
        drafted, plain = write_in_rounds(generator, prompt, options, show, lambda share: tell(share, repeating))
    pairs = [(one.token_ids, other.token_ids) for one, other in zip(drafted, plain, strict=True)]
    unlike = next((pair for pair in pairs if compared and pair[0] != pair[1]), None)
    return _Pair(
        _of_median_time(drafted), _of_median_time(plain), repeated_share(plain[0].token_ids),
        None if unlike is None else difference_between(generator, prompt, options, *unlike),
        dtype_name(generator.target.model), is_exact(generator), compared,
    )  # fmt: skip


def _time(run: "Generation") -> float:
    return run.statistics.decode_seconds_per_token


def _of_median_time(runs: "Sequence[Generation]") -> "Generation":
    return sorted(runs, key=_time)[len(runs) // 2]


def _verdict(pair: _Pair) -> str:
    if not pair.compared:
        return "not compared (sampled under rejection, both texts have the same distribution, not the same tokens)"
    if pair.difference is None:
        return "yes"
    if pair.exact:
        excuse = f"{pair.dtype} must not differ, so please report this"
    else:
        excuse = f"in {pair.dtype} near-ties may flip, --dtype float32 is exact"
    position = pair.difference.position + 1
    return f"no (first difference at token {position}; top-2 gap {pair.difference.gap:.2g}; {excuse})"


def _print_table(rows: "Mapping[str, Generation]") -> None:
    headings = ("method", "tokens", "target steps", "tokens per target step", "drafted", "kept", "ms per token")
    shown = [
        (
            name, str(counts.emitted), str(counts.steps), f"{counts.tokens_per_target_step:.2f}", str(counts.drafted),
            str(counts.accepted), f"{1e3 * counts.decode_seconds_per_token:.2f}",
        )
        for name, counts in ((name, run.statistics) for name, run in rows.items())
    ]  # fmt: skip
    show_table(headings, shown)


def _as_json(pair: _Pair, method: str, seed: int | None, repetitions: int) -> dict[str, Any]:
    return {
        "text": pair.plain.text,
        "token_ids": pair.plain.token_ids,
        "method": method,
        "seed": seed,
        "dtype": pair.dtype,
        "repetitions": repetitions,
        "statistics": {method: pair.drafted.statistics.as_dict(), "none": pair.plain.statistics.as_dict()},
        "speed_up": pair.speed_up,
        "repeated_8_grams": pair.repeated,
        "identical": pair.difference is None if pair.compared else None,
        "first_difference": None if pair.difference is None else pair.difference.position + 1,
        "top_2_gap": None if pair.difference is None else pair.difference.gap,
    }
