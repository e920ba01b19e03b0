"""A method made ready to write: build its drafter once, then time a text and count what became of its drafts.

Knows the generator's surface and the clock. Does not know cells, tasks or the order of runs.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from foredraft.api import Generator
from foredraft.bench.cell import Writing
from foredraft.bench.method import BASE, PEER, Method, attach, use
from foredraft.bench.peer import prepared_peer
from foredraft.bench.recording import DraftCounts, Guesses, RecordedDrafter
from foredraft.bench.replay import replay_steps
from foredraft.contracts import CostCurve, Drafter, StepRecord, TokenIds
from foredraft.control import Beside
from foredraft.errors import ForedraftWarning
from foredraft.generation import Generation

_TAUGHT_NODES = 16


@dataclass(frozen=True, slots=True)
class Written:
    """A timed text.

    Attributes:
        writing: what it took.
        counts: what became of its drafts; None where nothing could be noted.
        steps: tells every step of it as text.
    """

    writing: Writing
    counts: DraftCounts | None
    steps: Callable[[], tuple[Guesses, ...]]


Earlier = Sequence[tuple[TokenIds, TokenIds]]
"""Texts that a warm drafter has read: prompt ids and output ids, int64[n] each."""

Write = Callable[[Any, Mapping[str, Any], Earlier], Written]
"""Takes a prompt, generation arguments, and what a warm drafter has read before."""


def make_ready(generator: Generator, method: Method) -> Write:
    """Build what the method needs; return what writes and times a text with it.

    A drafter that raises while it writes is the caller's to see, other than in `Generator.generate`.

    Raises:
        UsageError: an unknown name, option or value.
        StoreError: a table that is damaged or belongs to another tokenizer.
    """
    if method.name == PEER:
        peer = prepared_peer(generator, method)
        return lambda prompt, arguments, earlier: Written(peer(prompt, arguments), None, tuple)  # noqa: ARG005  # it remembers nothing
    use(generator, method)
    kept, beside = generator.drafter, Beside()  # a process that writes text after text keeps them

    def write(prompt: Any, arguments: Mapping[str, Any], earlier: Earlier) -> Written:
        drafter = kept
        if method.memory:
            use(generator, method)  # a fresh drafter, which has read nothing
            drafter = generator.drafter
            if method.memory == "warm":
                _teach(drafter, earlier, generator.target.vocabulary)
        recorded = None if method.name == BASE else RecordedDrafter(drafter)
        attach(generator, method, recorded or drafter, beside)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", category=ForedraftWarning)  # a drafter that failed is a failed cell
            start = perf_counter()
            result = generator.generate(prompt, **arguments)
            seconds = perf_counter() - start
        writing = _writing(result, seconds, generator.cost)
        if recorded is None:
            return Written(writing, None, tuple)
        return Written(writing, recorded.counts(), lambda: recorded.guesses(generator.tokenizer))

    return write


def _teach(drafter: Drafter, texts: Earlier, vocabulary: int) -> None:
    """Let a drafter see texts as if the target had written them."""
    for prompt, output in texts:
        for _ in replay_steps(drafter, prompt, output, _TAUGHT_NODES, vocabulary):
            pass


def _writing(result: Generation, seconds: float, cost: CostCurve) -> Writing:
    counts = result.statistics
    return Writing(
        token_ids=result.token_ids,
        prompt_tokens=result.prompt_length,
        steps=counts.steps,
        drafting_steps=counts.drafting_steps,
        drafted=counts.drafted,
        accepted=counts.accepted,
        prefill_seconds=counts.prefill_seconds,
        decode_seconds=counts.decode_seconds,
        total_seconds=seconds,
        parts=time_split(result.steps),
        step_spread=_spread(result.steps),
        slowness=_slowness(result.steps, cost),
    )


def time_split(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return the seconds that steps spent in `draft`, `forward`, `verify`, `commit` and all `other`."""
    named = {
        part: sum(step.nanoseconds[part] for step in steps) / 1e9 for part in ("draft", "forward", "verify", "commit")
    }
    whole = sum(sum(step.nanoseconds.values()) for step in steps) / 1e9
    return {**named, "other": whole - sum(named.values())}


def _spread(steps: Sequence[StepRecord]) -> float:
    """Return the interquartile range of the forwards' times over their median; 0 for fewer than four."""
    times = np.array([step.nanoseconds["forward"] for step in steps], np.float64)
    if len(times) < 4:
        return 0.0
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75])
    return float((high - low) / middle)


def _slowness(steps: Sequence[StepRecord], cost: CostCurve) -> float:
    """Return the median of the forwards' times over those of the cost curve at their rows; 0 for fewer than four."""
    if len(steps) < 4:
        return 0.0
    expected = cost.table(1 + max(step.drafted for step in steps))
    return float(np.median([step.nanoseconds["forward"] / 1e9 / expected[1 + step.drafted] for step in steps]))
