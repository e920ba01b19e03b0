"""The thread that steps one batch for all requests; texts join in order of arrival when there is room.

Does not depend on HTTP.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from foredraft.contracts import StepRecord
from foredraft.engine.batch import Batch
from foredraft.engine.run import Run
from foredraft.engine.state import FinishReason
from foredraft.errors import ForedraftError, OutOfMemoryError, told


class BusyError(ForedraftError):
    """The queue is full; a later try may succeed."""


class StoppingError(BusyError):
    """The server is being stopped."""


class Event(NamedTuple):
    """Progress of a text: its steps since the last event, its finish reason, or its failure."""

    records: tuple[StepRecord, ...] = ()
    finish: FinishReason | None = None
    failure: Exception | None = None


@dataclass(slots=True, eq=False)
class Job:
    """One text to generate; times are seconds of `time.monotonic`, 0 if not reached yet."""

    run: Run = field(repr=False)
    send: Callable[[Event], None]  # called for every event, on the writer's thread; must not raise
    cancelled: bool = False
    submitted: float = field(default_factory=time.monotonic)
    started: float = 0.0  # when it joined the batch
    last_event: float = 0.0  # when tokens were last sent; set by the metrics
    steps: int = 0  # steps delivered


class Writer:
    """Generates up to `most_at_once` texts in an empty batch, while `most_waiting` more wait, until it is closed."""

    def __init__(self, batch: Batch, most_at_once: int, most_waiting: int) -> None:
        self.batch, self._most_at_once, self._most_waiting = batch, most_at_once, most_waiting
        self._waiting: deque[Job] = deque()
        self._joined: dict[Run, Job] = {}
        self._changed = threading.Condition()
        self._stopping = False  # whether new texts are rejected
        self._until = float("inf")  # deadline for unfinished texts
        self._thread = threading.Thread(target=self._run, name="foredraft-writer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether new texts are accepted."""
        return self._thread.is_alive() and not self._stopping

    @property
    def most_texts(self) -> int:
        """The number of texts that it can generate and queue together."""
        return self._most_at_once + self._most_waiting

    @property
    def running(self) -> int:
        return len(self._joined)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all texts or none; BusyError if too many wait already, or the writer is closing."""
        with self._changed:
            self.check_room(len(jobs))
            self._waiting.extend(jobs)
            self._changed.notify()

    def check_room(self, count: int) -> None:
        """Raise the error of `submit` for `count` more texts, if any."""
        if not self.alive:
            raise StoppingError("The server is stopping; try again later.")
        if self.running + self.waiting + count > self.most_texts:
            raise BusyError(
                f"{self.running} texts are being generated and {self.waiting} wait; {count} more are too many. Try "
                "again later."
            )

    def cancel(self, job: Job) -> None:
        """Drop a text before its next step; it gets no events after those of a step in progress."""
        with self._changed:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Reject new texts, finish the others, and after `seconds` fail the unfinished ones."""
        with self._changed:
            self._stopping = True
            self._until = time.monotonic() + seconds
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._joined or self._stopping)
                if not self._waiting and not self._joined:
                    return
            if time.monotonic() > self._until:
                self._fail_all(StoppingError("The server is stopping, and the text was not finished."))
            else:
                self._admit()
                self._step()

    def _admit(self) -> None:
        """Remove cancelled texts and add waiting ones; those that cannot join fail."""
        for run in [run for run, job in self._joined.items() if job.cancelled]:
            self.batch.leave(run)
            del self._joined[run]
        while len(self._joined) < self._most_at_once:
            with self._changed:
                if not self._waiting:
                    break
                job = self._waiting.popleft()
            try:
                self._joined[self.batch.join(job.run)] = job
                job.started = time.monotonic()
            except Exception as error:  # noqa: BLE001  # no error may stop the other texts
                if isinstance(error, OutOfMemoryError) and self._joined:  # there is room once another text has ended
                    with self._changed:
                        if not job.cancelled:  # while it tried to join
                            self._waiting.appendleft(job)
                    break
                job.send(Event(failure=error))

    def _step(self) -> None:
        try:
            runs = self.batch.step() if self._joined else []
        except Exception as error:  # noqa: BLE001  # no error may stop later requests
            self._fail_all(ForedraftError(f"A step failed ({told(error)}); the texts of its batch are lost."))
            return
        for run in runs:
            job = self._joined[run]
            records = tuple(run.records[job.steps :])
            job.steps = len(run.records)
            if run.ended:
                del self._joined[run]
            job.send(Event(records, run.seq.finish, run.failure))

    def _fail_all(self, error: Exception) -> None:
        """Drop every text, and tell each."""
        with self._changed:
            jobs = [*self._joined.values(), *self._waiting]
            self._waiting.clear()
        for run in self._joined:
            if run in self.batch:
                self.batch.leave(run)
        self._joined.clear()
        for job in jobs:
            job.send(Event(failure=error))
