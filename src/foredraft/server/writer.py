"""The thread that steps a batch for all requests: texts join in the order in which they came, as there is room.

Knows prepared texts and what becomes of them; not HTTP.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from foredraft.contracts import StepRecord
from foredraft.engine.batch import Batch, Lane
from foredraft.engine.state import FinishReason, Prepared
from foredraft.errors import ForedraftError, OutOfMemoryError, told


class BusyError(ForedraftError):
    """No more texts are taken in now; a later try may succeed."""


class StoppingError(BusyError):
    """The server is being stopped."""


class Event(NamedTuple):
    """What became of a text: its steps since the last event, why it ended, or what ended it instead."""

    records: tuple[StepRecord, ...] = ()
    finish: FinishReason | None = None
    failure: Exception | None = None


@dataclass(slots=True, eq=False)
class Job:
    """One text to write; times are in seconds of `time.monotonic`, 0 before they have come."""

    prepared: Prepared
    tell: Callable[[Event], None]  # called with every event, on the thread of `Writer`'s `deliver`
    cancelled: bool = False  # whether nobody waits for it any more
    submitted: float = field(default_factory=time.monotonic)  # when it came
    started: float = 0.0  # when its first pass could begin
    told: float = 0.0  # when tokens of it were last told, set by whoever tells
    steps: int = 0  # that were told


class Writer:
    """Writes up to `most_at_once` texts in an empty batch, while `most_waiting` wait, until it is closed.

    `deliver` takes the events of a step, on the writer's thread, and sees to it that each is told.
    """

    def __init__(
        self, batch: Batch, deliver: Callable[[Sequence[tuple[Job, Event]]], None], *, most_at_once: int,
        most_waiting: int,
    ) -> None:  # fmt: skip
        self._batch, self._deliver = batch, deliver
        self._most_at_once, self._most_waiting = most_at_once, most_waiting
        self._waiting: deque[Job] = deque()
        self._lanes: dict[Lane, Job] = {}
        self._changed = threading.Condition()
        self._stopping = False  # whether nothing is taken in any more
        self._until = float("inf")  # when texts that are not finished are given up
        self._thread = threading.Thread(target=self._run, name="foredraft-writer", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Texts in the batch."""
        return len(self._lanes)

    @property
    def waiting(self) -> int:
        """Texts that wait for their turn."""
        return len(self._waiting)

    @property
    def memory_use(self) -> float:
        """The share of the memory for keys and values that is taken, 0 to 1."""
        return self._batch.memory_use

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take in texts, all of them or none; raise BusyError where too many wait already, or the writer is closing."""
        with self._changed:
            self.check_room(len(jobs))
            self._waiting.extend(jobs)
            self._changed.notify()

    def check_room(self, count: int) -> None:
        """Refuse `count` more texts where `submit` would, with its errors."""
        if self._stopping:
            raise StoppingError("The server is stopping; try again later.")
        if self.running + self.waiting + count > self._most_at_once + self._most_waiting:
            raise BusyError(
                f"{self.running} texts are being written and {self.waiting} wait; {count} more are too many. Try again "
                "later."
            )

    def cancel(self, job: Job) -> None:
        """Let a text go before its next step; nothing more is told of it."""
        with self._changed:
            job.cancelled = True
            with suppress(ValueError):  # it does not wait
                self._waiting.remove(job)
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Take nothing more in, finish what was taken in, and after `seconds` give up the rest, which is told."""
        with self._changed:
            self._stopping = True
            self._until = time.monotonic() + seconds
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._lanes and not self._stopping:
                    self._changed.wait()
                if not self._waiting and not self._lanes:
                    return
            if time.monotonic() > self._until:
                events = self._give_up(StoppingError("The server is stopping, and the text was not finished."))
            else:
                events = self._admit() + self._step()
            if events:
                self._deliver(events)

    def _admit(self) -> list[tuple[Job, Event]]:
        """Let cancelled texts go and waiting ones join; return what is to be told of those that cannot be written."""
        for lane in [lane for lane, job in self._lanes.items() if job.cancelled]:
            self._batch.leave(lane)
            del self._lanes[lane]
        refused = []
        while len(self._lanes) < self._most_at_once:
            with self._changed:
                if not self._waiting:
                    break
                job = self._waiting.popleft()
            try:
                self._lanes[self._batch.join(job.prepared)] = job
            except Exception as error:  # noqa: BLE001  # whatever it is, the other texts are to be written
                if isinstance(error, OutOfMemoryError) and self._lanes:  # there will be room when one of them has ended
                    with self._changed:
                        if not job.cancelled:
                            self._waiting.appendleft(job)
                    break
                refused.append((job, Event(failure=error)))
            else:
                job.started = time.monotonic()
        return refused

    def _step(self) -> list[tuple[Job, Event]]:
        if not self._lanes:
            return []
        try:
            lanes = self._batch.step()
        except Exception as error:  # noqa: BLE001  # whatever it is, later requests are to be answered
            return self._give_up(ForedraftError(f"A step failed ({told(error)}); the texts of its batch are lost."))
        events = []
        for lane in lanes:
            job = self._lanes[lane]
            records = tuple(lane.records[job.steps :])
            job.steps = len(lane.records)
            events.append((job, Event(records, lane.seq.finish, lane.failure)))
            if lane.ended:
                del self._lanes[lane]
        return events

    def _give_up(self, error: Exception) -> list[tuple[Job, Event]]:
        """Let every text go, and return what is to be told of it."""
        with self._changed:
            jobs = [*self._lanes.values(), *self._waiting]
            self._waiting.clear()
        for lane in self._lanes:
            if lane in self._batch:
                self._batch.leave(lane)
        self._lanes.clear()
        return [(job, Event(failure=error)) for job in jobs]
