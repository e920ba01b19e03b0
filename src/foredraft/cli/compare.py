"""`foredraft generate --compare`: a method and plain decoding on one prompt, side by side.

Runs both, in alternating order, and prints their figures and whether they wrote the same. Does not know how either
works; the figures' definitions are those of the library's statistics.
"""

import json
import secrets
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from foredraft.cli.screen import Ink, say, working
from foredraft.cli.tables import show_table
from foredraft.errors import UsageError

if TYPE_CHECKING:
    from foredraft.api import Generator, Prompt
    from foredraft.cli.generate import Job
    from foredraft.generation import Generation, Stream


@dataclass(frozen=True, slots=True)
class _Pair:
    """What both wrote, the repetition of median time each, and what follows from it.

    Attributes:
        drafted: with the method.
        plain: without.
        speed_up: plain time per token / drafted time per token.
        repeated: share of 8-grams in the text that it holds before.
        difference: the first token that differs, counted from 1, or 0.
        gap: between the two best scores there.
        dtype: of the model.
        exact: whether rounding excuses no difference.
        same_text: whether both must write the same; sampled rejection keeps the law of the text, not its tokens.
    """

    drafted: "Generation"
    plain: "Generation"
    speed_up: float
    repeated: float
    difference: int
    gap: float
    dtype: str
    exact: bool
    same_text: bool = True


def compare_with_plain(generator: "Generator", job: "Job", prompt: "Prompt") -> bool:
    """Write with the generator's method and plainly, print both's figures; return whether they agree as they must.

    16-bit arithmetic rounds a pass over several rows differently, so there a difference is reported and excused; but
    not where all passes are compiled, which round alike.

    Raises:
        UsageError: the method is plain decoding itself.
    """
    from foredraft.bench.metrics import LOOP_SHARE
    from foredraft.bench.turns import ROUNDS

    if generator.method == "none":
        raise UsageError("--compare sets a method beside plain decoding, which is method none; name another method.")
    options = {**job.options, "seed": job.options.get("seed", secrets.randbits(32))}
    ink = Ink(job.color and not job.as_json, generator.drafter.source_names)
    pair = _run(generator, prompt, options, None if job.as_json else ink)
    if generator.verification == "rejection" and job.samples(generator):
        pair = replace(pair, same_text=False, difference=0)
    if job.as_json:
        typer.echo(json.dumps(_as_json(pair, generator.method, options if job.samples(generator) else {})))
    else:
        ink.legend()
        _print_table({generator.method: pair.drafted, "none": pair.plain})
        typer.echo(f"speed-up: {pair.speed_up:.2f}")
        looping = pair.repeated > LOOP_SHARE
        note = " (the text loops, which flatters drafters: no claim about speed can rest on it)" if looping else ""
        typer.echo(f"share of repeated 8-grams: {pair.repeated:.2f}{note}")
        typer.echo(f"identical: {_verdict(pair)}")
        shared = " What is learned is shared, so later repetitions knew the text." if job.config.get("share") else ""
        seed = f", seed {options['seed']}" if job.samples(generator) else ""
        say(f"Median of {ROUNDS} repetitions in {pair.dtype}{seed}.{shared}", "dim")
    return pair.difference == 0 or not pair.exact


def _run(generator: "Generator", prompt: "Prompt", options: Mapping[str, Any], ink: Ink | None) -> _Pair:
    """Write with both by turns, the first drafted text shown in `ink`, if any."""
    from foredraft.bench.metrics import first_difference, repeated_share
    from foredraft.bench.prove import is_exact
    from foredraft.bench.turns import write_by_turns
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
        drafted, plain = write_by_turns(generator, prompt, options, show, lambda share: tell(share, repeating))
    times = [statistics.median(map(_time, runs)) for runs in (plain, drafted)]
    pairs = [(one.token_ids, other.token_ids) for one, other in zip(drafted, plain, strict=True)]
    difference = next((first_difference(*pair) + 1 for pair in pairs if pair[0] != pair[1]), 0)
    return _Pair(
        drafted=_of_median_time(drafted),
        plain=_of_median_time(plain),
        speed_up=times[0] / times[1] if times[1] else 1.0,
        repeated=repeated_share(plain[0].token_ids),
        difference=difference,
        gap=_gap(generator, prompt, plain[0], difference, options) if difference else 0.0,
        dtype=dtype_name(generator.target.model),
        exact=is_exact(generator),
    )


def _time(run: "Generation") -> float:
    return run.statistics.decode_seconds_per_token


def _of_median_time(runs: "list[Generation]") -> "Generation":
    return sorted(runs, key=_time)[len(runs) // 2]


def _gap(
    generator: "Generator", prompt: "Prompt", run: "Generation", difference: int, options: Mapping[str, Any]
) -> float:
    """Return the distance between the two best scores for the token that differs, scored plainly, noise included."""
    import numpy as np

    from foredraft.bench.prove import top_two_gap

    prefix = np.concatenate([generator.encode(prompt), np.array(run.token_ids[: difference - 1], np.int64)])
    return top_two_gap(generator, prefix, options)[0]


def _verdict(pair: _Pair) -> str:
    if not pair.same_text:
        return "not compared (sampled under rejection, both texts have the same law, not the same tokens)"
    if not pair.difference:
        return "yes"
    if pair.exact:
        excuse = f"{pair.dtype} must not differ, so please report this"
    else:
        excuse = f"in {pair.dtype} near-ties may flip, --dtype float32 is exact"
    return f"no (first difference at token {pair.difference}; top-2 gap {pair.gap:.2g}; {excuse})"


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


def _as_json(pair: _Pair, method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    from foredraft.bench.turns import ROUNDS

    return {
        "text": pair.plain.text,
        "token_ids": pair.plain.token_ids,
        "method": method,
        "seed": options.get("seed"),
        "dtype": pair.dtype,
        "repetitions": ROUNDS,
        "statistics": {method: pair.drafted.statistics.as_dict(), "none": pair.plain.statistics.as_dict()},
        "speed_up": pair.speed_up,
        "repeated_8_grams": pair.repeated,
        "identical": pair.difference == 0 if pair.same_text else None,
        "first_difference": pair.difference or None,
        "top_2_gap": pair.gap if pair.difference else None,
    }
