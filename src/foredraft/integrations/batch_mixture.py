"""Auto for many texts at once: reading, looking up and blending of a whole batch in one compiled call, on threads.

The drafts are those of `MixtureDrafter` with what a server tells: the tokens that were written. Knows each text's
memory by its address.
"""

from collections.abc import Sequence

import numpy as np
from numba import njit, prange

from foredraft.addresses import address_of, array_at
from foredraft.drafters.mixture import MixtureDrafter
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.blender import Blender
from foredraft.index.learned import NO_TOKEN
from foredraft.index.suffix_array import SuffixArrays
from foredraft.index.workspace import credit_at, propose_at
from foredraft.integrations.batches import I64, Batch, ChainOptions, Chains, write_chain


def fits(drafter: MixtureDrafter) -> bool:
    """Say whether a drafter can be batched: nothing shared, and no neural drafter."""
    return not drafter.options.shares and drafter.neural is None


class MixtureBatch:
    """What is known of each text.

    Args:
        drafter: its table and options.
        segments: its store's, as they are now.
        slots: texts at most.
        vocabulary: ids of the target.
        most: tokens to draft at most.
        options: how trees become chains.
    """

    def __init__(
        self, drafter: MixtureDrafter, segments: Sequence[SuffixArrays], slots: int, vocabulary: int, most: int,
        options: ChainOptions,
    ) -> None:  # fmt: skip
        self._drafter, self._segments, self._vocabulary = drafter, segments, vocabulary
        self._most, self._options = most, options
        example = drafter.blender(segments).workspace
        self._kinds, self._size = example.kinds, len(example.words)  # the same for all texts
        self._blenders: dict[int, Blender] = {}
        self._where = np.zeros(slots, np.int64)
        self._read = np.zeros(slots, np.int64)
        self._asked = np.zeros(slots, np.int64)

    def draft(self, batch: Batch) -> Chains:
        """Learn what is new in the rows, and search behind each."""
        own, chains = self._drafter.options, batch.no_chains(self._most)
        known = self._make_room(batch)
        _draft(
            *self._kinds, self._size, self._where, self._asked, self._read, known, batch.token_ids, batch.rows,
            batch.lengths, batch.slots, np.minimum(batch.depth, own.depth), own.longest, own.continuation,
            self._options.tree_nodes, self._options.least_probability, self._vocabulary, chains.tokens, chains.scores,
            chains.counts,
        )  # fmt: skip
        return chains

    def forget(self, slot: int) -> None:
        """Give the slot's memory back."""
        self._blenders.pop(slot, None)
        self._where[slot] = self._read[slot] = self._asked[slot] = 0

    def _make_room(self, batch: Batch) -> I64:
        """Have a memory for every row, with room for what is new in those that are drafted; return what they know.

        Returns:
            int64[R], how many tokens of each row are in its memory: of a long text, all are read here.
        """
        known = np.zeros(len(batch.rows), np.int64)
        for i, (slot, row, length) in enumerate(
            zip(batch.slots.tolist(), batch.rows.tolist(), batch.lengths.tolist(), strict=True)
        ):
            if slot not in self._blenders:
                self._blenders[slot] = blender = self._drafter.blender(self._segments)
                blender.workspace.make_room(max(self._options.tree_nodes, self._most))
                self._where[slot] = address_of(blender.workspace.words)
            if batch.depth[i] > 0:
                known[i] = self._blenders[slot].make_room(batch.token_ids[row, :length], int(self._read[slot]))
        return known


@njit(cache=True)
def _draft_row(
    words: I64, token: np.generic, symbol: np.generic, ids: IntArray, asked: int, read: int, known: int, depth: int,
    longest: int, continuation: int, nodes: int, least: float, vocabulary: int, chain: IntArray, scores: FloatArray,
) -> int:  # fmt: skip
    """Learn what was written behind the last draft, write the best chain behind `ids`, and return its length."""
    if 0 < asked < len(ids):
        before = int(ids[asked - 2]) if asked > 1 else NO_TOKEN
        credit_at(words, token, before, int(ids[asked - 1]), ids[asked:].astype(np.int64), 0, 0.0)
    if depth <= 0:
        return 0
    start = max(min(known - 2, read, len(ids) - max(longest, 2)), 0)  # as far back as anything looks
    tail, reach = ids[start:].astype(np.int64), min(continuation, depth)
    tokens, parents, score, _source = propose_at(
        words, token, symbol, tail, read - start, known - start, reach, max(nodes, depth), depth, vocabulary
    )
    return write_chain(tokens, parents, score, depth, least, chain, scores)


@njit(cache=True, parallel=True)
def _draft(
    token: np.generic, symbol: np.generic, size: int, where: I64, asked: I64, read: I64, known: I64,
    token_ids: IntArray, rows: I64, lengths: I64, slots: I64, depth: I64, longest: int, continuation: int, nodes: int,
    least: float, vocabulary: int, chains: IntArray, scores: FloatArray, counts: IntArray,
) -> None:  # fmt: skip
    for i in prange(len(rows)):
        slot = slots[i]
        ids, words = token_ids[rows[i], : lengths[i]], array_at(where[slot], size, np.int64(0))
        counts[i] = _draft_row(
            words, token, symbol, ids, asked[slot], read[slot], known[i], depth[i], longest, continuation, nodes,
            least, vocabulary, chains[i], scores[i],
        )  # fmt: skip
        asked[slot] = 0
        if depth[i] > 0:
            asked[slot] = read[slot] = lengths[i]
