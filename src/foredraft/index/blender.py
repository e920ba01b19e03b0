"""One sequence's blending: its place in all texts, its own counts, and how far each source has proved right.

Knows texts, counts and stored segments, and makes room for them; not where they come from, nor what is done with the
draft. What is computed is that of index/blend.py, in the calls of index/workspace.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foredraft.contracts import Draft, TokenIds, Verdict
from foredraft.graph.tree import IntArray
from foredraft.index.backoff import Trust
from foredraft.index.blend import prior_inner_trust
from foredraft.index.learned import NO_TOKEN, STRETCH, LearnedArrays, empty_learned, read_text, told_by, with_room
from foredraft.index.recent_text import NO_TEXT, RecentText, append, empty_text
from foredraft.index.recent_text import with_room as with_room_for_text
from foredraft.index.suffix_array import SuffixArrays
from foredraft.index.trigram import TableArrays
from foredraft.index.workspace import BlenderOptions, Workspace

_SLACK = 256
"""Tokens that a text may grow by before what was read of it first is moved to a larger place."""


class Foreseen(NamedTuple):
    """What a neural drafter foresees: paths int32[N, D], -1 behind their ends; mass float64[N]; its share of trust."""

    paths: IntArray
    mass: npt.NDArray[np.float64]
    share: float


class Blender:
    """One sequence's place in all texts, and its own counts.

    Args:
        segments: stored texts that are searched.
        table: of tri-grams.
        trust: how far each kind of match is trusted to begin with; changed in place.
        options: what is looked up and learned.
        inner_strength: observations that the trust behind drafted tokens is worth to begin with.

    Attributes:
        ids: int64[n], what was read of the sequence.
        workspace: its arrays.
    """

    def __init__(
        self, segments: Sequence[SuffixArrays], table: TableArrays, trust: Trust, options: BlenderOptions,
        inner_strength: float,
    ) -> None:  # fmt: skip
        self.ids: TokenIds = np.empty(0, np.int64)
        self._options = options
        self._own, self._shared, self._learned = empty_text(), NO_TEXT, empty_learned()
        self._asked = False
        self._own_room, self._learned_room = len(self._own.symbols), _room_in(self._learned)
        inner = prior_inner_trust(inner_strength)
        self.workspace = Workspace(options, self._own, table, self._learned, trust, inner, segments)

    def ask(self, ids: TokenIds, shared: RecentText | None, depth: int) -> None:
        """Go on to the end of `ids`, int64[n], and find what followed the last tokens wherever they occur.

        Args:
            ids: begin with what was read before.
            shared: what others have said; None is not searched.
            depth: tokens wanted of what follows.
        """
        self.workspace.ask(ids, *self._reading(ids, shared), self.reach(depth))
        self._asked = True

    def propose(self, ids: TokenIds, shared: RecentText | None, nodes: int, depth: int, vocabulary: int) -> Draft:
        """Do what `ask` and `draft` do, in one compiled call."""
        made = self.workspace.propose(ids, *self._reading(ids, shared), self.reach(depth), nodes, depth, vocabulary)
        self._asked = True
        return made

    def foresee(self, foreseen: Foreseen) -> None:
        """Put what a neural drafter foresees before what occurred, in this step; its paths are as long as `reach`."""
        self.workspace.foresee(*foreseen)

    def reach(self, depth: int) -> int:
        """Return how many tokens are taken of what follows where `depth` are wanted."""
        return min(self._options.continuation, depth)

    def draft(self, nodes: int, depth: int, vocabulary: int) -> Draft:
        """Return the most probable continuations of what was asked for last, see `foredraft.index.blend.blend`."""
        return self.workspace.draft(*_last(self.ids), nodes, depth, vocabulary)

    def learn(self, ids: TokenIds, verdict: Verdict) -> float | None:
        """Credit what foresaw the written tokens, and learn the target's own distributions, as far as they are told.

        Args:
            ids: int64[n], the sequence up to the draft's root.
            verdict: of a draft behind them.

        Returns:
            The probability that all but a neural drafter gave the first written token; None if nothing was asked.
        """
        asked, self._asked = self._asked, False
        told = told_by(verdict) if self._options.feedback_weight else None
        if told is not None:
            self._make_room(len(told[0]))
        elif not asked:
            return None
        tokens, draft = np.array(verdict.tokens, np.int64), (verdict.draft.tokens, verdict.draft.parents)
        others = self.workspace.learn(*_last(ids), tokens, draft, told, asked=asked)
        return others if asked else None

    def _reading(self, ids: TokenIds, shared: RecentText | None) -> tuple[int, int]:
        """Have room for what `ids` have more; return how many segments were followed through, and text and counts."""
        self._asked = False
        others = NO_TEXT if shared is None else shared
        if others is not self._shared:
            self._shared = others
            self.workspace.hold(shared=others)
        followed, self.ids = len(self.ids), ids
        return followed, self.make_room(ids, followed)

    def make_room(self, ids: TokenIds | IntArray, known: int) -> int:
        """Make room for `ids[known:]`, or read them if they are many; return how many are read."""
        new = len(ids) - known
        if not self._options.learns:
            return len(ids)
        self._make_room_for_text(new if known else new + _SLACK, known)
        self._own_room -= new
        if new <= STRETCH:
            self._make_room(2 * new)
            return known
        ids = ids.astype(np.int64, copy=False)
        append(self._own, ids[known:])
        self._learned = read_text(self._learned, ids, known, self._options.keep)
        self.workspace.hold(learned=self._learned)
        self._learned_room = _room_in(self._learned)
        return len(ids)

    def _make_room_for_text(self, new: int, known: int) -> None:
        """Have room for so many more tokens of the sequence's text, which has `known`."""
        if new > self._own_room:
            self._own = with_room_for_text(self._own, new)
            self._own_room = len(self._own.symbols) - known
            self.workspace.hold(own=self._own)

    def _make_room(self, contexts: int) -> None:
        """Have room for so many more counted contexts; what was asked for is an upper bound of what was taken."""
        if contexts > self._learned_room:
            self._learned = with_room(self._learned, contexts)
            self.workspace.hold(learned=self._learned)
            self._learned_room = _room_in(self._learned)
        self._learned_room -= contexts


def _last(ids: TokenIds) -> tuple[int, int]:
    """Return the last two tokens."""
    return (int(ids[-2]) if len(ids) > 1 else NO_TOKEN), int(ids[-1])


def _room_in(learned: LearnedArrays) -> int:
    """Return how many more contexts a table has room for as it is."""
    return len(learned.keys) // 2 - int(learned.clock[1])
