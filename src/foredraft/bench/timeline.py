"""When each part of each step ran, and the file of that which trace viewers open.

Knows step records and the clock. The parts of a step lie one behind the other and end when the step is handed over;
what passes between two steps is Python's and the caller's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from foredraft.api import Generator
from foredraft.contracts import StepRecord
from foredraft.sampling import SamplingOptions

_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step and when it was.

    Attributes:
        end: nanoseconds on the performance counter, when it was handed over.
        between: nanoseconds since the step before it that belong to no part; 0 for a text's first step.
        record: the step.
    """

    end: int
    between: int
    record: StepRecord


def timed_steps(generator: Generator, prompt: str, tokens: int, seed: int) -> list[TimedStep]:
    """Write `tokens` tokens at temperature 0.7, whatever ends a text, and return the steps it took."""
    sampling = SamplingOptions(do_sample=True, temperature=_TEMPERATURE, seed=seed)
    run = generator.begin(generator.encode(prompt), sampling, max_new_tokens=tokens)
    steps: list[TimedStep] = []
    for record in run.steps():
        end = perf_counter_ns()
        between = end - steps[-1].end - sum(record.nanoseconds.values()) if steps else 0
        steps.append(TimedStep(end, between, record))
    return steps


def chrome_trace(lanes: Mapping[str, Sequence[TimedStep]]) -> bytes:
    """Return a trace in the Chrome format (JSON; microseconds), a lane for each name, a slice for each part.

    Viewers: chrome://tracing, https://ui.perfetto.dev. Format: "Trace Event Format", Google, events of phase X.
    """
    events: list[dict[str, object]] = []
    for lane, (name, steps) in enumerate(lanes.items()):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": name}})
        for number, step in enumerate(steps):
            at = step.end - sum(step.record.nanoseconds.values())
            told = {"step": number, "drafted": step.record.drafted, "emitted": len(step.record.emitted)}
            for part, nanoseconds in step.record.nanoseconds.items():
                slot = {"pid": 0, "tid": lane, "ts": at / 1e3, "dur": nanoseconds / 1e3}
                events.append({"ph": "X", "name": part, **slot, "args": told})
                at += nanoseconds
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
