"""Drafting for many sequences at once: what a batch is, and drafters that know one sequence only, a row at a time.

Chains only: a tree is cut to its best path. Knows rows, slots and drafters' protocols; not where rows come from.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Drafter, Drafting, SequenceView, Verdict
from foredraft.control.evidence import guessed_scores
from foredraft.engine.guard import GuardedDrafter
from foredraft.graph.tree import FloatArray, IntArray, best_chain, chain_parents

I64 = npt.NDArray[np.int64]


class Chains(NamedTuple):
    """What R rows are drafted, up to K tokens each.

    Attributes:
        tokens: int32[R, K].
        scores: float32[R, K], the estimates that the chain is accepted down to each token.
        counts: int32[R], how many of each row are meant.
    """

    tokens: IntArray
    scores: FloatArray
    counts: IntArray


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step, R of them.

    Attributes:
        token_ids: int32[B, L], all rows of the server's batch.
        rows: int64[R], the ones that want a draft.
        lengths: int64[R], tokens of each that count.
        slots: int64[R], where the state of each row's text is kept.
        known: int64[R], tokens of the row that its slot has had before; 0 for a new text.
        depth: int64[R], tokens to draft at most.
    """

    token_ids: IntArray
    rows: I64
    lengths: I64
    slots: I64
    known: I64
    depth: I64

    def no_chains(self, most: int) -> Chains:
        """Return room for chains of `most` tokens; all counts are 0."""
        room = (len(self.rows), most)
        return Chains(np.zeros(room, np.int32), np.zeros(room, np.float32), np.zeros(len(self.rows), np.int32))

    def only(self, i: int) -> "Batch":
        """Return a batch of the `i`-th row alone."""
        one = slice(i, i + 1)
        return Batch(
            self.token_ids, self.rows[one], self.lengths[one], self.slots[one], self.known[one], self.depth[one]
        )


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """How trees become chains.

    Attributes:
        tree_nodes: nodes of the tree that the chain is taken from.
        least_probability: a token is left out where its chain is less probable than this, by the drafter's estimate.
    """

    tree_nodes: int = 32
    least_probability: float = 0.0


@njit(cache=True)
def write_chain(
    tokens: IntArray, parents: IntArray, score: FloatArray, depth: int, least: float, chain: IntArray,
    scores: FloatArray,
) -> int:  # fmt: skip
    """Write a tree's best path and its scores into `chain` and `scores`, see `best_chain`; return its length."""
    kept = best_chain(parents, score, depth, least)
    for place in range(len(kept)):
        chain[place], scores[place] = tokens[kept[place]], score[kept[place]]
    return len(kept)


class BatchDrafting(Protocol):
    """The state of many texts in a drafter."""

    def draft(self, batch: Batch) -> Chains:
        """Return a chain for each row."""
        ...

    def forget(self, slot: int) -> None:
        """Drop a text's state; safe where there is none."""
        ...


class SingleDrafting:
    """Any drafter, asked for one row after the other.

    Args:
        drafter: opened for each text; one that raises drafts nothing more for that text, after a warning.
        context: what draftings are opened with.
        most: tokens to draft at most.
        options: how trees become chains.
    """

    def __init__(self, drafter: Drafter, context: DraftContext, most: int, options: ChainOptions) -> None:
        self._drafter = GuardedDrafter(drafter)
        self._context, self._most, self._options = context, most, options
        self._open: dict[int, tuple[Drafting, Draft, int]] = {}

    def draft(self, batch: Batch) -> Chains:
        """Let each row's drafting see what became of its last draft, and ask it for the next one."""
        chains = batch.no_chains(self._most)
        for i, slot in enumerate(batch.slots.tolist()):
            ids = batch.token_ids[batch.rows[i], : batch.lengths[i]].astype(np.int64)
            chain = self._chain(slot, ids, int(batch.known[i]), int(batch.depth[i]))
            count = chains.counts[i] = len(chain)
            chains.tokens[i, :count] = chain.tokens
            chains.scores[i, :count] = guessed_scores(chain.parents) if chain.score is None else chain.score
        return chains

    def forget(self, slot: int) -> None:
        """Close the text's drafting."""
        opened = self._open.pop(slot, None)
        if opened is not None:
            opened[0].close()

    def _chain(self, slot: int, ids: I64, known: int, depth: int) -> Draft:
        if slot not in self._open:
            self._open[slot] = (self._drafter.open(self._context), EMPTY_DRAFT, len(ids))
        drafting, last, prompt_length = self._open[slot]
        if known:
            drafting.observe(_verdict(last, ids, known))
        ids.flags.writeable = False
        budget = Budget(max(self._options.tree_nodes, depth) if depth > 0 else 0, depth)
        draft = drafting.propose(SequenceView(ids, prompt_length), budget)
        # without scores, all nodes are as good: the deepest path
        score = np.ones(len(draft), np.float32) if draft.score is None else draft.score
        kept = best_chain(draft.parents, score, depth, self._options.least_probability)
        # what is observed is at most what was drafted
        own = None if draft.score is None else score[kept]
        chain = Draft(draft.tokens[kept], chain_parents(len(kept)), own)
        self._open[slot] = (drafting, chain, prompt_length)
        return chain


def _verdict(draft: Draft, ids: I64, known: int) -> Verdict:
    """Return what became of a chain that was drafted behind `ids[:known]`: all tokens but the last may be of it."""
    new = tuple(ids[known:].tolist())
    accepted = 0
    while accepted < min(len(new) - 1, len(draft)) and draft.tokens[accepted] == new[accepted]:
        accepted += 1
    return Verdict(new, tuple(range(accepted)), draft, known - 1)
