"""A trained head on the target's layers drafts a block of tokens in one pass, from which a tree is taken (DFlash).

DFlash (z-lab, 2026), block diffusion. The tree holds the best tokens of the block's rows, by the products of their
probabilities; the authors draft the chain of the best ones. Needs a head of the target: `model=FOLDER`, in the
`speculators` format or as the authors publish them.

Does not depend on how tokens are chosen.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, Verdict
from foredraft.drafters import Resources
from foredraft.model.candidates import Imitation, candidates
from foredraft.model.dflash import METHOD, DFlashBlock, DFlashLayers, load_dflash
from foredraft.model.head_files import trained_head
from foredraft.model.level_tree import draft_of_levels, static_tree
from foredraft.model.speculators import FILES
from foredraft.model.state_heads import StateHead
from foredraft.model.target import loaded_target
from foredraft.options import check_range


@dataclass(frozen=True, slots=True)
class DFlashOptions:
    """Options of `dflash`."""

    # the head (vLLM's name): a folder or hub id, in the `speculators` format or as DFlash's authors publish them
    model: str | None = None
    out_degree: int = 4  # children of a node at most: the best tokens of the next row; 1 drafts chains
    nodes: int = 24  # nodes of the tree at most

    def __post_init__(self) -> None:
        check_range(self, "out_degree", least=1, most=32)
        check_range(self, "nodes", least=1, most=64)


class DFlashDrafter:
    """Drafts with a head, in one pass."""

    name: ClassVar[str] = METHOD
    summary: ClassVar[str] = "A trained head on the target's layers drafts a block of tokens in one pass (DFlash)."
    Options = DFlashOptions
    source_names = (METHOD,)

    def __init__(self, options: DFlashOptions, head: StateHead[DFlashLayers]) -> None:
        self._options, self._head = options, head
        self.needs = Needs(hidden=head.reads, every_step=False)

    @classmethod
    def create(cls, options: DFlashOptions, resources: Resources) -> "DFlashDrafter":
        """Load the head; raises UsageError if there is none for this target, StoreError if it is damaged."""
        target = loaded_target(resources.target, cls.name, "from the target's hidden states")
        folder = trained_head(METHOD, options.model, target.model, option="model", files=FILES)
        return cls(options, load_dflash(folder, target.model))

    def open(self, context: DraftContext) -> "_Drafting":
        # the best tokens are taken, never drawn, with either verification
        imitation = Imitation.of(context.settings, context.seed, context.vocabulary, self._head.ends.ids)
        return _Drafting(self._options, self._head, replace(imitation, draws=False))


class _Drafting:
    """One sequence's drafting."""

    def __init__(self, options: DFlashOptions, head: StateHead[DFlashLayers], imitation: Imitation) -> None:
        self._options, self._head, self._imitation = options, head, imitation
        self._block = DFlashBlock(head)

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        nodes, depth = min(budget.nodes, self._options.nodes), min(budget.depth, self._block.levels)
        if view.states is None or nodes <= 0 or depth <= 0:
            return EMPTY_DRAFT
        scores = self._block.scores(view.ids, view.states, depth)
        found = candidates(scores, self._options.out_degree, self._imitation, len(view.ids) + np.arange(depth))
        return draft_of_levels(found, static_tree(found.probabilities, nodes, depth))

    def observe(self, verdict: Verdict) -> None:
        """Do nothing: all that it reads is in the view."""

    def close(self) -> None:
        self._block = DFlashBlock(self._head)
