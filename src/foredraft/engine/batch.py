"""Decode many sequences by steps of one forward: each joins and leaves at any step, and its text is the same as alone.

A step gives every sequence that is being written one verification, and puts a piece of the prompts that wait into the
cache in the same pass. Knows ids and arrays only; who is served first is somebody else's to decide.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np

from foredraft.contracts import (
    EMPTY_DRAFT,
    Budget,
    Control,
    Draft,
    Drafting,
    Needs,
    Scores,
    StepRecord,
    TokenIds,
    Verdict,
)
from foredraft.engine.state import Prepared, SequenceState
from foredraft.engine.step import proposed, recorded, tell
from foredraft.errors import ForedraftError, NumericsError, OutOfMemoryError, UsageError
from foredraft.graph.layout import Layout, lay_out, lay_out_text
from foredraft.verify import verify

PIECE = 64
"""Tokens of prompts that a step takes beside sequences that are being written, which wait for as long: a pass of 64
rows takes four times as long as one of one row (docs/results/index.md)."""

_AHEAD = 512
"""Slots that a text has after its prompt at first; it moves to a larger range when it needs one."""


class BatchTarget(Protocol):
    """A causal language model that scores the rows of several sequences."""

    vocabulary: int
    most_rows: int
    """Rows that a pass may have in all."""

    @property
    def memory_use(self) -> float:
        """The share of the memory for keys and values that is taken, 0 to 1; 0 where no limit is set."""

    def open(self, token_ids: TokenIds, capacity: int) -> Any:
        """Return the `KeyValueCache` of a sequence that begins with `token_ids`; some may be committed already.

        Raises:
            OutOfMemoryError: there is no room for `capacity` tokens while others have theirs.
        """

    def close(self, cache: Any) -> None:
        """Take back the cache of a sequence that is done with."""

    def reserve(self, cache: Any, layout: Layout) -> None:
        """Make room for the rows of a pass.

        Raises:
            OutOfMemoryError: there is none.
        """

    def forward(
        self, layouts: Sequence[Layout], caches: Sequence[Any], scored: Sequence[bool], *, hidden: bool = False
    ) -> list[Scores | None]:
        """Run each layout's rows against its own cache, in which room was made; nothing is committed.

        Returns:
            The scores of every row of each layout, and None for those that need not be `scored`.
        """


class JointControl(Protocol):
    """Decides how much the sequences of a batch draft, all together."""

    def budget(self, depth: int, lanes: int) -> Budget:
        """Say how much one of `lanes` sequences is to draft, of which at most `depth` more tokens can be of use."""

    def trim(self, drafts: Sequence[Draft], budgets: Sequence[Budget], other_rows: int) -> list[Draft]:
        """Cut the drafts to the nodes that are worth verifying in one pass, beside the rows of other sequences."""

    def observe(
        self,
        verdicts: Sequence[Verdict],
        rows: int,
        forward_seconds: float,
        other_seconds: float,
        draft_seconds: float,
    ) -> None:
        """Learn what a step gave, one verdict or more, and its seconds: the pass, the rest, of that the drafting."""


@dataclass(slots=True, eq=False)
class Lane:
    """One sequence of a batch.

    Attributes:
        seq: the sequence.
        drafting: guesses, opened for it.
        control: its own; None where the batch's decides.
        needs: what the drafting wants to see of verdicts.
        names: what the numbers in `Draft.source` stand for.
        seed: of its sampling.
        records: of its steps so far.
        prefill_seconds: from joining to the last piece of its prompt.
        failure: why it ended, where an error ended it.
    """

    seq: SequenceState
    drafting: Drafting
    control: Control | None
    needs: Needs
    names: tuple[str, ...]
    seed: int
    records: list[StepRecord] = field(default_factory=list)
    prefill_seconds: float = 0.0
    failure: ForedraftError | None = None
    joined: int = field(default_factory=perf_counter_ns)

    @property
    def waiting(self) -> int:
        """How many tokens of the prompt are not in the cache yet; the last one is the root, which never is."""
        return self.seq.length - 1 - int(self.seq.cache.length)

    @property
    def ended(self) -> bool:
        """Whether nothing more is written."""
        return self.seq.finish is not None or self.failure is not None


_NO_ROWS = lay_out_text(np.empty(0, np.int64), 0)


@dataclass(slots=True)
class _Part:
    """What one sequence has in a pass: a verification, or a piece of its prompt, which has no budget."""

    lane: Lane
    draft: Draft
    budget: Budget | None
    layout: Layout = _NO_ROWS
    drafting: int = 0  # nanoseconds
    laying_out: int = 0


class Batch:
    """Sequences that are decoded together.

    Args:
        target: scores their rows.
        control: says how much those without a control of their own draft.
    """

    def __init__(self, target: BatchTarget, control: JointControl) -> None:
        self._target = target
        self._control = control
        self._lanes: list[Lane] = []

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._lanes)

    def __contains__(self, lane: Lane) -> bool:
        """Say whether a sequence has joined and not left."""
        return lane in self._lanes

    @property
    def memory_use(self) -> float:
        """The share of the memory for keys and values that is taken, 0 to 1."""
        return self._target.memory_use

    def join(self, prepared: Prepared) -> Lane:
        """Take in a text from the next step on.

        Raises:
            OutOfMemoryError: there is no room for its prompt while others have theirs.
            UsageError: its drafter drafts in the cache that it is written in.
        """
        needs = prepared.drafter.needs
        if needs.target is not None:
            raise UsageError(
                "This method drafts with the target's own layers, which is done for one text at a time; write the "
                "texts one after another, or choose another method."
            )
        seq = prepared.begin(self._target.open(prepared.prompt, len(prepared.prompt) + _AHEAD))
        drafting = prepared.drafter.open(replace(prepared.context, cache=seq.cache))
        control, names = None if prepared.shared else prepared.control, tuple(prepared.drafter.source_names)
        lane = Lane(seq, drafting, control, needs, names, prepared.context.seed)
        self._lanes.append(lane)
        return lane

    def leave(self, lane: Lane) -> None:
        """Let a sequence go, finished or not."""
        self._lanes.remove(lane)
        lane.drafting.close()
        self._target.close(lane.seq.cache)

    def step(self) -> list[Lane]:
        """Advance every sequence whose prompt is in the cache by at least one token, and some prompts by a piece.

        Returns:
            The lanes that went on, or ended. Those that ended have left the batch.
        """
        start = perf_counter_ns()
        parts = self._verifications([lane for lane in self._lanes if not lane.waiting and not lane.ended])
        parts = [part for part in (*parts, *self._pieces(parts)) if self._has_room(part)]
        passed = perf_counter_ns()
        scores = self._scores(parts) if parts else []
        forward = perf_counter_ns() - passed
        told, shared, drafting = [], [], 0  # of those whose drafts the joint control cut
        for part, own in zip(parts, scores, strict=True):
            verdict, took = self._settle(part, own)
            if verdict is not None:
                nanoseconds = (part.drafting, part.laying_out, forward, *took)
                part.lane.records.append(recorded(verdict, part.lane.names, nanoseconds))
                told.append(part.lane)
                if part.lane.control is None:
                    shared.append(verdict)
                    drafting += part.drafting + took[-1]
        if shared:
            rows, other = sum(part.layout.rows for part in parts), perf_counter_ns() - start - forward
            self._control.observe(shared, rows, forward / 1e9, other / 1e9, drafting / 1e9)
        ended = [lane for lane in self._lanes if lane.ended]
        for lane in ended:
            self.leave(lane)
        return told + [lane for lane in ended if lane not in told]

    def _verifications(self, lanes: list[Lane]) -> list[_Part]:
        """Return what every sequence that is being written has in the next pass: its root and the drafted nodes."""
        parts = []
        for lane in lanes:
            start, depth = perf_counter_ns(), lane.seq.useful_depth
            budget = self._control.budget(depth, len(lanes)) if lane.control is None else lane.control.budget(depth)
            draft = proposed(lane.seq, lane.drafting, budget, lane.needs, self._target.vocabulary, len(lane.names))
            if lane.control is not None:
                draft = lane.control.trim(draft, budget)
            parts.append(_Part(lane, draft, budget, drafting=perf_counter_ns() - start))
        shared = [part for part in parts if part.lane.control is None]
        own_rows = sum(len(part.draft) + 1 for part in parts if part.lane.control is not None)
        budgets = [part.budget for part in shared if part.budget is not None]
        drafts = self._control.trim([part.draft for part in shared], budgets, own_rows)
        for part, draft in zip(shared, drafts, strict=True):
            part.draft = draft
        for part in parts:
            start, seq = perf_counter_ns(), part.lane.seq
            part.layout = lay_out(seq.root, part.draft.tokens, part.draft.parents, seq.length - 1)
            part.laying_out = perf_counter_ns() - start
        return parts

    def _pieces(self, verifications: list[_Part]) -> list[_Part]:
        """Return the pieces of prompts that a pass has room for beside `verifications`, first come first served."""
        left = self._target.most_rows - sum(part.layout.rows for part in verifications)
        if verifications:
            left = min(left, PIECE)
        pieces = []
        for lane in self._lanes:
            count = 0 if lane.ended else min(lane.waiting, left)
            if count > 0:
                at = int(lane.seq.cache.length)
                token_ids = lane.seq.view().ids[at : at + count].copy()
                pieces.append(_Part(lane, EMPTY_DRAFT, None, lay_out_text(token_ids, at)))
                left -= count
        return pieces

    def _has_room(self, part: _Part) -> bool:
        """Say whether a sequence's cache can hold its rows of the pass; where not, its text ends here."""
        try:
            self._target.reserve(part.lane.seq.cache, part.layout)
        except OutOfMemoryError as error:
            if len(part.lane.seq.emitted):
                part.lane.seq.finish = "memory"
            else:
                part.lane.failure = error
            return False
        return True

    def _scores(self, parts: list[_Part]) -> list[Scores | None]:
        hidden = any(part.lane.needs.hidden for part in parts)
        layouts, caches = [part.layout for part in parts], [part.lane.seq.cache for part in parts]
        return self._target.forward(layouts, caches, [part.budget is not None for part in parts], hidden=hidden)

    def _settle(self, part: _Part, scores: Scores | None) -> tuple[Verdict | None, tuple[int, ...]]:
        """Commit what a sequence's rows gave; return the verdict, and what verifying, committing and observing took.

        A prompt's piece has no verdict, nor has a step from whose scores no token can be chosen.
        """
        seq, budget = part.lane.seq, part.budget
        if budget is None or scores is None:
            seq.cache.commit(range(part.layout.rows))
            part.lane.prefill_seconds = (perf_counter_ns() - part.lane.joined) / 1e9
            return None, ()
        clock = [perf_counter_ns()]
        try:
            verdict = verify(part.draft, scores, seq, part.layout.at)
        except NumericsError as error:
            part.lane.failure = error
            return None, ()
        clock.append(perf_counter_ns())
        seq.commit(verdict)
        clock.append(perf_counter_ns())
        tell(part.lane.drafting, verdict, scores, budget, part.lane.needs)
        if part.lane.control is not None:
            part.lane.control.observe(verdict, 0.0, 0.0)  # a pass that others share does not tell what its own costs
        clock.append(perf_counter_ns())
        return verdict, tuple(later - earlier for earlier, later in pairwise(clock))


def write_all(batch: Batch, texts: Iterable[Prepared], most: int) -> list[Lane]:
    """Write texts to their ends, at most so many at once; return their lanes in the order of the texts.

    Raises:
        OutOfMemoryError: there is no room for a text alone.
        ForedraftError: what ended a text, once the others are written.
    """
    lanes: list[Lane] = []
    waiting = iter(texts)
    following = next(waiting, None)
    while following is not None or len(batch):
        while following is not None and len(batch) < most:
            try:
                lanes.append(batch.join(following))
            except OutOfMemoryError:
                if not len(batch):
                    raise
                break  # until others have ended
            following = next(waiting, None)
        batch.step()
    for lane in lanes:
        if lane.failure is not None:
            raise lane.failure
    return lanes
