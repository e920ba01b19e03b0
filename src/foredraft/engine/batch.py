"""Continuous batching: many sequences decode in shared passes, and each text is the same as when decoded alone.

Sequences may join and leave at any step. A step verifies one draft per running sequence and prefills a piece of the
waiting prompts in the same pass. A sequence without a cache is suspended: it waits for room, or for a prefix that
another one is prefilling, and is prefilled again. Does not depend on how a model runs its passes, on text or on
scheduling.
"""

import warnings
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, StepRecord
from foredraft.control import BatchControl
from foredraft.engine.run import Run
from foredraft.engine.step import proposed, record_of, settle
from foredraft.errors import ForedraftWarning, OutOfMemoryError, PromptTooLongError, UsageError, is_interrupt
from foredraft.graph.layout import Layout, lay_out, lay_out_text

if TYPE_CHECKING:
    from foredraft.model.batch_target import JointBatch, SequentialBatch

_PIECE = 64  # prompt tokens prefilled per step while sequences run: as slow as four plain steps on Zen 5
_LEAST_PIECE = 8  # prompt tokens of a step, however slow (chosen)
_AHEAD = 512  # cache slots of a text after its prompt at first; it moves to a larger range when needed; chosen


@dataclass(slots=True)
class _Part:
    """The rows of one sequence in a pass: a verification, or a piece of its prompt, which has no budget."""

    run: Run
    layout: Layout
    draft: Draft = EMPTY_DRAFT
    budget: Budget | None = None
    nanoseconds: tuple[int, int] = (0, 0)  # of drafting and of laying out


