"""The decoding loop, of one text or of many: each text is the same as when decoded alone.

Sequences may join and leave at any step. A step plans the rows of a pass, runs it, settles the results and accounts for
the time: it verifies one draft per running sequence, and prefills a piece of the waiting prompts. A sequence without a
cache is suspended: it waits for room, or for a prefix that another one is prefilling, and is prefilled again. Does not
depend on how a model runs its passes, on text or on scheduling.
"""

import warnings
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import Any

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, NO_BUDGET, Budget, Draft, Passes, PassResult, Rows, StepRecord, Verdict
from foredraft.control import MeasuredControl
from foredraft.engine.run import Run
from foredraft.engine.sequential import SequentialPasses
from foredraft.engine.step import proposed, record_of, settle
from foredraft.errors import ForedraftWarning, OutOfMemoryError, PromptTooLongError, UsageError, is_interrupt
from foredraft.graph.layout import Layout, lay_out, lay_out_text

_PIECE = 64  # prompt tokens prefilled per step while sequences run: as slow as four plain steps on Zen 5
_LEAST_PIECE = 8  # prompt tokens of a step, however slow (chosen)
_AHEAD = 512  # cache slots of a text after its prompt at first; it moves to a larger range when needed; chosen


@dataclass(slots=True)
class _Part:
    """The rows of one sequence in a pass: a verification, or a piece of its prompt, which is not scored."""

    run: Run
    scored: bool = True
    budget: Budget = NO_BUDGET
    draft: Draft = EMPTY_DRAFT
    layout: Layout = field(init=False)
    nanoseconds: tuple[int, int] = (0, 0)  # of drafting and of laying out
    verdict: Verdict | None = None  # of a verification
    drafting: int = 0  # nanoseconds of drafting and of learning from the verdict

    def dropped_draft(self) -> bool:
        """Leave only the root to be verified; return whether there was a draft."""
        if not len(self.draft):
            return False
        self.draft, self.layout = EMPTY_DRAFT, lay_out_text(self.layout.token_ids[:1], self.layout.at)
        return True

    def rows(self) -> Rows:
        return Rows(self.layout, self.run.seq.cache, self.scored, self.run.drafter.needs.hidden)


