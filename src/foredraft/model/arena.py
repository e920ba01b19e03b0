"""Keys and values of many sequences in one store: each sequence leases its own range of slots.

Every layer keeps all positions, those with a sliding window too. A finished sequence's slots are kept until their room
is needed, so that a new sequence with the same prefix can reuse them. Recurrent layers keep a state for a length, in a
numbered place; some are kept for later sequences too. Does not depend on the model, nor on scheduling.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import proxy

import numpy as np
import torch

from foredraft.contracts import TokenIds
from foredraft.errors import OutOfMemoryError, PromptTooLongError
from foredraft.graph.tree import common_length
from foredraft.model.kv_cache import kept_rows, move_rows, whole_blocks

if TYPE_CHECKING:
    from foredraft.model.compiled.recurrence import RecordStates
    from foredraft.model.recurrent.state import JointStates

MOST_SLOTS = 2**20  # compiled forwards take no more
_LEAST_SHARED = 16  # tokens; a shorter common prefix is computed as fast as it is copied
_PASS = 64  # least free slots after a prompt that is reused: as many as drafts have nodes by default
STATE_TOKENS = 512  # of a prompt between two states that are kept; chosen


class Lease:
    """The cache of one sequence: `capacity` slots of an arena from `start` on, those of `tokens` committed."""

    def __init__(self, arena: "Arena", start: int, capacity: int, prompt: int, owner: str) -> None:
        self._arena: Arena = proxy(arena)  # in no cycle: its gigabytes do not wait for Python to look for garbage
        self.start, self.capacity, self.owner = start, capacity, owner
        self.tokens: TokenIds = np.empty(0, np.int64)
        self.idle = False  # whether its sequence is finished
        self.place = 0  # of the state after `tokens`
        self.following = 0  # of the state that the running pass makes
        self.saved: dict[int, int] = {}  # places of states that are kept, by their lengths
        self.prompt = prompt  # its length without the root
        self._last = self.tokens

    @property
    def length(self) -> int:
        return len(self.tokens)

    def reusable(self, token_ids: TokenIds) -> int:
        """Return how many of the first tokens of a sequence, int64[n], it may take over: all that are the same.

        Where layers keep states, these are as many as a state was kept for.
        """
        common = common_length(self.tokens, token_ids)
        if self._arena.states is None or common == self.length:
            return common
        return max((length for length in self.saved if length <= common), default=0)

    def begin_as(self, source: "Lease", shared: int) -> None:
        """Take over the first tokens of a sequence, and the states that are kept of them; their slots are there."""
        place = source.place if shared == source.length else source.saved.get(shared, 0)
        saved = {length: each for length, each in source.saved.items() if length <= shared}
        self.tokens, self.place, self.saved = source.tokens[:shared], place, saved

    def reserve(self, token_ids: TokenIds) -> None:
        """Make room for the rows of a pass, int64[R], after the committed ones; may move the lease."""
        self._last = token_ids
        if self.length + len(token_ids) > self.capacity:
            self._arena.move(self, self.length + len(token_ids))
        if self._arena.states is not None:
            self.following = self.place  # a pass that failed made no state
            self.following = self._arena.free_place()

    def attended(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values of the committed tokens, as `SequenceView.attended` says."""
        buffers, own = self._arena.buffers, slice(self.start, self.start + self.length)
        return buffers[layer][:, :, own], buffers[len(buffers) // 2 + layer][:, :, own]

    def commit(self, rows: Sequence[int]) -> None:
        """Commit these rows of the last pass, ascending, and discard its others."""
        kept = kept_rows(rows, len(self._last))
        if len(kept) and kept[-1] >= len(kept):
            for store in self._arena.stores:
                move_rows(store, self.start + self.length, kept)
        if self._arena.states is not None:
            self._arena.states.commit(self.place, self.following, kept)
        # last, so that an interrupt leaves a state that is of all tokens
        self.tokens, self.place = np.concatenate([self.tokens, self._last[kept]]), self.following
        self._last = self._last[:0]
        due = max(self.saved, default=0) + STATE_TOKENS <= self.length < self.prompt or self.length == self.prompt
        if self._arena.states is not None and due:
            self.saved[self.length] = self.place


class Arena:
    """Up to `most_slots` slots for many sequences, in buffers of these `shapes`: key heads and their size.

    Finished sequences' slots are kept while all leases have no more than `most_kept`, if that is given. Recurrent
    layers have `states`, made for `most_states` places. Raises OutOfMemoryError if there is no memory for all of that.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, most_slots: int,
        states: "Callable[[int], JointStates | RecordStates] | None" = None, most_states: int = 0,
        most_kept: int | None = None,
    ) -> None:  # fmt: skip
        self.most_slots, self.most_states = min(most_slots, MOST_SLOTS), most_states
        self._most_kept = most_kept
        self._leases: list[Lease] = []  # of idle ones, the least recently used first
        try:  # the system provides memory for the slots that are written to, but may refuse to promise so much
            stores = {
                (heads, size): torch.empty((shapes.count((heads, size)), heads, self.most_slots, size), dtype=dtype)
                for heads, size in dict.fromkeys(shapes)
            }
            self.states = None if states is None else states(most_states)
        except RuntimeError as error:
            raise OutOfMemoryError(
                f"There is no memory for a key-value cache of {self.most_slots} tokens; give it less."
            ) from error
        self.stores = list(stores.values())
        taken = {shape: iter(store.split(1)) for shape, store in stores.items()}
        self.buffers = [next(taken[shape]) for shape in shapes]  # each float[1, heads, slots, size]

    @property
    def used(self) -> int:
        """The number of slots leased to unfinished sequences."""
        return sum(lease.capacity for lease in self._leases if not lease.idle)

    def open(self, token_ids: TokenIds, capacity: int, owner: str = "") -> Lease:
        """Lease slots to a sequence, int64[n]; a prefix shared with another one of its owner is committed already.

        Its last token is the root, which is never committed. More tokens than `capacity` make the lease grow. Raises
        OutOfMemoryError if unfinished sequences take too much room, and PromptTooLongError if all slots are too few.
        """
        texts = sum(not lease.idle for lease in self._leases)
        if self.states is not None and 2 * (texts + 1) >= self.most_states:
            raise OutOfMemoryError(
                f"{texts} texts are being written, and the key-value cache has room for the states of no more. Wait "
                "for one to end, or give the cache more memory."
            )
        if len(token_ids) > self.most_slots:
            raise PromptTooLongError(
                f"The prompt has {len(token_ids)} tokens, and the key-value cache has room for {self.most_slots}; "
                "shorten the prompt, or give the cache more memory."
            )
        shared = 0
        source: Lease | None = None
        for lease in (each for each in self._leases if each.owner == owner):
            if (common := lease.reusable(token_ids[:-1])) >= max(shared + 1, _LEAST_SHARED):
                shared, source = common, lease
        capacity = min(whole_blocks(max(capacity, len(token_ids))), self.most_slots)
        busy = [each for each in self._leases if each is source or not each.idle]
        # nothing to copy, or no room for a copy
        if source is not None and source.idle and (shared == source.length or self._gap(busy, capacity) is None):
            source.begin_as(source, shared)
            source.prompt = len(token_ids) - 1
            needed, source.idle = min(len(token_ids) + _PASS, self.most_slots), False
            try:
                if source.capacity < needed:
                    self.move(source, needed)
            except BaseException:
                source.idle = True
                raise
            return source
        self._forget(capacity, keep=source)
        lease = Lease(self, self._place(capacity, keep=source), capacity, len(token_ids) - 1, owner)
        if source is not None:
            lease.begin_as(source, shared)
            self._copy(source.start, lease.start, shared)
            self._leases.remove(source)
            self._leases.append(source)
        self._leases.append(lease)  # with all that it shares, also where an interrupt ends the copying
        return lease

    def close(self, lease: Lease) -> None:
        """Take back the lease of a finished sequence; later ones may reuse its tokens."""
        self._leases.remove(lease)
        if lease.length >= _LEAST_SHARED:
            self._leases.append(lease)
            lease.idle, lease.following = True, lease.place
            lease.saved[lease.length] = lease.place

    def free_place(self) -> int:
        """Return a place for a state; if need be, one that the least recently used sequence keeps a state in."""
        while True:
            used = {each for lease in self._leases for each in (lease.place, lease.following, *lease.saved.values())}
            if free := set(range(1, self.most_states)) - used:
                return min(free)
            lease = next(each for each in sorted(self._leases, key=lambda each: not each.idle) if each.saved)
            del lease.saved[next(iter(lease.saved))]
            if lease.idle and not lease.saved:
                self._leases.remove(lease)

    def move(self, lease: Lease, needed: int) -> None:
        """Give a lease `needed` slots or more, elsewhere if need be; raises OutOfMemoryError without room."""
        capacity = whole_blocks(needed + needed // 4)
        self._forget(capacity - lease.capacity, keep=lease)
        if self._extend(lease, capacity):
            return
        start = self._gap(self._leases, capacity)
        if start is None:  # rather a smaller lease than to evict others
            capacity = max(needed, min(whole_blocks(needed), self.most_slots))
            if self._extend(lease, capacity):
                return
            try:
                start = self._place(capacity)
            except OutOfMemoryError:
                start = self._place(capacity, moved=lease)
        if start != lease.start:
            tokens, lease.tokens = lease.tokens, lease.tokens[:0]  # an interrupt leaves none, as slots may overlap
            self._copy(lease.start, start, len(tokens))
            lease.start, lease.tokens = start, tokens
        lease.capacity = capacity

    def _forget(self, more: int, keep: Lease | None) -> None:
        """Drop idle leases other than `keep` for which there are too many slots, before `more` are leased."""
        if self._most_kept is None:
            return
        beyond = sum(each.capacity for each in self._leases) + more - self._most_kept
        for lease in [each for each in self._leases if each.idle and each is not keep]:
            if beyond <= 0:
                return
            self._leases.remove(lease)
            beyond -= lease.capacity

    def _extend(self, lease: Lease, capacity: int) -> bool:
        """Return whether a lease could be extended where it is, to `capacity` slots."""
        end = min((each.start for each in self._leases if each.start > lease.start), default=self.most_slots)
        if lease.start + capacity > end:
            return False
        lease.capacity = capacity
        return True

    def _place(self, capacity: int, keep: Lease | None = None, moved: Lease | None = None) -> int:
        """Return the start of a free range, evicting idle leases other than `keep` if needed.

        It may overlap the slots of `moved`, a lease that is to be moved there.
        """
        evictable = [lease for lease in self._leases if lease.idle and lease is not keep]
        left = [lease for lease in self._leases if lease not in evictable and lease is not moved]
        if self._gap(left, capacity) is None:
            raise OutOfMemoryError(
                f"There is no room for {capacity} more tokens: of the key-value cache's {self.most_slots} slots, "
                f"{self.used} are taken. Wait for other texts to end, or give the cache more memory."
            )
        while (start := self._gap([*left, *evictable], capacity)) is None:
            self._leases.remove(evictable.pop(0))
        return start

    def _gap(self, leases: Sequence[Lease], capacity: int) -> int | None:
        """Return the start of the first free range beside these leases, or None."""
        end = 0
        for lease in sorted(leases, key=lambda each: each.start):
            if lease.start - end >= capacity:
                return end
            end = lease.start + lease.capacity
        return end if end + capacity <= self.most_slots else None

    def _copy(self, source: int, target: int, count: int) -> None:
        for plane in self.buffers:  # one by one, because ranges that overlap are copied twice
            copied = plane[:, :, source : source + count]
            plane[:, :, target : target + count] = copied.clone() if abs(source - target) < count else copied