class Batch:
    """Sequences decoded together; `control` decides for those that share one.

    Pieces of prompts are so small that a step takes about `step_seconds` at most, if given.
    """

    def __init__(
        self, target: "JointBatch | SequentialBatch", control: BatchControl, step_seconds: float | None = None
    ) -> None:
        self._target, self._control, self._step_seconds = target, control, step_seconds
        self._runs: dict[Run, int] = {}  # in order of joining, and when they joined
        self._changed = False  # whether suspended runs may go on: a run left, or a piece of a prompt was prefilled

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, run: Run) -> bool:
        return run in self._runs

    @property
    def memory_use(self) -> float:
        """The used share of the KV cache memory, 0 to 1."""
        return self._target.memory_use

    @property
    def keeps_prefixes(self) -> bool:
        """Whether a text that begins as an earlier one did is not computed anew."""
        return self._target.keeps_prefixes

    def join(self, run: Run) -> Run:
        """Add a text, which is returned, from the next step on.

        UsageError for a text of another model, or one that was begun. OutOfMemoryError if its prompt finds no room, if
        others wait for room, or if the batch has a text for each row of a pass; PromptTooLongError for a prompt that
        needs more room than there is.
        """
        if run.target is not self._target.target:
            raise UsageError("The text is of another model than the batch; join it to a batch of its own generator.")
        if hasattr(run, "drafting") or run.records:
            raise UsageError("The text was begun already; start another one with the same prompt.")
        if len(self._runs) >= self._target.most_rows:
            raise OutOfMemoryError(f"The batch has {len(self._runs)} texts, as many as a pass has rows.")
        waits = self._follows(run)
        if not waits and any(_is_suspended(each) and not self._follows(each) for each in self._runs):
            raise OutOfMemoryError("Texts of the batch wait for room in the key-value cache.")
        cache = None if waits else self._open(run)  # the length of a text that waits is checked then
        try:
            run.open(cache)
        except BaseException:
            self._close(cache)
            raise
        run.shared = run.shared and self._target.keeps_prefixes  # else it has passes of its own
        self._runs[run] = perf_counter_ns()
        return run

    def _open(self, run: Run) -> Any:
        ids = run.seq.view().ids
        cache = self._target.open(ids, len(ids) + _AHEAD, run.owner)
        if run.cached_tokens is None:
            run.cached_tokens = int(cache.length)
        return cache

    def _close(self, cache: Any) -> None:
        if cache is not None:
            self._target.close(cache)

    def _follows(self, run: Run) -> bool:
        """Return whether an earlier run is prefilling a prefix of `run` that is worth waiting for."""
        ids = run.seq.view().ids[:-1]
        for other in self._runs if self._target.keeps_prefixes else ():
            if other is run:
                return False
            if _is_suspended(other) or other.owner != run.owner or not _waiting(other):
                continue
            soon = int(other.seq.cache.length) + _PIECE
            prompt = other.seq.view().ids[:-1][:soon]
            if np.array_equal(prompt, ids[: len(prompt)]):
                return True
        return False

    def _resume(self) -> None:
        """Give suspended runs a cache again, first come first served, until there is no room."""
        changed, self._changed = self._changed or all(map(_is_suspended, self._runs)), False
        for run in [run for run in self._runs if changed and _is_suspended(run)]:
            if self._follows(run):
                continue
            try:
                run.seq.cache = self._open(run)
            except OutOfMemoryError:
                return
            except PromptTooLongError as error:
                run.failure = error

    def leave(self, run: Run) -> None:
        """Remove a sequence, finished or not."""
        del self._runs[run]
        cache = run.seq.cache
        try:
            run.close()
        finally:
            self._close(cache)
            self._changed = True

    def step(self) -> list[Run]:
        """Advance every sequence with a prefilled prompt by at least one token, and some prompts by a piece.

        Returned are the runs that advanced or ended. Ended ones have left the batch.
        """
        start = perf_counter_ns()
        self._resume()
        running = [run for run in self._runs if not run.ended and not _is_suspended(run)]
        filling = [run for run in running if _waiting(run)]
        room = self._target.most_rows - (_PIECE if filling else 0)
        verifications = self._verifications([run for run in running if not _waiting(run)], room)
        pieces = self._pieces(filling, verifications)
        parts = [part for part in verifications + pieces if self._has_room(part)]
        passed = perf_counter_ns()
        layouts, caches = [part.layout for part in parts], [part.run.seq.cache for part in parts]
        scored, hidden = [p.budget is not None for p in parts], [p.run.drafter.needs.hidden for p in parts]
        results = self._target.forward(layouts, caches, scored, hidden) if parts else []
        forward = perf_counter_ns() - passed
        advanced, shared, drafting = [], [], 0  # verdicts and nanoseconds of drafting under the batch's control
        for part, (own, nanoseconds, states) in zip(parts, results, strict=True):
            run = part.run
            if isinstance(own, OutOfMemoryError):
                _end(run, own)
                continue
            if part.budget is None or own is None:
                run.seq.fill(part.layout.rows, states)
                self._changed = True
                continue
            if not run.records:
                run.prefill_seconds = (start - self._runs[run]) / 1e9
            try:
                verdict, took = settle(run, part.budget, part.draft, own)
                run.records.append(record_of(verdict, run.drafter, (*part.nanoseconds, nanoseconds, *took)))
                advanced.append(run)
                own_drafting = part.nanoseconds[0] + took[-1]
                if run.shared:
                    shared.append(verdict)
                    drafting += own_drafting
                elif self._target.keeps_prefixes:  # a shared pass does not show the cost of its own rows
                    run.control.observe(verdict, 0.0, 0.0)
                else:
                    other = sum(part.nanoseconds) + sum(took)
                    run.control.observe(verdict, nanoseconds / 1e9, other / 1e9, own_drafting / 1e9)
            except Exception as error:  # noqa: BLE001  # whatever a logits processor raises ends its text alone
                _fail(run, error)
        if shared:
            rows, other = sum(part.layout.rows for part in parts), perf_counter_ns() - start - forward
            self._control.observe(shared, rows, forward / 1e9, other / 1e9, drafting / 1e9)
        ended = [run for run in self._runs if run.ended]
        for run in ended:
            self.leave(run)
        return advanced + [run for run in ended if run not in advanced]

    def _verifications(self, ready: list[Run], room: int) -> list[_Part]:
        """Return the verifications of the next pass, `room` rows if possible: each run's root and its drafted nodes.

        A run whose drafter or control raises, or whose draft is not a tree of tokens, has failed, and has none.
        """
        runs, drafts, budgets, times = list[Run](), list[Draft](), list[Budget](), list[int]()
        lanes = len(ready)
        for run in ready:
            start, depth = perf_counter_ns(), run.seq.useful_depth
            most = min(run.context.max_nodes, max(room // lanes - 1, 0))
            try:
                budget = self._control.budget(depth, lanes) if run.shared else run.control.budget(depth)
                budget = budget if budget.nodes <= most else replace(budget, nodes=most)
                draft = proposed(run, budget)
                draft = draft if run.shared else run.control.trim(draft, budget)
            except Exception as error:  # noqa: BLE001  # whatever a drafter or control raises ends its text alone
                _fail(run, error)
                continue
            runs.append(run)
            drafts.append(draft)
            budgets.append(budget)
            times.append(perf_counter_ns() - start)
        shared = [number for number, run in enumerate(runs) if run.shared]
        own_rows = sum(len(draft) + 1 for draft, run in zip(drafts, runs, strict=True) if not run.shared)
        cut = self._control.trim(
            [drafts[number] for number in shared], [budgets[number] for number in shared], own_rows
        )
        for number, draft in zip(shared, cut, strict=True):
            drafts[number] = draft
        parts = []
        for run, draft, budget, drafting in zip(runs, drafts, budgets, times, strict=True):
            start = perf_counter_ns()
            layout = lay_out(run.seq.root, draft.tokens, draft.parents, run.seq.length - 1)
            parts.append(_Part(run, layout, draft, budget, (drafting, perf_counter_ns() - start)))
        return parts

    def _pieces(self, runs: list[Run], verifications: list[_Part]) -> list[_Part]:
        """Return pieces of the prompts of `runs` that fit into the pass with `verifications`.

        Each has an equal share of the rows, so that a short prompt does not wait for the end of a long one.
        """
        others = sum(part.layout.rows for part in verifications)
        left = self._target.most_rows - others
        if verifications:
            left = min(left, _PIECE)
        if runs and self._step_seconds is not None:
            left = min(left, max(self._control.rows_within(self._step_seconds) - others, _LEAST_PIECE))
        pieces = []
        for number, run in enumerate(sorted(runs, key=_waiting)):
            count = min(_waiting(run), -(-left // (len(runs) - number)))
            if count > 0:
                at = int(run.seq.cache.length)
                pieces.append(_Part(run, lay_out_text(run.seq.view().ids[at : at + count].copy(), at)))
                left -= count
        return pieces

    def _has_room(self, part: _Part) -> bool:
        """Reserve a sequence's rows of the pass and return whether there is room.

        Without room for a draft only the root is verified. Without any it is suspended until another one leaves; a text
        that is alone ends.
        """
        run = part.run
        try:
            self._target.reserve(run.seq.cache, part.layout)
        except OutOfMemoryError as error:
            if len(part.draft):
                part.draft, part.layout = EMPTY_DRAFT, lay_out_text(part.layout.token_ids[:1], part.layout.at)
                return self._has_room(part)
            if any(each is not run and not _is_suspended(each) for each in self._runs):
                cache, run.seq.cache = run.seq.cache, None
                self._close(cache)
                self._changed = True  # others may have waited for its prompt
            else:
                _end(run, error)
            return False
        return True


def _end(run: Run, error: OutOfMemoryError) -> None:
    """End a text that finds no memory: with what is written, or as failed if that is nothing."""
    if len(run.seq.emitted):
        run.seq.finish = "memory"
    else:
        run.failure = error


def _fail(run: Run, error: Exception) -> None:
    """End a text by an error that is not the interruption of compiled code."""
    if is_interrupt(error):
        raise KeyboardInterrupt from error
    run.failure = error


def _is_suspended(run: Run) -> bool:
    return run.seq.cache is None


def _waiting(run: Run) -> int:
    """Return the number of prompt tokens that are not in the cache yet, without the root."""
    return run.seq.length - 1 - int(run.seq.cache.length)


def steps_in(batch: Batch, run: Run) -> Generator[StepRecord]:
    """Write a text in an empty batch, which keeps its keys and values for a later one that begins alike.

    Yields the records of steps and warns as `Run.steps` does; raises UsageError for a batch with other texts, what
    `Batch.join` does, and the error of a failed text.
    """
    if len(batch):
        raise UsageError(f"The batch has {len(batch)} unfinished texts; a stream needs one without any.")
    batch.join(run)
    told = 0
    try:
        while run in batch:
            batch.step()
            yield from run.records[told:]
            told = len(run.records)
    finally:
        if run in batch:
            batch.leave(run)
    if run.failure is not None:
        raise run.failure
    if run.seq.finish == "memory":
        warnings.warn("The key-value cache is full. The text ends here.", ForedraftWarning, stacklevel=2)


def write_all(batch: Batch, texts: Iterable[Run], most: int) -> list[Run]:
    """Generate texts, at most `most` at once, and return them.

    Raises OutOfMemoryError if there is no room for one text alone, and the error of the first failed text at the end.
    """
    runs: list[Run] = []
    waiting = iter(texts)
    following = next(waiting, None)
    try:
        while following is not None or len(batch):
            while following is not None and len(batch) < most:
                try:
                    runs.append(batch.join(following))
                except OutOfMemoryError:
                    if not len(batch):
                        raise
                    break  # wait until others have ended
                following = next(waiting, None)
            batch.step()
    finally:
        for run in runs:
            if run in batch:
                batch.leave(run)
    for run in runs:
        if run.failure is not None:
            raise run.failure
    return runs
