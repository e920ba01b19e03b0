"""Decode one sequence: prefill, then steps until it ends. Does not depend on models or text."""

import warnings
from collections.abc import Iterator
from time import perf_counter_ns

from foredraft.contracts import Control, DraftContext, Drafter, StepRecord, Target
from foredraft.engine.state import SequenceState
from foredraft.engine.step import step
from foredraft.errors import ForedraftWarning, OutOfMemoryError


def prefill(seq: SequenceState, target: Target) -> int:
    """Put the prompt without its last token into the cache; return the nanoseconds it took."""
    start = perf_counter_ns()
    target.prefill(seq.view().ids[: seq.length - 1].copy(), seq.cache)
    return perf_counter_ns() - start


def decode(
    seq: SequenceState, drafter: Drafter, control: Control, target: Target, context: DraftContext
) -> Iterator[StepRecord]:
    """Yield the records of steps until the prefilled `seq` ends; the drafting is closed in any case.

    If memory runs out after the first token, the text ends with the reason "memory" and a warning.
    """
    drafting = drafter.open(context)
    try:
        while seq.finish is None:
            try:
                record = step(seq, drafter, drafting, control, target)
            except OutOfMemoryError as error:
                if not len(seq.emitted):
                    raise
                warnings.warn(f"{error} The text ends here.", ForedraftWarning, stacklevel=2)
                seq.finish = "memory"
                return
            yield record
    finally:
        drafting.close()
