"""Scripted drafters: always right, always wrong, or random, to drive an engine to its edges.

Know what a function tells them about the text; do not know the target or the engine.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, TokenIds, Verdict
from foredraft.graph.tree import chain_parents
from foredraft.testing.toy import VOCABULARY

Continuation = Callable[[TokenIds], Sequence[int]]
"""From the ids so far to those that the target will write next, as many as are known."""


def continuation_in(text: TokenIds) -> Continuation:
    """Return the continuation within one known text, int64[n]: prompt and answer; nothing after any other prefix."""

    def continuation_of(ids: TokenIds) -> Sequence[int]:
        known = np.array_equal(text[: len(ids)], ids)
        return text[len(ids) :].tolist() if known else []

    return continuation_of


class ScriptedDrafting:
    """A drafting that asks a function and learns nothing."""

    def __init__(self, propose: Callable[[SequenceView, Budget], Draft]) -> None:
        self._propose = propose

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Return what the function says; the empty draft without a budget."""
        return self._propose(view, budget) if budget.nodes > 0 and budget.depth > 0 else EMPTY_DRAFT

    def observe(self, verdict: Verdict) -> None:
        """Learn nothing."""

    def close(self) -> None:
        """Nothing to forget."""


class OracleDrafter:
    """Proposes what the target will write, so that everything is accepted.

    Args:
        continuation_of: knows what the target will write.
        distractors: wrong siblings in front of each right token.
        vocabulary: for the wrong siblings.
    """

    name: ClassVar[str] = "oracle"
    source_names: Sequence[str] = ("oracle",)
    needs = Needs()

    def __init__(self, continuation_of: Continuation, distractors: int = 0, vocabulary: int = VOCABULARY) -> None:
        self._continuation_of = continuation_of
        self._distractors = distractors
        self._vocabulary = vocabulary

    def open(self, context: DraftContext) -> ScriptedDrafting:  # noqa: ARG002  # the family's signature
        """Return a drafting without state."""
        return ScriptedDrafting(self._tree)

    def _tree(self, view: SequenceView, budget: Budget) -> Draft:
        width = self._distractors + 1
        right = list(self._continuation_of(view.ids))[: min(budget.depth, budget.nodes // width)]
        tokens = [(token + other) % self._vocabulary for token in right for other in range(width - 1, -1, -1)]
        parents = [width * depth - 1 for depth in range(len(right)) for _ in range(width)]
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32))


class AdversaryDrafter:
    """Proposes valid trees that are always wrong: what the target will write, after a first token that it will not.

    Args:
        continuation_of: knows what the target will write; nothing is drafted where it does not.
        vocabulary: for the wrong tokens.
    """

    name: ClassVar[str] = "adversary"
    source_names: Sequence[str] = ("adversary",)
    needs = Needs()

    def __init__(self, continuation_of: Continuation, vocabulary: int = VOCABULARY) -> None:
        self._continuation_of = continuation_of
        self._vocabulary = vocabulary

    def open(self, context: DraftContext) -> ScriptedDrafting:  # noqa: ARG002  # the family's signature
        """Return a drafting without state."""
        return ScriptedDrafting(self._tree)

    def _tree(self, view: SequenceView, budget: Budget) -> Draft:
        right = list(self._continuation_of(view.ids))
        if not right:
            return EMPTY_DRAFT
        chain = [(right[0] + 1) % self._vocabulary, *right][: min(budget.nodes, budget.depth)]
        beside = [(right[0] + 2) % self._vocabulary] if len(chain) < budget.nodes else []
        parents = np.concatenate([chain_parents(len(chain)), np.full(len(beside), -1, np.int32)])
        return Draft(np.array(chain + beside, np.int32), parents)


class RandomTreeDrafter:
    """Proposes random valid trees of random size, the empty one included.

    Args:
        seed: with the sequence's own seed, decides all trees.
        vocabulary: of the target.
    """

    name: ClassVar[str] = "random_tree"
    source_names: Sequence[str] = ("random_tree",)
    needs = Needs()

    def __init__(self, seed: int, vocabulary: int = VOCABULARY) -> None:
        self._seed = seed
        self._vocabulary = vocabulary

    def open(self, context: DraftContext) -> ScriptedDrafting:
        """Return a drafting with a generator of its own."""
        generator = np.random.default_rng([self._seed, context.seed])
        return ScriptedDrafting(lambda _view, budget: self._tree(generator, budget))

    def _tree(self, generator: np.random.Generator, budget: Budget) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        depth = [0]  # of the root and each node
        taken: set[tuple[int, int]] = set()
        for _ in range(int(generator.integers(0, budget.nodes + 1))):
            parent, token = int(generator.integers(-1, len(tokens))), int(generator.integers(0, self._vocabulary))
            if depth[parent + 1] >= budget.depth or (parent, token) in taken:
                continue
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depth.append(depth[parent + 1] + 1)
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32))
