"""Exact distributions of short texts: enumerates every draft that can be drawn and every outcome of its verification.

Each outcome of a step has its exact probability; plain decoding continues after the emitted tokens. If the verification
is correct, the first tokens have the target's distribution, up to rounding. Runs the engine's state and its verifier;
target and draft model are tables of random logits on a few tokens, and `DrawingDrafter` draws from the latter.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import ClassVar, TypeVar

import numpy as np
import torch

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, Scores, SequenceView, TokenIds, Verdict
from foredraft.engine.state import SequenceState
from foredraft.graph.tree import FloatArray, ancestor_mask
from foredraft.sampling import LogitsProcessor, Probabilities, SamplingOptions
from foredraft.sampling.filters import distribution, filter_row, penalize
from foredraft.sampling.rejection import VERIFIER_STREAM, SeededChance, draw_siblings
from foredraft.testing.toy import ToyTarget
from foredraft.verify import verify

T = TypeVar("T")

Text = tuple[int, ...]
LogitsOf = Callable[[TokenIds], FloatArray]  # from the ids so far, int64[n], to the logits of the next one, float32[V]

PROMPT: TokenIds = np.array([1, 0], np.int64)
PROMPT.flags.writeable = False

_TARGET, _DRAFT_MODEL = 1, 2


class Script(SeededChance):
    """A source of chance that follows given choices, then takes the first option, and records the alternatives."""

    def __init__(self, choices: list[int]) -> None:
        self._choices, self._asked, self.probability = choices, 0, 1.0
        self.others: list[list[int]] = []

    def accept(self, probability: float) -> bool:
        return self._choose([(True, probability), (False, 1.0 - probability)])

    def draw(self, distribution: Probabilities) -> int:
        return self._choose(enumerate(distribution.tolist()))

    def _choose(self, given: Iterable[tuple[T, float]]) -> T:
        options = [(value, probability) for value, probability in given if probability > 0]
        if self._asked == len(self._choices):
            self.others += [[*self._choices, index] for index in range(1, len(options))]
            self._choices = [*self._choices, 0]
        value, probability = options[self._choices[self._asked]]
        self._asked += 1
        self.probability *= probability
        return value


def outcomes(run: Callable[[Script], T]) -> Iterator[tuple[T, float]]:
    """Yield the result of `run(chance)` for every possible outcome of chance, with its probability."""
    unexplored: list[list[int]] = [[]]
    while unexplored:
        script = Script(unexplored.pop())
        yield run(script), script.probability
        unexplored += script.others


class DrawingDrafter:
    """Draws a tree with q for rejection verification, level by level, siblings without replacement.

    `widths` are the numbers of children of the root, of each of its children, and so on.
    """

    name: ClassVar[str] = "drawing"
    source_names: Sequence[str] = ("drawing",)
    needs = Needs()

    def __init__(self, logits_of: LogitsOf, widths: Sequence[int] = (2, 1, 1)) -> None:
        self._logits_of, self._widths = logits_of, tuple(widths)

    def open(self, context: DraftContext) -> "_Drawing":
        return _Drawing(self, context)

    def distribution_after(self, ids: TokenIds, options: SamplingOptions) -> Probabilities:
        """Return the distribution that a token after `ids`, int64[n], is drawn from, float64[V]."""
        row = self._logits_of(ids).copy()
        penalize(row, ids, options.repetition_penalty)
        return distribution(row, options)

    def drawn(self, ids: TokenIds, budget: Budget, options: SamplingOptions, chance: SeededChance) -> Draft:
        """Return a draft of what follows `ids`, int64[n], drawn with the target's sampling options."""
        nodes: list[tuple[int, int, FloatArray]] = []  # token, parent, q
        level = [(-1, ids)]
        for width in self._widths[: budget.depth]:
            below = []
            for parent, prefix in level:
                room = min(width, budget.nodes - len(nodes))
                siblings = draw_siblings(self.distribution_after(prefix, options), room, chance)
                for token, row in zip(*siblings, strict=True):
                    below.append((len(nodes), np.append(prefix, np.int64(token))))
                    nodes.append((int(token), parent, row))
            level = below
        if not nodes:
            return EMPTY_DRAFT
        tokens, parents, rows = zip(*nodes, strict=True)
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), q=np.array(rows, np.float32))


class _Drawing:
    """One sequence of a `DrawingDrafter`; learns nothing."""

    def __init__(self, drafter: DrawingDrafter, context: DraftContext) -> None:
        sampling = {name: value for name, value in context.settings.items() if name != "verification"}
        self._options = SamplingOptions(**sampling)
        self._drafter, self._seed, self._proposals = drafter, context.seed, count()

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        # a new stream for each proposal, because draws must be fresh
        chance = SeededChance(self._seed, len(view.ids), VERIFIER_STREAM + 1 + next(self._proposals))
        return self._drafter.drawn(view.ids, budget, self._options, chance)

    def observe(self, verdict: Verdict) -> None:
        """Learn nothing."""

    def close(self) -> None:
        """Do nothing."""


