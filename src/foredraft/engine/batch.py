"""Continuous batching: many sequences decode in shared passes, and each text is the same as when decoded alone.

Sequences may join and leave at any step. A step verifies one draft per running sequence and prefills a piece of the
waiting prompts in the same pass. Does not depend on models, text or scheduling.
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
from foredraft.engine.step import proposed, record_of, show_verdict
from foredraft.errors import ForedraftError, NumericsError, OutOfMemoryError, UsageError
from foredraft.graph.layout import Layout, lay_out, lay_out_text
from foredraft.verify import verify

PIECE = 64
"""Prompt tokens prefilled per step while sequences run: a pass of 64 rows takes four times as long as one of one row
(docs/results/index.md)."""

_AHEAD = 512
"""Cache slots of a text after its prompt at first; it moves to a larger range when needed; chosen."""


class BatchTarget(Protocol):
    """A causal language model that scores the rows of several sequences."""

    vocabulary: int
    most_rows: int
    """Rows of a pass at most."""

    @property
    def memory_use(self) -> float:
        """The used share of the KV cache memory, 0 to 1; 0 without a limit."""

    def open(self, token_ids: TokenIds, capacity: int) -> Any:
        """Return the `KeyValueCache` of a sequence that begins with `token_ids`; some may be committed already.

        Raises:
            OutOfMemoryError: there is no room for `capacity` tokens next to the other sequences.
        """

    def close(self, cache: Any) -> None:
        """Free the cache of a sequence."""

    def reserve(self, cache: Any, layout: Layout) -> None:
        """Reserve room for the rows of a pass; raises OutOfMemoryError if there is none."""

    def forward(
        self, layouts: Sequence[Layout], caches: Sequence[Any], scored: Sequence[bool], *, hidden: bool = False
    ) -> list[Scores | None]:
        """Run each layout's rows with its own cache, in which room is reserved; nothing is committed.

        Returns:
            The scores of all rows of each layout, and None for layouts not `scored`.
        """


class JointControl(Protocol):
    """Decides how much all sequences of a batch draft."""

    def budget(self, depth: int, lanes: int) -> Budget:
        """Return the budget of one of `lanes` sequences, in which at most `depth` more drafted tokens can be used."""

    def trim(self, drafts: Sequence[Draft], budgets: Sequence[Budget], other_rows: int) -> list[Draft]:
        """Cut the drafts to the nodes worth verifying in a pass with `other_rows` more rows."""

    def observe(
        self,
        verdicts: Sequence[Verdict],
        rows: int,
        forward_seconds: float,
        other_seconds: float,
        draft_seconds: float,
    ) -> None:
        """Learn from a step's verdicts and its seconds: of the pass, of the rest, and, within the rest, of drafting."""


