"""Search for the sub-layers that a model can skip, by the speed-up that skipping them promises.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding" (ACL 2024),
searches by timing whole generations. Here each candidate reads the model's own texts once, and the steps that it would
have saved are counted, which measures the same and is faster. Works on models, token ids and seconds, not on text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foredraft.contracts import CostCurve, TokenIds
from foredraft.graph.layout import lay_out_text
from foredraft.graph.tree import BoolArray
from foredraft.model.candidates import Imitation, candidates
from foredraft.model.cost import measure_cost
from foredraft.model.skipping import Skipped, default_skipped, skipping
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions

_RESTARTS = 0.25  # share of trials that draw a new set; the others change the best set so far (all six chosen)
_MOST_CHANGES = 3  # sub-layers changed in a trial
_LEAST_SHARE, _MOST_SHARE = 0.1, 0.7  # of the sub-layers, in a new set
_MOST_REDRAWN = 200  # consecutive known sets after which the search ends
_SECONDS = 0.5  # time to measure each kind of pass


class WrittenText(NamedTuple):
    """A text that the model wrote."""

    ids: TokenIds  # int64[n], prompt included
    prompt_length: int
    sampling: SamplingOptions  # as used


class SkippingCosts(NamedTuple):
    """Times of the whole model's passes, and the shares of a pass that one layer's attention and MLP take."""

    curve: CostCurve
    attention: float
    mlp: float

    def draft_cost(self, skipped: Skipped) -> float:
        """Return the cost of a one-row pass without the sub-layers `skipped`, relative to the whole model's."""
        left = 1.0 - self.attention * len(skipped.attention) - self.mlp * len(skipped.mlp)
        return max(0.0, left)  # rounding can take it below


@dataclass(frozen=True, slots=True)
class SkippingFigures:
    """Predicted results of a set of skipped sub-layers."""

    speed_up: float  # decode time of plain decoding over that of drafting, at the best number of drafted tokens
    levels: int  # that number
    agreement: float  # share of the texts' tokens that the draft model predicts after the text before them
    draft_cost: float  # time of one of its passes over that of a whole one


class Found(NamedTuple):
    """The best set found."""

    skipped: Skipped
    figures: SkippingFigures  # on the texts searched with
    trials: int  # sets tried


def measure_skipping(target: TorchTarget) -> SkippingCosts:
    """Time whole passes, and passes without all attention, without all MLPs, and without nearly everything.

    A sub-layer's share is of what the last three take, as the whole model may be compiled and they are not. Raises as
    `skipping`.
    """
    layers = int(target.model.config.num_hidden_layers)
    every = tuple(range(layers))
    curve, _ = measure_cost(target)
    passes: dict[tuple[int, int], TorchTarget] = {}  # by the numbers of attention and MLP sub-layers left
    for skipped in (Skipped(every, ()), Skipped((), every), Skipped(every, every[:-1])):
        left = layers - len(skipped.attention), layers - len(skipped.mlp)
        if sum(left):
            passes[left] = skipping(target, skipped)
    seconds = [measure_cost(each, (1,), _SECONDS)[0].seconds[0] for each in passes.values()]
    terms = np.array([(1, *left) for left in passes], np.float64)  # a constant, and the cost of each kind
    shares = np.maximum(np.linalg.lstsq(terms, np.array(seconds), rcond=None)[0], 0.0)
    shares /= np.array((1, layers, layers)) @ shares
    return SkippingCosts(curve, float(shares[1]), float(shares[2]))


def agreements(draft: TorchTarget, texts: Sequence[WrittenText]) -> list[BoolArray]:
    """Return, for each written token of each text, whether `draft` would draft it after the text before it.

    Sampled tokens are drafted with the noise that chose them.
    """
    found = []
    for text in texts:
        cache, start = draft.new_cache(), text.prompt_length - 1
        draft.prefill(text.ids[:start], cache)
        logits = draft.forward(lay_out_text(text.ids[start:-1], start), cache).logits
        positions = np.arange(text.prompt_length, len(text.ids), dtype=np.int64)
        drafted = candidates(logits, 1, Imitation(text.sampling), positions).tokens[:, 0]
        found.append(drafted == text.ids[text.prompt_length :])
    return found


