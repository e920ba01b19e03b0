"""Drafts for a server's batch, step by step: which request is which, what is drafted for it, and when it is forgotten.

Knows token arrays, drafters and their batched forms. Does not know vLLM: its class hands arrays over and gets lists.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import get_num_threads, set_num_threads

from foredraft.contracts import DraftContext, Drafter
from foredraft.drafters.adaptix import AdaptixDrafter
from foredraft.drafters.prompt_lookup import PromptLookupDrafter
from foredraft.drafters.rest import RestDrafter
from foredraft.errors import ForedraftWarning, told
from foredraft.graph.tree import IntArray
from foredraft.integrations import batch_adaptix, batch_rest
from foredraft.integrations.batch_adaptix import AdaptixBatch
from foredraft.integrations.batch_lookup import LookupBatch
from foredraft.integrations.batch_rest import RestBatch
from foredraft.integrations.batches import Batch, BatchDrafting, ChainOptions, Chains, SingleDrafting
from foredraft.integrations.request_table import RequestTable

_SPARE = 2
"""Slots for each row of a batch: requests that were preempted wait in the others."""


class RequestDrafter:
    """Chains for the requests of a server, found again by content at every step.

    What a request is drafted depends on its tokens, on the steps that it was drafted in, with `auto` on how often its
    sources were right for others, and on nothing that differs between processes: ranks that see the same batches draft
    the same.

    Args:
        drafter: any drafter.
        vocabulary: ids of the target.
        most: tokens to draft at most, for a request and step.
        rows: requests in a batch at most.
        longest: tokens of a request at most.
        options: how trees become chains.
        threads: threads of a batch; as many as numba has at most.
    """

    def __init__(
        self, drafter: Drafter, *, vocabulary: int, most: int, rows: int, longest: int,
        options: ChainOptions | None = None, threads: int = 1,
    ) -> None:  # fmt: skip
        self._name, self._most, self._longest = drafter.name, most, longest
        self._threads = max(1, min(threads, get_num_threads()))
        self._table = RequestTable(_SPARE * rows, longest)
        self._failed: set[int] = set()
        self._warned = False
        self._batched = batched(drafter, vocabulary, most, _SPARE * rows, options or ChainOptions())

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
        counted = lengths.astype(np.int64)
        slots, known, dropped = self._table.find(token_ids, counted, rows)
        for slot in dropped:
            self._batched.forget(slot)
            self._failed.discard(slot)
        mine = counted[rows]
        # the target adds a token of its own behind the draft, which must fit too
        depth = np.minimum(self._most, self._longest - mine - 1)
        batch = Batch(token_ids, rows, mine, slots, known, depth)
        chains = self._chains(batch)
        for row, tokens, count in zip(rows.tolist(), chains.tokens.tolist(), chains.counts.tolist(), strict=True):
            drafts[row] = tokens[:count]
        return drafts

    def _chains(self, batch: Batch) -> Chains:
        threads = get_num_threads()
        set_num_threads(self._threads)
        try:
            if not self._failed:
                return self._batched.draft(batch)
        except Exception as error:  # noqa: BLE001  # the row that it comes from is found below
            self._warn(error)
        finally:
            set_num_threads(threads)
        rows = [self._chain(batch.only(i), int(slot)) for i, slot in enumerate(batch.slots)]
        return Chains(*(np.concatenate(arrays) for arrays in zip(*rows, strict=True)))

    def _chain(self, row: Batch, slot: int) -> Chains:
        """Return the chain of one row; nothing, from then on, where drafting for it raises."""
        if slot not in self._failed:
            try:
                return self._batched.draft(row)
            except Exception as error:  # noqa: BLE001  # the server goes on without drafts for this request
                self._failed.add(slot)
                self._warn(error)
        return row.no_chains(self._most)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"The drafter {self._name} failed ({told(error)}), so requests for which it does "
                "are decoded without drafts; their texts are the same.",
                ForedraftWarning,
                stacklevel=2,
            )


def batched(drafter: Any, vocabulary: int, most: int, slots: int, options: ChainOptions) -> BatchDrafting:
    """Return the batched form of a drafter: compiled where there is one, else one row after the other."""
    context = DraftContext(vocabulary, max_nodes=max(options.tree_nodes, most))
    if isinstance(drafter, AdaptixDrafter) and batch_adaptix.fits(drafter.options):
        return AdaptixBatch(drafter, slots, vocabulary, most, options)
    if isinstance(drafter, RestDrafter) and batch_rest.fits(drafter.options, segments := drafter.library.segments()):
        return RestBatch(drafter.options, segments, slots, most, options)
    if isinstance(drafter, PromptLookupDrafter):
        return LookupBatch(drafter.options, most)
    return SingleDrafting(drafter, context, most, options)
