"""Which method to use for this model, on this machine, for these prompts: a short comparison, and what figures say.

Says nothing that the intervals do not support, and does not know the terminal.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from time import perf_counter
from typing import Any

from foredraft.api import Generator
from foredraft.bench.cell import Cell, Environment
from foredraft.bench.method import BASE, PEER, parse_method
from foredraft.bench.metrics import LEAST_PAIRS, Ratio
from foredraft.bench.runner import Plan, run_plan
from foredraft.bench.summary import ALL, Summary, overall, summarize_cells
from foredraft.bench.tasks import TaskPrompt
from foredraft.contracts import CostCurve
from foredraft.errors import UsageError
from foredraft.model.rounding import EXACT

CANDIDATES = ("auto", "adaptix", "rest", "prompt_lookup")
"""Methods that need nothing besides the model, compared with plain decoding."""
_WANTED_PROMPTS = 12  # texts are as short as lets so many fit into the time, if each token took a pass of its own
_LEAST_TOKENS, _MOST_TOKENS = 16, 128
_ENOUGH_TEXTS = 8  # with so many texts without loops, the recommendation is by those alone
_MUCH_STALLED = 0.05  # a larger share is reported; a few in a hundred are usual where cores are shared


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What a short comparison says.

    Attributes:
        method: what to use; `none` where nothing is faster beyond doubt.
        ranked: the methods' figures over all prompts, the fastest first.
        curve: what a pass costs here by its rows.
        prompts: how many were written.
        tokens: the limit of each text.
        sentences: what the figures say, and why.
        failures: the cells whose method raised.
    """

    method: str
    ranked: tuple[Summary, ...]
    curve: CostCurve
    prompts: int
    tokens: int
    sentences: tuple[str, ...]
    failures: tuple[Cell, ...]


def recommend(
    generator: Generator, model: str, prompts: Sequence[TaskPrompt], sampling: dict[str, Any], seconds: float,
    tell: Callable[[float], None] = lambda _: None,
) -> Recommendation:  # fmt: skip
    """Compare the candidates with plain decoding, prompt after prompt, until the time is spent.

    Args:
        generator: loaded; its method is changed.
        model: as the user calls it.
        prompts: to draw from; of every task in turn.
        sampling: generation arguments besides the length and the seed.
        seconds: no prompt is begun that would probably end later; one is always written.
        tell: told the share of the time, or of the prompts, that is done.

    Raises:
        UsageError: an argument that cannot be honoured, or no prompt that could be written.
    """
    start = perf_counter()
    curve = generator.cost
    fitting = seconds / (_WANTED_PROMPTS * (1 + len(CANDIDATES)) * curve.seconds[0])
    tokens = round(min(max(fitting, _LEAST_TOKENS), _MOST_TOKENS))
    drawn = _by_turns(prompts)
    began: list[float] = []

    def enough() -> bool:
        began.append(perf_counter())
        done = len(began) - 1
        spent, a_prompt = began[-1] - start, (began[-1] - began[0]) / max(done, 1)
        tell(min(max(spent / seconds, done / len(drawn)), 1.0))
        return done > 0 and spent + a_prompt > seconds

    methods = [parse_method(name) for name in CANDIDATES]
    plan = Plan(model, methods, drawn, [{**sampling, "max_new_tokens": tokens, "seed": 0}])
    result = run_plan(generator, plan, enough=enough)
    summaries = summarize_cells(result.cells)
    ranked = _ranked([each for each in overall(summaries) if each.texts])
    if not ranked:
        reason = result.failures[0].failure if result.failures else "the time was too short"
        raise UsageError(f"No prompt could be written ({reason}); give other prompts or more time.")
    best = ranked[0]
    helps = _figure(best, _loops_left_out(ranked)).low > 1
    use, *more = advise(summaries, result.cells[0].environment)
    if best.texts < LEAST_PAIRS:
        use = f"Only {best.texts} of the prompts could be measured, too few for an interval: give more time. {use}"
    return Recommendation(
        method=best.method if helps else BASE,
        ranked=tuple(ranked),
        curve=curve,
        prompts=best.texts,
        tokens=tokens,
        sentences=(use, *_reasons(best, curve, helps), *more),
        failures=tuple(result.failures),
    )