def predicted(agreed: Sequence[BoolArray], curve: CostCurve, draft_cost: float, most_levels: int) -> SkippingFigures:
    """Return the predicted speed-up over plain decoding at the best number of drafted tokens, up to `most_levels`.

    `agreed` is from `agreements`, and `draft_cost` is relative to the model's pass of one row.
    """
    passes = curve.table(most_levels + 1)
    tokens, agreement, found = sum(map(len, agreed)), float(np.concatenate(list(agreed)).mean()), []
    for levels in range(1, most_levels + 1):
        accepted = np.array([count for each in agreed for count in accepted_by_step(each, levels)])
        drafting = levels * len(accepted) + (accepted == levels).sum()  # one more pass after each fully accepted draft
        seconds = len(accepted) * passes[levels + 1] + drafting * draft_cost * passes[1]
        found.append(SkippingFigures(float(tokens * passes[1] / seconds), levels, agreement, draft_cost))
    return max(found, key=lambda each: each.speed_up)


def accepted_by_step(agreed: BoolArray, levels: int) -> list[int]:
    """Return the number of drafted tokens that each step accepts if `levels` tokens are drafted a step."""
    steps, place = list[int](), 0
    while place < len(agreed):
        ahead = agreed[place : place + levels]
        steps.append(len(ahead) if ahead.all() else int(ahead.argmin()))
        place += steps[-1] + 1
    return steps


def figures_of(
    target: TorchTarget, skipped: Skipped, texts: Sequence[WrittenText], costs: SkippingCosts, most_levels: int
) -> SkippingFigures:
    """Return the predicted results of a set on some texts."""
    agreed = agreements(skipping(target, skipped), texts)
    return predicted(agreed, costs.curve, costs.draft_cost(skipped), most_levels)


def search(
    figures: Callable[[Skipped], SkippingFigures], layers: int, *, trials: int, seed: int, whole_layers: bool = False
) -> Iterator[Found]:
    """Search for the set with the best predicted speed-up, among new random sets and small changes of the best one.

    Begins with `default_skipped`, and yields the best set so far after each trial. The sets tried depend only on the
    seed and the figures. With `whole_layers` attention and MLP of a layer are skipped together.
    """
    generator, start = np.random.default_rng(seed), default_skipped(layers)
    best = np.zeros((1 if whole_layers else 2) * layers, np.bool_)  # what is skipped: layers, or attention, then MLPs
    best[[*start.attention, *(layers + number for number in start.mlp if not whole_layers)]] = True
    found, known = Found(start, figures(start), 1), {best.tobytes()}
    yield found
    while len(known) < trials and (marks := _next(generator, best, known)) is not None:
        known.add(marks.tobytes())
        halves = (marks, marks) if whole_layers else np.split(marks, 2)
        skipped = Skipped(*(tuple(np.flatnonzero(half).tolist()) for half in halves))
        tried = Found(skipped, figures(skipped), len(known))
        if tried.figures.speed_up > found.figures.speed_up:
            best, found = marks, tried
        yield found._replace(trials=len(known))


def _next(generator: np.random.Generator, best: BoolArray, known: set[bytes]) -> BoolArray | None:
    """Return a set that was not tried yet, or None if none is found."""
    for _ in range(_MOST_REDRAWN):
        if generator.random() < _RESTARTS:
            marks = generator.random(len(best)) < generator.uniform(_LEAST_SHARE, _MOST_SHARE)
        else:
            changed = generator.permutation(len(best))[: generator.integers(1, _MOST_CHANGES + 1)]
            marks = best.copy()
            marks[changed] = ~marks[changed]
        if 0 < marks.sum() < len(marks) and marks.tobytes() not in known:
            return marks
    return None
