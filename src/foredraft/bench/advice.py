"""What the figures say in plain words: which method to use for this model, on this machine, for these tasks.

Knows summaries and their environment. Says nothing that the intervals do not carry.
"""

from collections.abc import Sequence

from foredraft.bench.environment import Environment
from foredraft.bench.method import BASE, PEER
from foredraft.bench.metrics import Ratio
from foredraft.bench.summary import ALL, Summary, overall
from foredraft.model.quantized import EXACT

_ENOUGH_TEXTS = 8
"""Texts without loops from which they are spoken of instead of all."""
_MUCH_STALLED = 0.05
"""The share of the time held up from which it is spoken of; a few in a hundred are usual where cores are shared."""


def advise(summaries: Sequence[Summary], environment: Environment) -> list[str]:
    """Return sentences on one setting.

    Args:
        summaries: of one setting, every task and method.
        environment: what they are true of.
    """
    whole = overall(summaries)
    own = [each for each in whole if not _is_baseline(each) and each.texts]
    if not own:
        return ["There is no method of foredraft among these cells to recommend."]
    honest = min(each.texts_without_loops for each in own) >= _ENOUGH_TEXTS
    ranked = sorted(own, key=lambda each: _figure(each, honest).value, reverse=True)
    sentences = [_recommendation(ranked, honest, environment)]
    if _figure(ranked[0], honest).low > 1:
        sentences += _exceptions(summaries, ranked[0])
    return [*sentences, *_loops(ranked[0], honest), *_controls(whole), *_identity(own, environment), *_stalls(whole)]


def _is_baseline(summary: Summary) -> bool:
    return summary.method == BASE or summary.method.partition(":")[0] == PEER


def _figure(summary: Summary, honest: bool) -> Ratio:
    return summary.speed_up_without_loops if honest else summary.speed_up


def _recommendation(ranked: Sequence[Summary], honest: bool, environment: Environment) -> str:
    best, where = ranked[0], f"{environment['model']['name']} in {environment['model']['dtype']} on this machine"
    figure = _figure(best, honest)
    if figure.low <= 1:
        return (
            f"For {where}, no method is faster than plain decoding beyond doubt: the best, {best.method}, has "
            f"{figure} of its speed. Leave drafting off, or measure more prompts."
        )
    texts = "over the texts that do not loop" if honest else "over all texts"
    sentence = f"For {where}, use {best.method}: {texts} it is {figure} times as fast as plain decoding."
    equal = [each.method for each in ranked[1:] if _figure(each, honest).high >= figure.low]
    if equal:
        sentence += f" {_joined(equal)} cannot be told apart from it here."
    return sentence


def _exceptions(summaries: Sequence[Summary], best: Summary) -> list[str]:
    sentences = []
    by_task: dict[str, list[Summary]] = {}
    for each in summaries:
        if each.task != ALL and not _is_baseline(each) and each.texts:
            by_task.setdefault(each.task, []).append(each)
    for task, group in by_task.items():
        usual = next((each for each in group if each.method == best.method), None)
        top = max(group, key=lambda each: each.speed_up.value)
        if usual is not None and top.speed_up.low > usual.speed_up.high:
            sentences.append(f"For {task}, {top.method} is faster: {top.speed_up} against {usual.speed_up}.")
        elif usual is not None and usual.speed_up.high < 1:
            sentences.append(f"For {task}, it is slower than plain decoding: {usual.speed_up}.")
        elif usual is not None and usual.speed_up.low <= 1:
            sentences.append(f"For {task}, its gain is not beyond doubt: {usual.speed_up}.")
    return sentences


def _loops(best: Summary, honest: bool) -> list[str]:
    looping = best.texts - best.texts_without_loops
    if not looping:
        return []
    says = f"{looping} of {best.texts} plain texts loop, which flatters every method that copies"
    if honest:
        return [f"{says}; with them, {best.method} is {best.speed_up} times as fast."]
    return [f"{says}; there are too few others to speak of by themselves, so read these figures as an upper bound."]


def _controls(whole: Sequence[Summary]) -> list[str]:
    sentences = []
    for each in whole:
        if each.method == BASE:
            holds = "as it should" if each.speed_up.low <= 1 <= each.speed_up.high else "which it should not"
            inside = "contains" if each.speed_up.low <= 1 <= each.speed_up.high else "leaves out"
            sentences.append(f"Plain decoding against itself gives {each.speed_up}, which {inside} 1, {holds}.")
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
    sentence = (
        f"The machine held passes up for {most:.1%} of the time, which the figures leave out: it was doing something "
        "else as well. Do not trust small differences."
    )
    return [sentence]


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
