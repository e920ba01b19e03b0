"""Heads on the target's last hidden state draft a tree, all levels at once; it is verified exactly.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (ICML 2024), Medusa-1.
Its typical acceptance, which changes the text, is not implemented. Needs heads trained for the model (`foredraft train
medusa`): `head=FOLDER`.

Does not depend on how tokens are chosen.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import numpy as np
import torch

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, Verdict
from foredraft.drafters import Resources
from foredraft.graph.tree import FloatArray, IntArray, depths
from foredraft.model.candidates import Imitation, candidates
from foredraft.model.head_files import trained_head
from foredraft.model.heads import RANKS, MedusaHeads, ids_of, load_medusa
from foredraft.model.layers import LAST
from foredraft.model.target import loaded_target
from foredraft.options import check_range


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """Options of `medusa`."""

    # a folder or a hub id that `foredraft train medusa` wrote; None takes those that a checkout holds for the model
    head: str | None = None
    nodes: int = 24  # nodes of the tree at most; those accepted most often when the heads were measured

    def __post_init__(self) -> None:
        check_range(self, "nodes", least=1, most=64)


class MedusaDrafter:
    """Heads, and the target's LM head for their states, or its rows for the most frequent tokens."""

    name: ClassVar[str] = "medusa"
    summary: ClassVar[str] = "Trained heads on the target's last hidden state draft a tree at once (Medusa)."
    Options = MedusaOptions
    source_names = ("medusa",)
    needs = Needs(hidden=(LAST,), every_step=False)

    def __init__(self, options: MedusaOptions, heads: MedusaHeads, lm_head: torch.nn.Module) -> None:
        self._options, self._heads, self._lm_head = options, heads, lm_head

    @classmethod
    def create(cls, options: MedusaOptions, resources: Resources) -> "MedusaDrafter":
        """Load the heads; raises UsageError if there are none for this model, StoreError if they are damaged."""
        target = loaded_target(resources.target, cls.name, "from the target's hidden states")
        _, heads, lm_head = load_medusa(trained_head("medusa", options.head, target.model), target.model)
        return cls(options, heads, lm_head)

    def open(self, context: DraftContext) -> "_Drafting":
        return _Drafting(self._options.nodes, self._heads, self._lm_head, context)


class _Drafting:
    """One sequence's drafting, from the target's hidden state at the row that chose the root."""

    def __init__(self, nodes: int, heads: MedusaHeads, lm_head: torch.nn.Module, context: DraftContext) -> None:
        self._nodes, self._heads, self._lm_head = nodes, heads, lm_head
        self._imitation = Imitation.of(context.settings, context.seed, context.vocabulary, ids_of(lm_head))
        self._accuracies = heads.accuracies.float().cpu().numpy()
        self._tree = lru_cache(partial(static_tree, self._accuracies))  # its arguments seldom change

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        nodes = min(budget.nodes, self._nodes)
        if view.states is None or nodes <= 0 or budget.depth <= 0:
            return EMPTY_DRAFT
        tree = self._tree(nodes, min(budget.depth, len(self._accuracies)))
        positions = len(view.ids) + np.arange(len(self._accuracies))
        with torch.inference_mode():
            scores = self._lm_head(self._heads(view.states[-1]))  # float[K, V]
        found, (parents, ranks, score) = candidates(scores, RANKS, self._imitation, positions), tree
        return Draft(found.tokens[depths(parents) - 1, ranks], parents, score)

    def observe(self, verdict: Verdict) -> None:
        """Do nothing: all that it reads is in the view."""

    def close(self) -> None:
        """Do nothing: it keeps nothing of the sequence."""


def static_tree(chances: FloatArray, nodes: int, depth: int) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the tree with the highest products of chances along its paths, best node first.

    Takes the chance that the i-th candidate of each level is accepted, float32[K, I], descending. Returns the parents,
    int32[N], each before its children; the ranks, int32[N], of the nodes among their level's candidates; and the
    products, float32[N].
    """
    parents, ranks, score, level = [-1], [0], [1.0], [0]
    # candidate nodes: (score, parent, rank)
    waiting: list[tuple[float, int, int]] = [(float(chances[0, 0]), 0, 0)] if depth > 0 else []
    while waiting and len(parents) <= nodes:
        best = max(range(len(waiting)), key=lambda i: waiting[i][0])
        chance, parent, rank = waiting.pop(best)
        if chance <= 0:
            break
        parents.append(parent)
        ranks.append(rank)
        score.append(chance)
        head = level[parent]
        level.append(head + 1)
        if rank + 1 < chances.shape[1]:  # its next sibling
            waiting.append((score[parent] * float(chances[head, rank + 1]), parent, rank + 1))
        if head + 1 < min(depth, len(chances)):  # its first child
            waiting.append((chance * float(chances[head + 1, 0]), len(parents) - 1, 0))
    return np.array(parents[1:], np.int32) - 1, np.array(ranks[1:], np.int32), np.array(score[1:], np.float32)