@dataclass(slots=True, eq=False)
class Lane:
    """One sequence of a batch.

    Attributes:
        seq: its state.
        drafting: opened for it.
        control: its own; None if the batch's control decides.
        needs: of the drafting.
        names: source names, by the numbers in `Draft.source`.
        seed: of its sampling.
        records: its steps so far.
        prefill_seconds: from joining to the last piece of its prompt.
        failure: the error that ended it, or None.
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
        """Prompt tokens not in the cache yet, without the root."""
        return self.seq.length - 1 - int(self.seq.cache.length)

    @property
    def ended(self) -> bool:
        """Whether it finished or failed."""
        return self.seq.finish is not None or self.failure is not None


_NO_ROWS = lay_out_text(np.empty(0, np.int64), 0)


@dataclass(slots=True)
class _Part:
    """The rows of one sequence in a pass: a verification, or a piece of its prompt, which has no budget."""

    lane: Lane
    draft: Draft
    budget: Budget | None
    layout: Layout = _NO_ROWS
    drafting: int = 0  # nanoseconds
    laying_out: int = 0  # nanoseconds


class Batch:
    """Sequences decoded together; `control` decides for those without a control of their own."""

    def __init__(self, target: BatchTarget, control: JointControl) -> None:
        self._target = target
        self._control = control
        self._lanes: list[Lane] = []

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._lanes)

    def __contains__(self, lane: Lane) -> bool:
        """Return whether a sequence has joined and not left."""
        return lane in self._lanes

    @property
    def memory_use(self) -> float:
        """The used share of the KV cache memory, 0 to 1."""
        return self._target.memory_use

    def join(self, prepared: Prepared) -> Lane:
        """Add a text from the next step on.

        Raises:
            OutOfMemoryError: there is no room for its prompt next to the other sequences.
            UsageError: its drafter drafts in the target's cache.
        """
        needs = prepared.drafter.needs
        if needs.target is not None:
            raise UsageError(
                "This method drafts with the target's own layers, which works for one text at a time; generate the "
                "texts one after another, or choose another method."
            )
        seq = prepared.begin(self._target.open(prepared.prompt, len(prepared.prompt) + _AHEAD))
        drafting = prepared.drafter.open(replace(prepared.context, cache=seq.cache))
        control, names = None if prepared.shared else prepared.control, tuple(prepared.drafter.source_names)
        lane = Lane(seq, drafting, control, needs, names, prepared.context.seed)
        self._lanes.append(lane)
        return lane

    def leave(self, lane: Lane) -> None:
        """Remove a sequence, finished or not."""
        self._lanes.remove(lane)
        lane.drafting.close()
        self._target.close(lane.seq.cache)

    def step(self) -> list[Lane]:
        """Advance every sequence with a prefilled prompt by at least one token, and some prompts by a piece.

        Returns:
            The lanes that advanced or ended. Ended lanes have left the batch.
        """
        start = perf_counter_ns()
        parts = self._verifications([lane for lane in self._lanes if not lane.waiting and not lane.ended])
        parts = [part for part in (*parts, *self._pieces(parts)) if self._has_room(part)]
        passed = perf_counter_ns()
        scores = self._scores(parts) if parts else []
        forward = perf_counter_ns() - passed
        advanced = []
        shared, drafting = [], 0  # verdicts and nanoseconds of drafting under the joint control
        for part, own in zip(parts, scores, strict=True):
            verdict, took = self._settle(part, own)
            if verdict is not None:
                nanoseconds = (part.drafting, part.laying_out, forward, *took)
                part.lane.records.append(record_of(verdict, part.lane.names, nanoseconds))
                advanced.append(part.lane)
                if part.lane.control is None:
                    shared.append(verdict)
                    drafting += part.drafting + took[-1]
        if shared:
            rows, other = sum(part.layout.rows for part in parts), perf_counter_ns() - start - forward
            self._control.observe(shared, rows, forward / 1e9, other / 1e9, drafting / 1e9)
        ended = [lane for lane in self._lanes if lane.ended]
        for lane in ended:
            self.leave(lane)
        return advanced + [lane for lane in ended if lane not in advanced]

    def _verifications(self, lanes: list[Lane]) -> list[_Part]:
        """Return the verifications of the next pass: for each lane its root and the drafted nodes."""
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
        """Return the pieces of prompts that fit into the pass with `verifications`, first come first served."""
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
        """Reserve a sequence's rows of the pass and return whether there is room; without room its text ends."""
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
        """Commit a sequence's rows; return the verdict and the nanoseconds of verifying, committing and observing.

        There is no verdict for a piece of a prompt, nor for scores from which no token can be chosen.
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
        show_verdict(part.lane.drafting, verdict, scores, budget, part.lane.needs)
        if part.lane.control is not None:
            part.lane.control.observe(verdict, 0.0, 0.0)  # a shared pass does not show the cost of its own rows
        clock.append(perf_counter_ns())
        return verdict, tuple(later - earlier for earlier, later in pairwise(clock))


def write_all(batch: Batch, texts: Iterable[Prepared], most: int) -> list[Lane]:
    """Generate texts, at most `most` at once; return their lanes in the order of the texts.

    Raises:
        OutOfMemoryError: there is no room for one text alone.
        ForedraftError: the error of the first failed text, raised after the others are finished.
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
                break  # wait until others have ended
            following = next(waiting, None)
        batch.step()
    for lane in lanes:
        if lane.failure is not None:
            raise lane.failure
    return lanes
