"""Prompt lookup for many texts at once: the searches of a whole batch in one compiled call, on several threads.

The texts themselves are the store, so there is no state to keep.
"""

import numpy as np
from numba import njit, prange

from foredraft.control.evidence import guessed_scores
from foredraft.drafters.prompt_lookup import PromptLookupOptions, earlier_match
from foredraft.graph.tree import IntArray, chain_parents
from foredraft.integrations.batches import I64, Batch, Chains


class LookupBatch:
    """Looks the last tokens of every row up in the row.

    Args:
        options: the drafter's.
        most: tokens to draft at most.
    """

    def __init__(self, options: PromptLookupOptions, most: int) -> None:
        self._options, self._most = options, most
        self._scores = guessed_scores(chain_parents(most))

    def draft(self, batch: Batch) -> Chains:
        """Return what followed the earlier occurrence in each row."""
        chains = batch.no_chains(self._most)
        chains.scores[:] = self._scores
        depth = np.minimum(batch.depth, self._options.prompt_lookup_num_tokens)
        shortest, longest = self._options.prompt_lookup_min, self._options.longest
        _draft(batch.token_ids, batch.rows, batch.lengths, depth, shortest, longest, chains.tokens, chains.counts)
        return chains

    def forget(self, slot: int) -> None:
        """Nothing to forget."""


@njit(cache=True, parallel=True)
def _draft(
    token_ids: IntArray, rows: I64, lengths: I64, depth: I64, shortest: int, longest: int, chains: IntArray,
    counts: IntArray,
) -> None:  # fmt: skip
    for i in prange(len(rows)):
        ids = token_ids[rows[i], : lengths[i]].astype(np.int64)
        start = earlier_match(ids, shortest, longest) if depth[i] > 0 else -1
        if start >= 0:
            counts[i] = min(depth[i], lengths[i] - start)
            chains[i, : counts[i]] = ids[start : start + counts[i]]