class World(ToyTarget):
    """A target and a draft model that are tables of random logits on `vocabulary` tokens, by the whole text.

    Both choose tokens with the sampling options. Only the target uses `processors`, transformers' logits processors,
    and ends texts at the ids `eos`.
    """

    _ORDER = 99  # more than any text has

    def __init__(
        self, vocabulary: int, sampling: SamplingOptions, processors: tuple[LogitsProcessor, ...] = (),
        eos: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(vocabulary)
        self.sampling, self.processors, self.eos = sampling, processors, eos
        self._rows: dict[tuple[int, ...], FloatArray] = {}

    def drafter(self, widths: Sequence[int]) -> DrawingDrafter:
        """Return a drafter that draws trees of these widths from the draft model."""
        return DrawingDrafter(lambda ids: self._entry(_DRAFT_MODEL, ids), widths)

    def conditional(self, text: Text) -> Probabilities:
        """Return plain decoding's distribution after the prompt and `text`, without the code under test."""
        sampling, prefix = self.sampling, np.array([*PROMPT, *text], np.int64)
        row = self._row(prefix).copy()
        penalize(row, prefix, sampling.repetition_penalty)
        for processor in self.processors:
            row = processor(torch.from_numpy(prefix)[None], torch.from_numpy(row)[None])[0].numpy()
        if not sampling.do_sample:
            return np.asarray(np.eye(self.vocabulary)[row.argmax()])
        weights = filter_row(row, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        return np.asarray(weights.astype(np.float64) / weights.astype(np.float64).sum())

    def continued(self, shares: dict[Text, float], length: int) -> dict[Text, float]:
        """Return the distribution of the first `length` tokens if plain decoding continues each text."""
        whole: dict[Text, float] = {}
        unfinished = list(shares.items())
        while unfinished:
            text, probability = unfinished.pop()
            if len(text) >= length or (text and text[-1] in self.eos):
                whole[text[:length]] = whole.get(text[:length], 0.0) + probability
                continue
            following = self.conditional(text)
            unfinished += [((*text, token), probability * share) for token, share in enumerate(following) if share > 0]
        return whole

    def scores(self, draft: Draft) -> Scores:
        """Return the target's scores after the root and each node of `draft`."""
        paths = [draft.tokens[own] for own in ancestor_mask(draft.parents)[:, 1:]]
        return Scores(torch.from_numpy(np.stack([self._row(np.concatenate([PROMPT, path])) for path in paths])))

    def emitted(self, draft: Draft, scores: Scores, chance: SeededChance) -> Text:
        """Return the tokens that one step emits, using the engine's state and verifier."""
        seq = SequenceState(
            PROMPT, self.sampling, max_new_tokens=99, processors=self.processors, eos=self.eos,
            verification="rejection", chance=lambda position: chance,  # the same at every position
        )  # fmt: skip
        return verify(draft, seq.chooser(scores, draft), seq.ends, len(PROMPT) - 1).tokens

    def _row(self, last: TokenIds) -> FloatArray:
        return self._entry(_TARGET, last)

    def _entry(self, who: int, prefix: TokenIds) -> FloatArray:
        key = (who, *prefix.tolist())
        if key not in self._rows:
            generator = np.random.default_rng([self.vocabulary, *key])
            self._rows[key] = generator.normal(0, 1.2, self.vocabulary).astype(np.float32)
        return self._rows[key]


def drawn_tree(world: World, widths: Sequence[int]) -> Iterator[tuple[Draft, float]]:
    """Yield every tree of these widths that the world's draft model can draw, with its probability."""
    drafter = world.drafter(widths)

    def draw(chance: Script) -> Draft:
        draft = drafter.drawn(PROMPT, Budget(99, 99), world.sampling, chance)
        draft.check_q()
        return draft

    return outcomes(draw)


def distance(world: World, drafts: Iterable[tuple[Draft, float]], length: int = 3) -> float:
    """Return the largest deviation of a step's texts, cut to `length` tokens, from the target's distribution.

    `drafts` are those that can be drawn, with their probabilities. AssertionError if these do not sum to one, or if no
    draft is ever accepted when sampling.
    """
    shares: dict[Text, float] = {}
    for draft, drawn in drafts:
        scores = world.scores(draft)
        for tokens, decided in outcomes(partial(world.emitted, draft, scores)):
            shares[tokens] = shares.get(tokens, 0.0) + drawn * decided
    assert abs(sum(shares.values()) - 1) < 1e-12, "the probabilities of all outcomes must sum to one"
    assert not world.sampling.do_sample or max(map(len, shares)) > 1, "something must be accepted"
    actual, expected = world.continued(shares, length), world.continued({(): 1.0}, length)
    return max(abs(actual.get(text, 0.0) - expected.get(text, 0.0)) for text in actual.keys() | expected.keys())
