"""Continuous batching: many sequences decode in shared passes, and each text is the same as when decoded alone.

Sequences may join and leave at any step. A step verifies one draft per running sequence and prefills a piece of the
waiting prompts in the same pass. Does not depend on how a model runs its passes, on text or on scheduling.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import TYPE_CHECKING

from foredraft.contracts import EMPTY_DRAFT, Budget, Control, Draft, Drafter, Drafting, Scores, StepRecord, Verdict
from foredraft.control import BatchControl
from foredraft.engine.state import Prepared, SequenceState
from foredraft.engine.step import proposed, record_of, settle
from foredraft.errors import ForedraftError, NumericsError, OutOfMemoryError, UsageError
from foredraft.graph.layout import Layout, lay_out, lay_out_text

if TYPE_CHECKING:
    from foredraft.model.batch_target import JointBatch, SequentialBatch

_PIECE = 64  # prompt tokens prefilled per step while sequences run: as slow as four plain steps (docs/results/index.md)
_AHEAD = 512  # cache slots of a text after its prompt at first; it moves to a larger range when needed; chosen


@dataclass(slots=True, eq=False)
class Lane:
    """One sequence of a batch: its state, what drafts for it, and what happened to it."""

    seq: SequenceState
    drafter: Drafter
    drafting: Drafting
    control: Control | None  # None if the batch's control decides
    seed: int  # of its sampling
    records: list[StepRecord] = field(default_factory=list)
    prefill_seconds: float = 0.0  # from joining to the last piece of its prompt
    failure: ForedraftError | None = None  # the error that ended it
    joined: int = field(default_factory=perf_counter_ns)

    @property
    def waiting(self) -> int:
        """Prompt tokens not in the cache yet, without the root."""
        return self.seq.length - 1 - int(self.seq.cache.length)

    @property
    def ended(self) -> bool:
        return self.seq.finish is not None or self.failure is not None


@dataclass(slots=True)
class _Part:
    """The rows of one sequence in a pass: a verification, or a piece of its prompt, which has no budget."""

    lane: Lane
    draft: Draft
    budget: Budget | None
    layout: Layout = field(init=False)
    drafting: int = 0  # nanoseconds
    laying_out: int = 0  # nanoseconds


class Batch:
    """Sequences decoded together; `control` decides for those without a control of their own."""

    def __init__(self, target: "JointBatch | SequentialBatch", control: BatchControl) -> None:
        self._target, self._control = target, control
        self._lanes: list[Lane] = []

    def __len__(self) -> int:
        return len(self._lanes)

    def __contains__(self, lane: Lane) -> bool:
        return lane in self._lanes

    @property
    def memory_use(self) -> float:
        """The used share of the KV cache memory, 0 to 1."""
        return self._target.memory_use

    def join(self, prepared: Prepared) -> Lane:
        """Add a text from the next step on.

        OutOfMemoryError if its prompt finds no room; UsageError if its drafter drafts in the target's cache.
        """
        drafter = prepared.drafter
        if drafter.needs.target is not None:
            raise UsageError(
                "This method drafts with the target's own layers, which works for one text at a time; generate the "
                "texts one after another, or choose another method."
            )
        cache = self._target.open(prepared.prompt, len(prepared.prompt) + _AHEAD)
        try:
            seq, drafting = prepared.begin(cache), drafter.open(replace(prepared.context, cache=cache))
        except BaseException:
            self._target.close(cache)
            raise
        control = None if prepared.shared else prepared.control
        lane = Lane(seq, drafter, drafting, control, prepared.context.seed)
        self._lanes.append(lane)
        return lane

    def leave(self, lane: Lane) -> None:
        """Remove a sequence, finished or not."""
        self._lanes.remove(lane)
        lane.drafting.close()
        self._target.close(lane.seq.cache)

    def step(self) -> list[Lane]:
        """Advance every sequence with a prefilled prompt by at least one token, and some prompts by a piece.

        Returned are the lanes that advanced or ended. Ended lanes have left the batch.
        """
        start = perf_counter_ns()
        parts = self._verifications([lane for lane in self._lanes if not lane.waiting and not lane.ended])
        parts = [part for part in (*parts, *self._pieces(parts)) if self._has_room(part)]
        passed = perf_counter_ns()
        layouts, caches = [part.layout for part in parts], [part.lane.seq.cache for part in parts]
        scored, hidden = [part.budget is not None for part in parts], any(p.lane.drafter.needs.hidden for p in parts)
        scores = self._target.forward(layouts, caches, scored, hidden=hidden) if parts else []
        forward = perf_counter_ns() - passed
        advanced = []
        shared, drafting = [], 0  # verdicts and nanoseconds of drafting under the joint control
        for part, own in zip(parts, scores, strict=True):
            lane = part.lane
            settled = _settle(part, own)
            if settled is None:
                continue
            verdict, took = settled
            lane.records.append(record_of(verdict, lane.drafter, (part.drafting, part.laying_out, forward, *took)))
            advanced.append(lane)
            if lane.control is None:
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
            draft = proposed(lane.seq, lane.drafter, lane.drafting, budget, self._target.vocabulary)
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
            left = min(left, _PIECE)
        pieces = []
        for lane in self._lanes:
            count = 0 if lane.ended else min(lane.waiting, left)
            if count > 0:
                at = int(lane.seq.cache.length)
                pieces.append(_Part(lane, EMPTY_DRAFT, None))
                pieces[-1].layout = lay_out_text(lane.seq.view().ids[at : at + count].copy(), at)
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


def _settle(part: _Part, scores: Scores | None) -> tuple[Verdict, tuple[int, int, int]] | None:
    """Do what `settle` does; None for a committed piece of a prompt, and for scores that allow no token."""
    lane = part.lane
    if part.budget is None or scores is None:
        lane.seq.cache.commit(range(part.layout.rows))
        lane.prefill_seconds = (perf_counter_ns() - lane.joined) / 1e9
        return None
    try:
        settled = settle(lane.seq, lane.drafter, lane.drafting, part.budget, part.draft, scores)
    except NumericsError as error:
        lane.failure = error
        return None
    if lane.control is not None:
        lane.control.observe(settled[0], 0.0, 0.0)  # a shared pass does not show the cost of its own rows
    return settled


def write_all(batch: Batch, texts: Iterable[Prepared], most: int) -> list[Lane]:
    """Generate texts, at most `most` at once; return their lanes in the order of the texts.

    Raises OutOfMemoryError if there is no room for one text alone, and the error of the first failed text at the end.
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
