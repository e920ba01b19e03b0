"""Scripted drafters: always right, always wrong, or random."""

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, Draft, Needs
from foredraft.graph.tree import chain_parents
from foredraft.testing import VOCABULARY


def continuation_in(text):
    """The continuation within a known text, int64[n], prompt and answer; empty after any other prefix."""
    return lambda ids: text[len(ids) :].tolist() if np.array_equal(text[: len(ids)], ids) else []


class ScriptedDrafting:
    """Drafting that calls a function, unless the budget is empty, and learns nothing."""

    def __init__(self, propose):
        self._propose = propose

    def propose(self, view, budget):
        return self._propose(view, budget) if budget.nodes > 0 and budget.depth > 0 else EMPTY_DRAFT

    def observe(self, verdict):
        """Learn nothing."""

    def close(self):
        """Do nothing."""


class _Scripted:
    """What the drafters share; `_tree` drafts for those without state."""

    name, source_names, needs = "scripted", ("scripted",), Needs()

    def open(self, context):
        return ScriptedDrafting(self._tree)


class OracleDrafter(_Scripted):
    """Proposes what the target will write (`continuation_of` the ids so far), so that everything is accepted.

    `distractors` is the number of wrong siblings, of the vocabulary, before each right token.
    """

    def __init__(self, continuation_of, distractors=0, vocabulary=VOCABULARY):
        self._continuation_of, self._distractors, self._vocabulary = continuation_of, distractors, vocabulary

    def _tree(self, view, budget):
        width = self._distractors + 1
        right = list(self._continuation_of(view.ids))[: min(budget.depth, budget.nodes // width)]
        tokens = [(token + other) % self._vocabulary for token in right for other in range(width - 1, -1, -1)]
        parents = [width * depth - 1 for depth in range(len(right)) for _ in range(width)]
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32))


class AdversaryDrafter(_Scripted):
    """Proposes valid trees that are always wrong: a token that the target will not write, then what it will write.

    Drafts nothing if `continuation_of` returns nothing.
    """

    def __init__(self, continuation_of, vocabulary=VOCABULARY):
        self._continuation_of, self._vocabulary = continuation_of, vocabulary

    def _tree(self, view, budget):
        right = list(self._continuation_of(view.ids))
        if not right:
            return EMPTY_DRAFT
        chain = [(right[0] + 1) % self._vocabulary, *right][: min(budget.nodes, budget.depth)]
        sibling = [(right[0] + 2) % self._vocabulary] if len(chain) < budget.nodes else []
        parents = np.concatenate([chain_parents(len(chain)), np.full(len(sibling), -1, np.int32)])
        return Draft(np.array(chain + sibling, np.int32), parents)


class RandomTreeDrafter(_Scripted):
    """Proposes random valid trees of random size, sometimes empty; `seed` and the sequence's seed determine them."""

    def __init__(self, seed, vocabulary=VOCABULARY):
        self._seed, self._vocabulary = seed, vocabulary

    def open(self, context):
        generator = np.random.default_rng([self._seed, context.seed])

        def propose(_view, budget):
            nodes = {}  # (parent, token) -> depth
            for _ in range(int(generator.integers(0, budget.nodes + 1))):
                node = int(generator.integers(-1, len(nodes))), int(generator.integers(0, self._vocabulary))
                depth = 1 if node[0] < 0 else list(nodes.values())[node[0]] + 1
                if depth <= budget.depth:
                    nodes.setdefault(node, depth)
            parents, tokens = np.array(list(nodes), np.int32).reshape(-1, 2).T
            return Draft(tokens.copy(), parents.copy())

        return ScriptedDrafting(propose)
