"""One generation, decoded alone or in a batch. Does not depend on how models run, or on what the ids mean."""

import warnings
from collections.abc import Generator
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from foredraft.contracts import Control, DraftContext, Drafter, Drafting, StepRecord, Target
from foredraft.engine.state import SequenceState
from foredraft.engine.statistics import Statistics, summarize
from foredraft.engine.step import step
from foredraft.errors import ForedraftWarning, OutOfMemoryError


@dataclass(slots=True, eq=False)
class Run:
    """A text to be written: what decodes it, and what happened so far.

    Either `steps` is iterated over, or the run joins a `Batch`.
    """

    seq: SequenceState
    drafter: Drafter
    control: Control
    context: DraftContext  # for the drafter
    target: Target
    shared: bool = False  # whether a batch may use its own control instead, one for all of its texts
    owner: str = ""  # in a batch: keys and values are reused among the texts of one owner only
    drafting: Drafting = field(init=False, repr=False)  # from `open` to `close`
    records: list[StepRecord] = field(default_factory=list)
    prefill_seconds: float = 0.0  # in a batch, from joining to the first step
    cached_tokens: int | None = None  # of the prompt, that a batch did not compute again; None if not known yet
    failure: Exception | None = None  # the error that ended it in a batch

    @property
    def ended(self) -> bool:
        """Whether no step follows."""
        return self.seq.finish is not None or self.failure is not None

    @property
    def statistics(self) -> Statistics:
        """The sums over the steps so far."""
        return summarize(self.records, self.prefill_seconds)

    def open(self, cache: Any) -> None:
        """Begin with a KV cache of the target."""
        self.drafting = self.drafter.open(self.context)
        self.seq.cache = cache

    def prefill(self) -> None:
        """Begin with a new cache that holds the prompt, except for its last token."""
        cache, start = self.target.new_cache(), perf_counter_ns()
        states = self.target.prefill(self.seq.view().ids[:-1].copy(), cache, self.drafter.needs.hidden)
        self.seq.keep_states(states, self.seq.length - 1)
        self.prefill_seconds = (perf_counter_ns() - start) / 1e9
        self.open(cache)

    def steps(self) -> Generator[StepRecord]:
        """Prefill, and yield the records of steps until the text ends; the drafting is closed in any case.

        If memory runs out after the first token, the text ends with the reason "memory" and a warning.
        """
        self.prefill()
        seq = self.seq
        try:
            while seq.finish is None:
                try:
                    record = step(self)
                except OutOfMemoryError as error:
                    if not len(seq.emitted):
                        raise
                    warnings.warn(f"{error} The text ends here.", ForedraftWarning, stacklevel=2)
                    seq.finish = "memory"
                    return
                self.records.append(record)
                yield record
        finally:
            self.close()

    def close(self) -> None:
        """End the drafting; whoever keeps the run keeps neither its state nor keys and values."""
        self.drafting.close()
        del self.drafting
        self.seq.cache = None
