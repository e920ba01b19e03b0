"""Recommends a method for a model, a machine and prompts: runs a short comparison, and explains its results in text.

Every claim is supported by the confidence intervals. Does not depend on the terminal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from foredraft.api import Generator
from foredraft.bench.cell import Cell
from foredraft.bench.method import BASE, parse_method
from foredraft.bench.runner import Run
from foredraft.bench.summary import LEAST_PAIRS, Ratio, Summary, overall, summarize_cells
from foredraft.bench.tasks import TaskPrompt, interleaved
from foredraft.errors import UsageError
from foredraft.model.rounding import EXACT, dtype_name

CANDIDATES = ("auto", "adaptix", "rest", "prompt_lookup")  # the compared methods, which need nothing but the model
_WANTED_PROMPTS = 12  # text length is chosen so that this many prompts fit into the time, at one token per pass
_LEAST_TOKENS, _MOST_TOKENS = 16, 128  # limits of the text length (chosen)
_ENOUGH_TEXTS = 8  # with this many texts without loops, looping texts are ignored (chosen)
_MUCH_STALLED = 0.05  # report a larger share of stalled time; a few percent are usual on shared cores


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The result of a short comparison."""

    method: str  # the recommended method; `none` if none is significantly faster
    ranked: tuple[Summary, ...]  # the methods' figures over all prompts, best first
    prompts: int  # number of measured prompts
    tokens: int  # maximum length of each text
    sentences: tuple[str, ...]  # the explanation
    failures: tuple[Cell, ...]  # cells whose method raised


def recommend(
    generator: Generator, model: str, prompts: Sequence[TaskPrompt], sampling: dict[str, Any], seconds: float,
    tell: Callable[[float], None] = lambda _: None,
) -> Recommendation:  # fmt: skip
    """Compare the candidates with plain decoding, prompt by prompt and task by task, until the `seconds` are used up.

    A prompt that would probably exceed the time is not started, except the first. Changes the generator's method.
    `model` is the name given by the user; `sampling` are generation arguments except length and seed; `tell` receives
    the share of the time, or of the prompts, that is done. UsageError if no prompt could be measured.
    """
    start, curve, ordered = perf_counter(), generator.cost, interleaved(prompts)
    fitting = seconds / (_WANTED_PROMPTS * (1 + len(CANDIDATES)) * curve.seconds[0])
    tokens = round(min(max(fitting, _LEAST_TOKENS), _MOST_TOKENS))
    starts: list[float] = []

    def enough() -> bool:
        starts.append(perf_counter())
        done = len(starts) - 1
        elapsed, per_prompt = starts[-1] - start, (starts[-1] - starts[0]) / max(done, 1)
        tell(min(max(elapsed / seconds, done / len(ordered)), 1.0))
        return done > 0 and elapsed + per_prompt > seconds

    methods = [parse_method(name) for name in CANDIDATES]
    run = Run(generator, methods, ordered, [{**sampling, "max_new_tokens": tokens, "seed": 0}])
    run.measure(enough=enough)
    summaries = summarize_cells(run.cells)
    ranked, _ = _ranked(summaries)
    if not ranked:
        reason = run.failures[0].failure if run.failures else "the time was too short"
        raise UsageError(f"No prompt could be measured ({reason}); give other prompts or more time.")
    best, figure = ranked[0]
    use, *more = advise(summaries, model, dtype_name(generator.target.outline))
    if best.texts < LEAST_PAIRS:
        use = f"Only {best.texts} of the prompts could be measured, too few for an interval: give more time."
    method, figures = best.method if figure.low > 1 else BASE, tuple(each for each, _ in ranked)
    return Recommendation(method, figures, best.texts, tokens, (use, *more), tuple(run.failures))


def advise(summaries: Sequence[Summary], model: str, dtype: str) -> list[str]:
    """Return sentences that interpret the summaries of one setting, with all tasks and one or more methods."""
    ranked, without_loops = _ranked(summaries)
    (best, figure), *others = ranked
    if figure.low > 1:
        texts = "over the texts that do not loop" if without_loops else "over all texts"
        use = f"use {best.method}: {texts} it is {figure} times as fast as plain decoding (95% interval)."
        equal = [each.method for each, ratio in others if ratio.high >= figure.low]
        use += f" Its interval overlaps that of {', '.join(equal)}." if equal else ""
    else:
        use = (
            f"no method is significantly faster than plain decoding: the best, {best.method}, has {figure} of its "
            "speed. Leave drafting off, or measure more prompts."
        )
    sentences = [f"For {model} in {dtype} on this machine, {use}"]
    if looping := best.texts - best.texts_without_loops:
        loops = f"{looping} of {best.texts} plain texts loop, which favours methods that copy; "
        sentences.append(
            f"{loops}with them, {best.method} is {best.speed_up} times as fast."
            if without_loops
            else f"{loops}the other texts are too few to be used alone, so read these figures as an upper bound."
        )
    sentences.append(_identity([each for each, _ in ranked], dtype))
    if (stalled := max(each.stalled for each, _ in ranked)) >= _MUCH_STALLED:
        sentences.append(
            f"Other load delayed passes for up to {stalled:.1%} of the time, which the figures exclude. Do not trust "
            "small differences."
        )
    return sentences


def _ranked(summaries: Sequence[Summary]) -> tuple[list[tuple[Summary, Ratio]], bool]:
    """Return the methods with the speed-up that counts, best first, and whether it is without loops.

    The significantly faster ones come first, each group by its speed-ups.
    """
    own = [each for each in overall(summaries) if each.texts]
    without_loops = min((each.texts_without_loops for each in own), default=0) >= _ENOUGH_TEXTS
    pairs = [(each, each.speed_up_without_loops if without_loops else each.speed_up) for each in own]
    # a gain that may be chance must not hide one that is not
    return sorted(pairs, key=lambda pair: (pair[1].low > 1, pair[1].value), reverse=True), without_loops


def _identity(own: Sequence[Summary], dtype: str) -> str:
    texts, identical = sum(each.texts for each in own), sum(each.identical for each in own)
    if identical == texts:
        return f"All {texts} drafted texts equal plain decoding's, token by token."
    reason = (
        "differences are bugs: run `foredraft prove`"
        if dtype in EXACT
        else "16-bit rounding can swap nearly tied tokens; `foredraft prove` distinguishes that from errors"
    )
    return f"{identical} of {texts} drafted texts equal plain decoding's, token by token; {reason}."
