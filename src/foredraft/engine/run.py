"""One text that is being written. Does not depend on how models run, or on what the ids mean."""

from dataclasses import dataclass, field
from typing import Any

from foredraft.contracts import Control, DraftContext, Drafter, Drafting, StepRecord, Target
from foredraft.engine.state import SequenceState
from foredraft.engine.statistics import Statistics, summarize


@dataclass(slots=True, eq=False)
class Run:
    """A text to be written in a `Batch`, alone or with others: what decodes it, and what happened so far."""

    seq: SequenceState
    drafter: Drafter
    control: Control
    context: DraftContext  # for the drafter
    target: Target
    shared: bool = False  # whether a batch may use its own control instead, one for all of its texts
    owner: str = ""  # keys and values are reused among the texts of one owner only
    drafting: Drafting = field(init=False, repr=False)  # from `open` to `close`
    records: list[StepRecord] = field(default_factory=list)
    prefill_seconds: float = 0.0  # from joining the batch to the first step
    cached_tokens: int | None = None  # of the prompt, that were not computed again; None if not known yet
    failure: Exception | None = None  # the error that ended it

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

    def close(self) -> None:
        """End the drafting; whoever keeps the run keeps neither its state nor keys and values."""
        self.drafting.close()
        del self.drafting
        self.seq.cache = None
