"""One store of keys and values for many sequences: each has a range of slots of its own, its lease.

What a finished sequence left stays until its room is needed, so that a sequence which begins with the same tokens goes
on from there. Knows slots and tokens; not the model, nor who is served first.
"""

from collections.abc import Sequence

import numpy as np
import torch

from foredraft.contracts import TokenIds
from foredraft.errors import OutOfMemoryError
from foredraft.model.kv_cache import BLOCK, kept_rows, move_rows, slots_of, whole_blocks

_FIRST_SLOTS = 16 * BLOCK
_LEAST_SHARED = 16
"""Tokens: a shorter common beginning is computed as quickly as it is copied."""


class Lease:
    """The cache of one sequence: a range of an arena's slots.

    Attributes:
        start: its first slot.
        capacity: how many it has.
        length: how many of them are committed.
    """

    def __init__(self, arena: "Arena", start: int, capacity: int, tokens: TokenIds) -> None:
        self._arena = arena
        self._last: TokenIds = tokens[:0]
        self.stand(start, capacity, tokens)

    def stand(self, start: int, capacity: int, tokens: TokenIds) -> None:
        """Have this range of slots from now on, with these tokens committed."""
        self.start, self.capacity, self.length = start, capacity, len(tokens)
        self._tokens = np.empty(capacity, np.int64)
        self._tokens[: len(tokens)] = tokens

    @property
    def tokens(self) -> TokenIds:
        """The ids of what is committed, int64[length]."""
        return self._tokens[: self.length]

    def reserve(self, token_ids: TokenIds) -> None:
        """Make room behind what is committed for the rows of a pass; may move the lease.

        Args:
            token_ids: int64[R], theirs.

        Raises:
            OutOfMemoryError: the arena has none.
        """
        self._last = token_ids
        if self.length + len(token_ids) > self.capacity:
            self._arena.move(self, self.length + len(token_ids))

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last pass, ascending, and forget its others.

        Raises:
            ValueError: rows that are not ascending, or beyond the last pass.
        """
        kept = kept_rows(rows, len(self._last))
        if len(kept) and kept[-1] >= len(kept):
            move_rows(self._arena.bits, self.start + self.length, kept)
        self._tokens[self.length : self.length + len(kept)] = self._last[kept]
        self.length += len(kept)
        self._last = self._tokens[:0]


class Arena:
    """Slots for many sequences.

    Attributes:
        most_slots: never hold more.
        buffers: of every layer, all keys and then all values, float[1, heads, slots, size] each.
        bits: the same memory as `move_rows` takes it, uint16[2 L, heads, slots, W].

    Args:
        layers: how many layers the model has.
        heads: key heads of each.
        size: of a head.
        dtype: of keys and values; 16 or 32 bits.
        most_slots: never hold more.
    """

    def __init__(self, layers: int, heads: int, size: int, dtype: torch.dtype, most_slots: int) -> None:
        self.most_slots = most_slots
        self._leases: list[Lease] = []  # ascending by start
        self._idle: list[Lease] = []  # of them, those of finished sequences; the longest unused first
        self._store = torch.empty((2 * layers, heads, 0, size), dtype=dtype)
        self.buffers: list[torch.Tensor] = []
        self.bits = slots_of(self._store)

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return int(self._store.shape[2])

    @property
    def used(self) -> int:
        """How many slots are leased to sequences that are not finished."""
        return sum(lease.capacity for lease in self._leases if lease not in self._idle)

    def open(self, token_ids: TokenIds, capacity: int) -> Lease:
        """Lease slots to a sequence; what it shares with an earlier one is committed already.

        Args:
            token_ids: int64[n], how it begins; the last one is the root, which is never committed.
            capacity: tokens that it may come to have; the lease grows where there are more.

        Raises:
            OutOfMemoryError: there is no room while others have theirs.
        """
        source = self._longest_shared(token_ids[:-1])
        shared = 0 if source is None else _common(source.tokens, token_ids[:-1])
        if source in self._idle:
            self._idle.remove(source)
            if shared == source.length:  # all that is there is wanted: nothing is copied
                return source
            self._idle.append(source)  # not to be evicted for the room of its own copy
        capacity = whole_blocks(max(capacity, len(token_ids)))
        lease = Lease(self, self._place(capacity, keep=source), capacity, token_ids[:shared])
        self._add(lease)
        if source is not None:
            self._copy(source.start, lease.start, shared)
        return lease

    def close(self, lease: Lease) -> None:
        """Take back the lease of a finished sequence; its tokens may serve another."""
        if lease.length >= _LEAST_SHARED:
            self._idle.append(lease)
        else:
            self._leases.remove(lease)

    def move(self, lease: Lease, needed: int) -> None:
        """Give a lease a larger range, with what it has committed.

        Raises:
            OutOfMemoryError: there is none.
        """
        capacity = whole_blocks(needed + needed // 4)
        start, tokens = self._place(capacity, keep=lease), lease.tokens
        self._copy(lease.start, start, lease.length)
        self._leases.remove(lease)
        lease.stand(start, capacity, tokens)
        self._add(lease)

    def _longest_shared(self, token_ids: TokenIds) -> Lease | None:
        """Return the lease that has the longest beginning in common with these ids, if it is worth copying."""
        shared = [_common(lease.tokens, token_ids) for lease in self._leases]
        longest = max(shared, default=0)
        return self._leases[shared.index(longest)] if longest >= _LEAST_SHARED else None

    def _place(self, capacity: int, keep: Lease | None) -> int:
        """Return where so many slots are free, after growing or evicting as need be.

        Raises:
            OutOfMemoryError: there is no room.
        """
        while True:
            end = 0
            for lease in self._leases:
                if lease.start - end >= capacity:
                    return end
                end = lease.start + lease.capacity
            if self.slots - end >= capacity:
                return end
            if end + capacity <= self.most_slots:
                self._grow(min(max(end + capacity, 2 * self.slots, _FIRST_SLOTS), self.most_slots))
                continue
            evicted = next((lease for lease in self._idle if lease is not keep), None)
            if evicted is None:
                raise OutOfMemoryError(
                    f"There is no room for {capacity} more tokens: of the key-value cache's {self.most_slots} slots, "
                    f"{self.used} are taken. Wait for other texts to end, or give the cache more memory."
                )
            self._idle.remove(evicted)
            self._leases.remove(evicted)

    @torch.inference_mode()
    def _grow(self, slots: int) -> None:
        old = self._store
        self._store = old.new_empty((*old.shape[:2], slots, old.shape[3]))
        self._store[:, :, : old.shape[2]] = old
        self.buffers = list(self._store.split(1))
        self.bits = slots_of(self._store)

    @torch.inference_mode()
    def _copy(self, source: int, target: int, count: int) -> None:
        self._store[:, :, target : target + count] = self._store[:, :, source : source + count]

    def _add(self, lease: Lease) -> None:
        self._leases.append(lease)
        self._leases.sort(key=lambda each: each.start)


def _common(one: TokenIds, other: TokenIds) -> int:
    """Return how many tokens two texts begin with alike."""
    count = min(len(one), len(other))
    differing = np.flatnonzero(one[:count] != other[:count])
    return int(differing[0]) if len(differing) else count