class Batch:
    """Sequences decoded together by `passes`; `control` decides for those that share one.

    Pieces of prompts are so small that a step takes about `step_seconds` at most, if given, by what `control` measured.
    """

    def __init__(
        self, passes: Passes, control: MeasuredControl | None = None, step_seconds: float | None = None
    ) -> None:
        self.passes, self._control, self._step_seconds = passes, control, step_seconds
        self._runs: dict[Run, int] = {}  # in order of joining, and when they joined
        self._changed = False  # whether suspended runs may go on: a run left, or a piece of a prompt was prefilled

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, run: Run) -> bool:
        return run in self._runs

    def join(self, run: Run) -> Run:
        """Add a text, which is returned, from the next step on.

        UsageError for a text of another model or method, or one that was begun. OutOfMemoryError if its prompt finds no
        room, if others wait for room, or if the batch has a text for each row of a pass; PromptTooLongError for a
        prompt that needs more room than there is.
        """
        if run.target is not self.passes.target:
            raise UsageError("The text is of another model than the batch; join it to a batch of its own generator.")
        if not self.passes.returns(run.drafter.needs.hidden):
            raise UsageError("The batch was made for another method; make one after `use` or `attach`.")
        if hasattr(run, "drafting") or run.records:
            raise UsageError("The text was begun already; start another one with the same prompt.")
        if len(self._runs) >= self.passes.most_rows:
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
        control = self._control if run.shared and self.passes.keeps_prefixes else None
        run.shared = control is not None
        if control is not None:
            run.control = control
        self._runs[run] = perf_counter_ns()
        return run

    def _open(self, run: Run) -> Any:
        ids = run.seq.view().ids
        cache = self.passes.open(ids, len(ids) + _AHEAD, run.owner)
        if run.cached_tokens is None:
            run.cached_tokens = int(cache.length)
        return cache

    def _close(self, cache: Any) -> None:
        if cache is not None:
            self.passes.close(cache)

    def _follows(self, run: Run) -> bool:
        """Return whether an earlier run is prefilling a prefix of `run` that is worth waiting for."""
        ids = run.seq.view().ids[:-1]
        for other in self._runs if self.passes.keeps_prefixes else ():
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
        suspended = [run for run in self._runs if _is_suspended(run)]
        if not suspended or not (self._changed or len(suspended) == len(self._runs)):
            return
        self._changed = False
        for run in suspended:
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

        Returned are the runs that advanced or ended. Ended ones have left the batch. If memory runs out after its first
        token, a text ends with the reason "memory" and a warning.
        """
        began = perf_counter_ns()
        parts = self._plan()
        planned = perf_counter_ns()
        results = self.passes.forward([part.rows() for part in parts]) if parts else []
        passed = perf_counter_ns()
        for part, result in zip(parts, results, strict=True):
            self._settle(part, result, began)
        self._account(parts, passed - planned, planned - began + perf_counter_ns() - passed)
        ended = [run for run in self._runs if run.ended]
        for run in ended:
            self.leave(run)
        return list(dict.fromkeys([*(part.run for part in parts if part.verdict is not None), *ended]))

    def _plan(self) -> list[_Part]:
        """Return the parts of the next pass; their sequences have room for them."""
        self._resume()
        ready, filling = list[Run](), list[Run]()
        for run in self._runs:
            if not run.ended and not _is_suspended(run):
                (filling if _waiting(run) else ready).append(run)
        parts = self._verifications(ready, self.passes.most_rows - (_PIECE if filling else 0))
        parts += self._pieces(filling, parts) if filling else []
        return [part for part in parts if self._has_room(part)]

    def _verifications(self, ready: list[Run], room: int) -> list[_Part]:
        """Return the verifications of the next pass, `room` rows if possible: each run's root and its drafted nodes.

        A run whose drafter or control raises, or whose draft is not a tree of tokens, has failed, and has none.
        """
        parts, shared = list[_Part](), list[_Part]()
        for run in ready:
            start, most = perf_counter_ns(), min(run.context.max_nodes, max(room // len(ready) - 1, 0))
            try:
                budget = run.control.budget(run.seq.useful_depth, len(ready) if run.shared else 1)
                budget = budget if budget.nodes <= most else replace(budget, nodes=most)
                part = _Part(run, budget=budget, draft=proposed(run, budget))
                if run.shared:
                    shared.append(part)
                else:
                    (part.draft,) = run.control.trim([part.draft], [budget])
            except Exception as error:  # noqa: BLE001  # whatever a drafter or control raises ends its text alone
                _fail(run, error)
                continue
            part.drafting = perf_counter_ns() - start
            parts.append(part)
        if shared:
            own_rows = sum(len(part.draft) + 1 for part in parts if not part.run.shared)
            drafts, budgets = [part.draft for part in shared], [part.budget for part in shared]
            for part, draft in zip(shared, shared[0].run.control.trim(drafts, budgets, own_rows), strict=True):
                part.draft = draft
        for part in parts:
            start, seq = perf_counter_ns(), part.run.seq
            part.layout = lay_out(seq.root, part.draft.tokens, part.draft.parents, seq.length - 1)
            part.nanoseconds = part.drafting, perf_counter_ns() - start
        return parts

    def _pieces(self, runs: list[Run], verifications: list[_Part]) -> list[_Part]:
        """Return pieces of the prompts of `runs` that fit into the pass with `verifications`.

        Each has an equal share of the rows, so that a short prompt does not wait for the end of a long one.
        """
        others = sum(part.layout.rows for part in verifications)
        left = self.passes.most_rows - others
        if verifications:
            left = min(left, _PIECE)
        if self._control is not None and self._step_seconds is not None:
            left = min(left, max(self._control.rows_within(self._step_seconds) - others, _LEAST_PIECE))
        pieces = []
        for number, run in enumerate(sorted(runs, key=_waiting)):
            count = min(_waiting(run), -(-left // (len(runs) - number)))
            if count > 0:
                piece, at = _Part(run, scored=False), int(run.seq.cache.length)
                piece.layout = lay_out_text(run.seq.view().ids[at : at + count].copy(), at)
                pieces.append(piece)
                left -= count
        return pieces

    def _has_room(self, part: _Part) -> bool:
        """Reserve a sequence's rows of the pass and return whether there is room.

        Without room for a draft only the root is verified. Without any it is suspended until another one leaves; a text
        that is alone ends.
        """
        run = part.run
        try:
            self.passes.reserve(run.seq.cache, part.layout)
        except OutOfMemoryError as error:
            if part.dropped_draft():
                return self._has_room(part)
            if any(each is not run and not _is_suspended(each) for each in self._runs):
                cache, run.seq.cache = run.seq.cache, None
                self._close(cache)
                self._changed = True  # others may have waited for its prompt
            else:
                _end(run, error)
            return False
        return True

    def _settle(self, part: _Part, result: PassResult, began: int) -> None:
        """Commit the rows of a pass that are kept, in a step that `began` then: a piece, or a verified draft."""
        run, scores = part.run, result.scores
        if isinstance(scores, OutOfMemoryError):
            if part.dropped_draft():  # the text goes on where a pass of its root finds memory
                self._settle(part, self.passes.forward([part.rows()])[0], began)
            else:
                _end(run, scores)
            return
        if scores is None:  # a piece of the prompt
            run.seq.fill(part.layout.rows, result.states)
            self._changed = True
            return
        if not run.records:
            run.prefill_seconds = (began - self._runs[run]) / 1e9
        try:
            part.verdict, took = settle(run, part.budget, part.draft, scores)
            parts = *part.nanoseconds, result.nanoseconds, *took
            run.records.append(record_of(part.verdict, run.drafter, parts))
            part.drafting += took[-1]
            if not run.shared:
                # a pass that is shared with other texts does not show the cost of this one's rows
                forward = 0 if self.passes.keeps_prefixes else result.nanoseconds
                other = sum(parts) - result.nanoseconds
                run.control.observe([part.verdict], part.layout.rows, forward / 1e9, other / 1e9, part.drafting / 1e9)
        except Exception as error:  # noqa: BLE001  # whatever a logits processor raises ends its text alone
            _fail(run, error)

    def _account(self, parts: list[_Part], forward: int, other: int) -> None:
        """Show the control that texts share what a step wrote, and its nanoseconds: of the pass, and all others."""
        shared = [part for part in parts if part.run.shared and part.verdict is not None]
        if shared:
            verdicts = [part.verdict for part in shared if part.verdict is not None]
            rows, drafting = sum(part.layout.rows for part in parts), sum(part.drafting for part in shared)
            shared[0].run.control.observe(verdicts, rows, forward / 1e9, other / 1e9, drafting / 1e9)


def _end(run: Run, error: OutOfMemoryError) -> None:
    """End a text that finds no memory: with what is written and a warning, or as failed if that is nothing."""
    if len(run.seq.emitted):
        run.seq.finish = "memory"
        warnings.warn(f"{error} The text ends here.", ForedraftWarning, stacklevel=2)
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


def steps(run: Run, batch: Batch | None = None) -> Generator[StepRecord]:
    """Write a text, and yield the records of its steps; its drafting is closed in any case.

    It is alone, or in an empty batch, which keeps its keys and values for a later text that begins alike. Raises
    UsageError for a batch with other texts, what `Batch.join` does, and the error of a failed text.
    """
    batch = Batch(SequentialPasses(run.target)) if batch is None else batch
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
