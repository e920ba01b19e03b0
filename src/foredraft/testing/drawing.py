"""A drafter that draws its trees and says from what: for engines under rejection verification, and their proofs.

Knows a function from ids to scores, which stands in for a draft model, and the settings of the sequence. Does not know
the target or the engine.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, TokenIds
from foredraft.graph.layout import lay_out_text
from foredraft.graph.tree import FloatArray
from foredraft.sampling import Probabilities, SamplingOptions
from foredraft.sampling.filters import distribution, penalize
from foredraft.sampling.rejection import VERIFIER_STREAM, Chance, SeededChance, draw_siblings
from foredraft.testing.scripted import ScriptedDrafting
from foredraft.testing.toy import ToyTarget

LogitsOf = Callable[[TokenIds], FloatArray]
"""From the ids so far, int64[n], to scores of the next one, float32[V]."""


def logits_of(target: ToyTarget) -> LogitsOf:
    """Return the scores of a toy target: as a draft model, one with another seed than the target's."""

    def logits(ids: TokenIds) -> FloatArray:
        row: FloatArray = target.forward(lay_out_text(ids[-3:], 0), target.new_cache()).logits[-1].numpy()
        return row  # the toy looks back no further

    return logits


class DrawingDrafter:
    """Draws a tree, level by level, siblings without replacement, each node with its q.

    Args:
        logits_of: the draft model.
        widths: children of the root, of each of its children, and so on.
        chance: what draws in the n-th proposal of a sequence, counted from 0; None takes the sequence's seed.
    """

    name: ClassVar[str] = "drawing"
    source_names: Sequence[str] = ("drawing",)
    needs = Needs()

    def __init__(
        self, logits_of: LogitsOf, widths: Sequence[int] = (2, 1, 1), chance: Callable[[int], Chance] | None = None
    ) -> None:
        self._logits_of = logits_of
        self._widths = tuple(widths)
        self._chance = chance

    def open(self, context: DraftContext) -> ScriptedDrafting:
        """Return a drafting that processes its scores as the target's will be."""
        known = [field.name for field in dataclasses.fields(SamplingOptions)]
        options = SamplingOptions(**{name: value for name, value in context.settings.items() if name in known})
        proposals = 0

        def propose(view: SequenceView, budget: Budget) -> Draft:
            nonlocal proposals
            # a stream for each proposal, as what is drawn must be fresh
            seeded = SeededChance(context.seed, len(view.ids), VERIFIER_STREAM + 1 + proposals)
            chance = seeded if self._chance is None else self._chance(proposals)
            proposals += 1
            return self._tree(view.ids, budget, options, chance)

        return ScriptedDrafting(propose)

    def law(self, ids: TokenIds, options: SamplingOptions) -> Probabilities:
        """Return what a token after `ids`, int64[n], is drawn from, float64[V]."""
        row = self._logits_of(ids).copy()
        if options.repetition_penalty != 1.0:
            penalize(row, ids, options.repetition_penalty)
        return distribution(row, options)

    def _tree(self, ids: TokenIds, budget: Budget, options: SamplingOptions, chance: Chance) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        rows: list[FloatArray] = []
        level = [(-1, ids)]
        for width in self._widths[: budget.depth]:
            below = []
            for parent, prefix in level:
                room = min(width, budget.nodes - len(tokens))
                for token, row in zip(*draw_siblings(self.law(prefix, options), room, chance), strict=True):
                    below.append((len(tokens), np.append(prefix, np.int64(token))))
                    tokens.append(int(token))
                    parents.append(parent)
                    rows.append(row)
            level = below
        if not tokens:
            return EMPTY_DRAFT
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), q=np.array(rows, np.float32))
