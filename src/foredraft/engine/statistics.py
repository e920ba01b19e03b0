"""Statistics of a generation's steps, from their records alone.

Only emitted tokens count: none after an end id, a stop string or the limit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from foredraft.contracts import StepRecord


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of one generation, or of several added up, and their rates."""

    emitted: int  # tokens
    steps: int  # forward passes of the target after prefill
    drafting_steps: int  # steps that drafted something
    drafted: int  # nodes verified
    accepted: int  # drafted tokens that were emitted
    prefill_seconds: float  # time before the first step
    decode_seconds: float  # time in steps

    @property
    def tokens_per_target_step(self) -> float:
        """Emitted tokens / all target forwards after prefill."""
        return _ratio(self.emitted, self.steps)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / steps that drafted something (vLLM's definition)."""
        return 1 + _ratio(self.accepted, self.drafting_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted tokens; EESD's v_d."""
        return _ratio(self.accepted, self.drafted)

    @property
    def drafted_share(self) -> float:
        """Accepted / emitted tokens; EESD's r_d."""
        return _ratio(self.accepted, self.emitted)

    @property
    def harmonic_mean(self) -> float:
        """2 v_d r_d / (v_d + r_d), EESD's HM, as a fraction; 0 if nothing was accepted."""
        v_d, r_d = self.draft_acceptance_rate, self.drafted_share
        return _ratio(2 * v_d * r_d, v_d + r_d)

    @property
    def decode_seconds_per_token(self) -> float:
        """Time after prefill / emitted tokens."""
        return _ratio(self.decode_seconds, self.emitted)

    def as_dict(self) -> dict[str, float]:
        """Return the counts and the rates by name, for JSON."""
        rates = [name for name, member in vars(Statistics).items() if isinstance(member, property)]
        return asdict(self) | {name: getattr(self, name) for name in rates}


def summarize(records: Iterable[StepRecord], prefill_seconds: float) -> Statistics:
    """Add up the steps of one generation."""
    records = list(records)
    return Statistics(
        emitted=sum(len(record.emitted) for record in records),
        steps=len(records),
        drafting_steps=sum(record.drafted > 0 for record in records),
        drafted=sum(record.drafted for record in records),
        accepted=sum(record.accepted for record in records),
        prefill_seconds=prefill_seconds,
        decode_seconds=sum(sum(record.nanoseconds.values()) for record in records) / 1e9,
    )


def add_up(parts: Sequence[Statistics]) -> Statistics:
    """Return the summed counts of several generations, for micro averages."""
    return Statistics(**{each.name: sum(getattr(part, each.name) for part in parts) for each in fields(Statistics)})


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
