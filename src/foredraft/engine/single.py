"""Decode one sequence: prefill, then steps until it ends.

Knows ids and arrays only.
"""

from collections.abc import Iterator
from time import perf_counter_ns

from foredraft.contracts import Control, DraftContext, Drafter, StepRecord, Target
from foredraft.engine.state import SequenceState
from foredraft.engine.step import step


def prefill(seq: SequenceState, target: Target) -> int:
    """Put the prompt, all but its last token, into the cache; return the nanoseconds it took."""
    start = perf_counter_ns()
    target.prefill(seq.view().ids[: seq.length - 1].copy(), seq.cache)
    return perf_counter_ns() - start


def decode(
    seq: SequenceState, drafter: Drafter, control: Control, target: Target, context: DraftContext
) -> Iterator[StepRecord]:
    """Yield the records of steps until `seq` ends; the sequence must be prefilled.

    The drafting is closed whatever happens: at the end, on an error, or when the iterator is dropped.
    """
    drafting = drafter.open(context)
    names = tuple(drafter.source_names)
    try:
        while seq.finish is None:
            yield step(seq, drafting, control, target, drafter.needs, names)
    finally:
        drafting.close()