def _by_turns(prompts: Sequence[TaskPrompt]) -> list[TaskPrompt]:
    """Return the prompts in an order that can be cut anywhere: the tasks by turns, each shuffled."""
    groups: dict[str, list[TaskPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.task, []).append(prompt)
    for group in groups.values():
        random.Random(0).shuffle(group)  # noqa: S311  # an order, not a secret
    return [prompt for row in zip_longest(*groups.values()) for prompt in row if prompt is not None]


def _reasons(best: Summary, curve: CostCurve, helps: bool) -> list[str]:
    """Say what a verified draft cost and what it gave."""
    counts = best.statistics
    if not counts.drafting_steps:
        return [f"{best.method} saw no draft worth verifying."]
    rows = 1 + round(counts.drafted / counts.drafting_steps)
    cost = curve.table(rows)[rows] / curve.seconds[0]
    guessed = (
        f"A pass over {rows} rows, {best.method}'s usual draft and the token before it, takes {cost:.2f} times a pass "
        f"over one; {counts.draft_acceptance_rate:.0%} of the drafted tokens were right, which makes "
        f"{counts.tokens_per_target_step:.2f} tokens a pass."
    )
    if not helps:
        return [guessed]
    nodes = (
        "Leave num_speculative_tokens out: what passes cost then decides at every step how many nodes are drafted, "
        f"{best.nodes_per_step:.1f} on average here."
    )
    return [guessed, nodes]


def advise(summaries: Sequence[Summary], environment: Environment) -> list[str]:
    """Return sentences on the summaries of one setting, every task and method."""
    whole = overall(summaries)
    ranked = _ranked([each for each in whole if not _is_baseline(each) and each.texts])
    if not ranked:
        return ["There is no method of foredraft among these cells to recommend."]
    calm = _loops_left_out(ranked)
    sentences = [_choice(ranked, calm, environment)]
    if _figure(ranked[0], calm).low > 1:
        sentences += _exceptions(summaries, ranked[0])
    return [*sentences, *_loops(ranked[0], calm), *_controls(whole), *_identity(ranked, environment), *_stalls(whole)]


def _loops_left_out(ranked: Sequence[Summary]) -> bool:
    """Say whether enough texts do not loop to speak of those alone."""
    return min(each.texts_without_loops for each in ranked) >= _ENOUGH_TEXTS


def _ranked(own: Sequence[Summary]) -> list[Summary]:
    """Return the methods, the fastest first."""
    calm = bool(own) and _loops_left_out(own)
    return sorted(own, key=lambda each: _figure(each, calm).value, reverse=True)


def _is_baseline(summary: Summary) -> bool:
    return summary.method == BASE or summary.method.partition(":")[0] == PEER


def _figure(summary: Summary, calm: bool) -> Ratio:
    return summary.speed_up_without_loops if calm else summary.speed_up


def _choice(ranked: Sequence[Summary], calm: bool, environment: Environment) -> str:
    best, where = ranked[0], f"{environment['model']['name']} in {environment['model']['dtype']} on this machine"
    figure = _figure(best, calm)
    if figure.low <= 1:
        return (
            f"For {where}, no method is faster than plain decoding beyond doubt: the best, {best.method}, has "
            f"{figure} of its speed. Leave drafting off, or measure more prompts."
        )
    texts = "over the texts that do not loop" if calm else "over all texts"
    sentence = f"For {where}, use {best.method}: {texts} it is {figure} times as fast as plain decoding (95% interval)."
    equal = [each.method for each in ranked[1:] if _figure(each, calm).high >= figure.low]
    if equal:
        sentence += f" Its interval overlaps that of {', '.join(equal)}."
    return sentence


def _exceptions(summaries: Sequence[Summary], best: Summary) -> list[str]:
    sentences = []
    tasks = [each for each in summaries if each.task != ALL and not _is_baseline(each) and each.texts >= LEAST_PAIRS]
    for usual in (each for each in tasks if each.method == best.method):
        task, own = usual.task, usual.speed_up
        top = max((each for each in tasks if each.task == task), key=lambda each: each.speed_up.value)
        if top.speed_up.low > own.high:
            sentences.append(f"For {task}, {top.method} is faster: {top.speed_up} against {own}.")
        elif own.high < 1:
            sentences.append(f"For {task}, it is slower than plain decoding: {own}.")
        elif own.low <= 1:
            sentences.append(f"For {task}, its gain is not beyond doubt: {own}.")
    return sentences


def _loops(best: Summary, calm: bool) -> list[str]:
    looping = best.texts - best.texts_without_loops
    if not looping:
        return []
    says = f"{looping} of {best.texts} plain texts loop, which flatters every method that copies"
    if calm:
        return [f"{says}; with them, {best.method} is {best.speed_up} times as fast."]
    return [f"{says}; there are too few others to speak of by themselves, so read these figures as an upper bound."]


def _controls(whole: Sequence[Summary]) -> list[str]:
    sentences = []
    for each in whole:
        if each.method == BASE:
            sound = each.speed_up.low <= 1 <= each.speed_up.high
            verdict = "contains 1, as it should" if sound else "leaves out 1, which it should not"
            sentences.append(f"Plain decoding against itself gives {each.speed_up}, which {verdict}.")
        elif _is_baseline(each) and each.texts:
            sentences.append(f"{each.method}, timed whole, has {each.speed_up} of the speed of our plain decoding.")
    return sentences


def _identity(own: Sequence[Summary], environment: Environment) -> list[str]:
    texts, identical = sum(each.texts for each in own), sum(each.identical for each in own)
    if identical == texts:
        return [f"All {texts} drafted texts are plain decoding's, token for token."]
    dtype = environment["model"]["dtype"]
    reason = (
        "in 16-bit numbers near-ties flip; `foredraft prove` tells them from mistakes"
        if dtype not in EXACT
        else "methods under rejection verification differ by design; anything else is a mistake: run `foredraft prove`"
    )
    return [f"{identical} of {texts} drafted texts are plain decoding's, token for token; {reason}."]


def _stalls(whole: Sequence[Summary]) -> list[str]:
    most = max((each.stalled for each in whole), default=0.0)
    if most < _MUCH_STALLED:
        return []
    busy = "it was doing something else as well. Do not trust small differences."
    return [f"The machine held passes up for {most:.1%} of the time, which the figures leave out: {busy}"]
