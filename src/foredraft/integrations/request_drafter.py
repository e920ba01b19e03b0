"""Drafts for a server's batch, step by step: which request is which, what is drafted for it, and when it is forgotten.

Chains only: a tree is cut to its best path. Knows token arrays and drafters' protocols. Does not know vLLM: its class
hands arrays over and gets lists.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Drafter, Drafting, SequenceView, Verdict
from foredraft.engine.guard import GuardedDrafter
from foredraft.graph.tree import IntArray, best_chain, chain_parents
from foredraft.integrations.request_table import RequestTable

_SPARE = 2
"""Slots for each row of a batch: requests that were preempted wait in the others."""


class RequestDrafter:
    """Chains for the requests of a server, found again by content at every step.

    What a request is drafted depends on its tokens, on the steps that it was drafted in, with `auto` on how often its
    sources were right for others, and on nothing that differs between processes: ranks that see the same batches draft
    the same.

    Args:
        drafter: opened for each request; one that raises drafts nothing more for that request, after a warning.
        vocabulary: ids of the target.
        most: tokens to draft at most, for a request and step.
        rows: requests in a batch at most.
        longest: tokens of a request at most.
        tree_nodes: nodes of the tree that the chain is taken from.
        least_probability: a token is left out where its chain is less probable than this, by the drafter's estimate.
    """

    def __init__(
        self, drafter: Drafter, *, vocabulary: int, most: int, rows: int, longest: int, tree_nodes: int = 16,
        least_probability: float = 0.0,
    ) -> None:  # fmt: skip
        self._drafter = GuardedDrafter(drafter)
        self._context = DraftContext(vocabulary, max_nodes=max(tree_nodes, most))
        self._most, self._longest = most, longest
        self._tree_nodes, self._least = tree_nodes, least_probability
        self._table = RequestTable(_SPARE * rows, longest)
        self._open: dict[int, tuple[Drafting, Draft, int]] = {}  # by slot; the last chain, and the prompt's length

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: npt.NDArray[Any], token_ids: IntArray
    ) -> list[list[int]]:
        """Return a chain for each row of the batch, empty where nothing is drafted.

        Args:
            sampled: the tokens that each row got in the last step; none for a prompt that is not read to its end.
            lengths: int[B or more], tokens of each row, the sampled ones included.
            token_ids: int32[B or more, L].
        """
        rows = np.array([row for row, new in enumerate(sampled) if len(new) and lengths[row] < self._longest], np.int64)
        drafts: list[list[int]] = [[] for _ in sampled]
        if not len(rows):
            return drafts
        slots, known, dropped = self._table.find(token_ids, lengths.astype(np.int64), rows)
        for slot in dropped:
            self._forget(slot)
        for row, slot, had in zip(rows.tolist(), slots.tolist(), known.tolist(), strict=True):
            drafts[row] = self._chain(slot, token_ids[row, : lengths[row]].astype(np.int64), had)
        return drafts

    def _forget(self, slot: int) -> None:
        opened = self._open.pop(slot, None)
        if opened is not None:
            opened[0].close()

    def _chain(self, slot: int, ids: npt.NDArray[np.int64], known: int) -> list[int]:
        """Let a request's drafting see what became of its last chain, and ask it for the next one.

        Args:
            slot: the request's.
            ids: int64[n], its tokens.
            known: how many of them it had before; 0 for a new request.
        """
        if slot not in self._open:
            self._open[slot] = (self._drafter.open(self._context), EMPTY_DRAFT, len(ids))
        drafting, last, prompt_length = self._open[slot]
        if known:
            drafting.observe(_verdict(last, ids, known))
        ids.flags.writeable = False
        # the target adds a token of its own after the draft, which must fit too
        depth = min(self._most, self._longest - len(ids) - 1)
        budget = Budget(max(self._tree_nodes, depth) if depth > 0 else 0, depth)
        draft = drafting.propose(SequenceView(ids, prompt_length), budget)
        # without scores, all nodes are as good: the deepest path
        score = np.ones(len(draft), np.float32) if draft.score is None else draft.score
        kept = best_chain(draft.parents, score, depth, self._least)
        # what is observed is at most what was drafted
        own = None if draft.score is None else score[kept]
        chain = Draft(draft.tokens[kept], chain_parents(len(kept)), own)
        self._open[slot] = (drafting, chain, prompt_length)
        return list(chain.tokens.tolist())


def _verdict(draft: Draft, ids: npt.NDArray[np.int64], known: int) -> Verdict:
    """Return what became of a chain that was drafted after `ids[:known]`: all tokens but the last may be of it."""
    new = tuple(ids[known:].tolist())
    accepted = 0
    while accepted < min(len(new) - 1, len(draft)) and draft.tokens[accepted] == new[accepted]:
        accepted += 1
    return Verdict(new, tuple(range(accepted)), draft, known - 1)
