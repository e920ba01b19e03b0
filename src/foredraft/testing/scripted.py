"""Scripted drafters for testing engines: always right, always wrong, random, or drawn from a draft model.

They depend on a function of the text, not on the target or the engine.
"""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import count
from typing import ClassVar

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, TokenIds, Verdict
from foredraft.graph.layout import lay_out_text
from foredraft.graph.tree import FloatArray, chain_parents
from foredraft.sampling import Probabilities, SamplingOptions
from foredraft.sampling.filters import distribution, penalize
from foredraft.sampling.rejection import VERIFIER_STREAM, Chance, SeededChance, draw_siblings
from foredraft.testing.toy import VOCABULARY, ToyTarget

Continuation = Callable[[TokenIds], Sequence[int]]
"""From the ids so far to the ids that the target will write next, as many as are known."""
LogitsOf = Callable[[TokenIds], FloatArray]
"""From the ids so far, int64[n], to the logits of the next one, float32[V]."""


def continuation_in(text: TokenIds) -> Continuation:
    """Return the continuation within a known text, int64[n], prompt and answer; empty after any other prefix."""
    return lambda ids: text[len(ids) :].tolist() if np.array_equal(text[: len(ids)], ids) else []


def logits_of(target: ToyTarget) -> LogitsOf:
    """Return the logits of a toy target; with another seed than the target's, it is a draft model."""

    def logits(ids: TokenIds) -> FloatArray:
        row: FloatArray = target.forward(lay_out_text(ids[-3:], 0), target.new_cache()).logits[-1].numpy()
        return row  # the toy depends on the last three tokens only

    return logits


class ScriptedDrafting:
    """Drafting that calls a function, unless the budget is empty, and learns nothing."""

    def __init__(self, propose: Callable[[SequenceView, Budget], Draft]) -> None:
        self._propose = propose

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Return the function's draft, or the empty draft without a budget."""
        return self._propose(view, budget) if budget.nodes > 0 and budget.depth > 0 else EMPTY_DRAFT

    def observe(self, verdict: Verdict) -> None:
        """Learn nothing."""

    def close(self) -> None:
        """Do nothing."""


class _Scripted:
    """What the drafters share; `_tree` drafts for those without state."""

    name: ClassVar[str] = "scripted"
    source_names: Sequence[str] = ("scripted",)
    needs = Needs()

    def open(self, context: DraftContext) -> ScriptedDrafting:  # noqa: ARG002  # the family's signature
        """Return the drafting of a sequence."""
        return ScriptedDrafting(self._tree)

    def _tree(self, view: SequenceView, budget: Budget) -> Draft:
        raise NotImplementedError


class OracleDrafter(_Scripted):
    """Proposes what the target will write, so that everything is accepted.

    `distractors` is the number of wrong siblings, of the vocabulary, before each right token.
    """

    def __init__(self, continuation_of: Continuation, distractors: int = 0, vocabulary: int = VOCABULARY) -> None:
        self._continuation_of, self._distractors, self._vocabulary = continuation_of, distractors, vocabulary

    def _tree(self, view: SequenceView, budget: Budget) -> Draft:
        width = self._distractors + 1
        right = list(self._continuation_of(view.ids))[: min(budget.depth, budget.nodes // width)]
        tokens = [(token + other) % self._vocabulary for token in right for other in range(width - 1, -1, -1)]
        parents = [width * depth - 1 for depth in range(len(right)) for _ in range(width)]
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32))


class AdversaryDrafter(_Scripted):
    """Proposes valid trees that are always wrong: a token that the target will not write, then what it will write.

    Drafts nothing if `continuation_of` returns nothing.
    """

    def __init__(self, continuation_of: Continuation, vocabulary: int = VOCABULARY) -> None:
        self._continuation_of, self._vocabulary = continuation_of, vocabulary

    def _tree(self, view: SequenceView, budget: Budget) -> Draft:
        right = list(self._continuation_of(view.ids))
        if not right:
            return EMPTY_DRAFT
        chain = [(right[0] + 1) % self._vocabulary, *right][: min(budget.nodes, budget.depth)]
        sibling = [(right[0] + 2) % self._vocabulary] if len(chain) < budget.nodes else []
        parents = np.concatenate([chain_parents(len(chain)), np.full(len(sibling), -1, np.int32)])
        return Draft(np.array(chain + sibling, np.int32), parents)


class RandomTreeDrafter(_Scripted):
    """Proposes random valid trees of random size, sometimes empty; `seed` and the sequence's seed determine them."""

    def __init__(self, seed: int, vocabulary: int = VOCABULARY) -> None:
        self._seed, self._vocabulary = seed, vocabulary

    def open(self, context: DraftContext) -> ScriptedDrafting:
        """Return a drafting with a generator of its own."""
        generator = np.random.default_rng([self._seed, context.seed])

        def propose(_view: SequenceView, budget: Budget) -> Draft:
            nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> depth
            for _ in range(int(generator.integers(0, budget.nodes + 1))):
                node = int(generator.integers(-1, len(nodes))), int(generator.integers(0, self._vocabulary))
                depth = 1 if node[0] < 0 else list(nodes.values())[node[0]] + 1
                if depth <= budget.depth:
                    nodes.setdefault(node, depth)
            parents, tokens = np.array(list(nodes), np.int32).reshape(-1, 2).T
            return Draft(tokens.copy(), parents.copy())

        return ScriptedDrafting(propose)


class DrawingDrafter(_Scripted):
    """Draws a tree with q for rejection verification, level by level, siblings without replacement.

    `widths` are the numbers of children of the root, of each of its children, and so on; `chance` is the random source
    of a sequence's n-th proposal, from 0 (None uses the sequence's seed).
    """

    def __init__(
        self, logits_of: LogitsOf, widths: Sequence[int] = (2, 1, 1), chance: Callable[[int], Chance] | None = None
    ) -> None:
        self._logits_of, self._widths, self._chance = logits_of, tuple(widths), chance

    def open(self, context: DraftContext) -> ScriptedDrafting:
        """Return a drafting that processes its logits with the target's sampling options."""
        known = {field.name for field in dataclasses.fields(SamplingOptions)} & context.settings.keys()
        options = SamplingOptions(**{name: context.settings[name] for name in known})
        proposals = count()

        def propose(view: SequenceView, budget: Budget) -> Draft:
            number = next(proposals)
            # a new stream for each proposal, because draws must be fresh
            seeded = SeededChance(context.seed, len(view.ids), VERIFIER_STREAM + 1 + number)
            return self._drawn(view.ids, budget, options, seeded if self._chance is None else self._chance(number))

        return ScriptedDrafting(propose)

    def distribution_after(self, ids: TokenIds, options: SamplingOptions) -> Probabilities:
        """Return the distribution that a token after `ids`, int64[n], is drawn from, float64[V]."""
        row = self._logits_of(ids).copy()
        if options.repetition_penalty != 1.0:
            penalize(row, ids, options.repetition_penalty)
        return distribution(row, options)

    def _drawn(self, ids: TokenIds, budget: Budget, options: SamplingOptions, chance: Chance) -> Draft:
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
