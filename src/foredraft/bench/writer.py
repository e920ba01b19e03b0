"""A method made ready to write: build its drafter once, then time a text and count what became of its drafts.

A text is written a slice at a time, so that several methods can write the same text by turns: what the machine does
meanwhile, faster in one second and slower in the next, then happens to all of them alike. Knows the generator's surface
and the clock. Does not know cells, tasks or whose turn it is.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from foredraft.api import Generator
from foredraft.bench.cell import Writing
from foredraft.bench.drafts import DraftCounts, Guesses, RecordedDrafter
from foredraft.bench.method import BASE, PEER, Method, attach, use
from foredraft.bench.peer import prepared_peer
from foredraft.bench.replay import replay_steps
from foredraft.contracts import CostCurve, Drafter, Learner, StepRecord, TokenIds
from foredraft.control import StepCosts
from foredraft.errors import ForedraftWarning
from foredraft.generation import Generation

_TAUGHT_NODES = 16
_SLICE = 16  # tokens: the machine's pace lasts longer than writing them takes, and the caches are warm for most of them
_STALL = 5.0
"""A pass of n rows takes a known time; what it takes beyond this many times that, the machine was held up."""


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


@dataclass(frozen=True, slots=True)
class Begun:
    """A text of which nothing is written yet.

    Attributes:
        go_on: writes the next slice; returns whether there is more.
        written: what it came to, once there is no more.
    """

    go_on: Callable[[], bool]
    written: Callable[[], Written]


Earlier = Sequence[tuple[TokenIds, TokenIds]]
"""Texts that a warm drafter has read: prompt ids and output ids, int64[n] each."""

Begin = Callable[[Any, Mapping[str, Any], Earlier], Begun]
"""Takes a prompt, generation arguments, and what a warm drafter has read before."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A method whose drafter is built.

    Attributes:
        begin: begins and times a text; what the drafter and the control learn goes on from text to text.
        forget: makes the next text the first one.
    """

    begin: Begin
    forget: Callable[[], None]


def make_ready(generator: Generator, method: Method) -> Ready:
    """Build what the method needs to write.

    A drafter that raises while it writes is the caller's to see, other than in `Generator.generate`. Where passes are
    recordings, which are made over one sequence's store at a time, and for the peer, a text is one slice.

    Raises:
        UsageError: an unknown name, option or value.
        StoreError: a table that is damaged or belongs to another tokenizer.
    """
    if method.name == PEER:
        return _by_peer(generator, method)
    use(generator, method)
    kept, costs = generator.drafter, StepCosts()  # a process that writes text after text keeps them

    def begin(prompt: Any, arguments: Mapping[str, Any], earlier: Earlier) -> Begun:
        drafter = kept
        if method.memory:
            use(generator, method)  # a fresh drafter, which has read nothing
            drafter = generator.drafter
            if method.memory == "warm":
                _teach(drafter, earlier, generator.target.vocabulary)
        recorded = None if method.name == BASE else RecordedDrafter(drafter)
        attach(generator, method, recorded or drafter, costs)
        return _by_slices(generator, recorded, prompt, arguments)

    def forget() -> None:
        nonlocal costs
        costs = StepCosts()
        if isinstance(kept, Learner):
            kept.forget()

    return Ready(begin, forget)


def _by_peer(generator: Generator, method: Method) -> Ready:
    """Return what writes a text with transformers' `generate`, in one slice."""
    peer = prepared_peer(generator, method)

    def begin(prompt: Any, arguments: Mapping[str, Any], earlier: Earlier) -> Begun:  # noqa: ARG001  # it remembers nothing
        writings: list[Writing] = []

        def go_on() -> bool:
            writings.append(peer(prompt, arguments))
            return False

        return Begun(go_on, lambda: Written(writings[-1], None, tuple))

    return Ready(begin, lambda: None)


def _by_slices(
    generator: Generator, recorded: RecordedDrafter | None, prompt: Any, arguments: Mapping[str, Any]
) -> Begun:
    """Begin a text with what is attached to the generator."""
    seconds = 0.0

    @contextmanager
    def timed() -> Iterator[None]:
        nonlocal seconds
        with warnings.catch_warnings():
            warnings.filterwarnings("error", category=ForedraftWarning)  # a drafter that failed is a failed cell
            start = perf_counter()
            yield
            seconds += perf_counter() - start

    with timed():
        run = generator.start(prompt, **arguments)
    steps = run.steps()
    whole = generator.target.recordings is not None

    def go_on() -> bool:
        tokens = 0
        with timed():
            for step in steps:
                tokens += len(step.emitted)
                if tokens >= _SLICE and not whole:
                    return True
        return False

    def written() -> Written:
        with timed():
            result = run.result(generator.tokenizer)
        writing = _writing(result, seconds, generator.cost)
        if recorded is None:
            return Written(writing, None, tuple)
        return Written(writing, recorded.counts(), lambda: recorded.guesses(generator.tokenizer, result))

    return Begun(go_on, written)


def _teach(drafter: Drafter, texts: Earlier, vocabulary: int) -> None:
    """Let a drafter see texts as if the target had written them."""
    for prompt, output in texts:
        for _ in replay_steps(drafter, prompt, output, _TAUGHT_NODES, vocabulary):
            pass


def _writing(result: Generation, seconds: float, cost: CostCurve) -> Writing:
    counts = result.statistics
    stalled = stalled_seconds(result.steps, cost)
    parts = time_split(result.steps)
    return Writing(
        token_ids=result.token_ids,
        prompt_tokens=result.prompt_length,
        steps=counts.steps,
        drafting_steps=counts.drafting_steps,
        drafted=counts.drafted,
        accepted=counts.accepted,
        prefill_seconds=counts.prefill_seconds,
        decode_seconds=counts.decode_seconds - stalled,
        stalled_seconds=stalled,
        total_seconds=seconds,
        parts={**parts, "forward": parts["forward"] - stalled},
    )


def time_split(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return the seconds that steps spent in `draft`, `forward`, `verify`, `commit` and all `other`."""
    named = {
        part: sum(step.nanoseconds[part] for step in steps) / 1e9 for part in ("draft", "forward", "verify", "commit")
    }
    whole = sum(sum(step.nanoseconds.values()) for step in steps) / 1e9
    return {**named, "other": whole - sum(named.values())}


def stalled_seconds(steps: Sequence[StepRecord], cost: CostCurve) -> float:
    """Return the seconds for which passes were held up: what each took beyond several times what it should have.

    What it should have taken is the curve's, times the median of what the text's passes took of it, if that is more: a
    machine that is slow throughout holds nothing up. Fewer than four steps tell nothing.
    """
    if len(steps) < 4:
        return 0.0
    expected = cost.table(1 + max(step.drafted for step in steps))[[1 + step.drafted for step in steps]]
    taken = np.array([step.nanoseconds["forward"] for step in steps], np.float64) / 1e9
    usual = expected * max(1.0, float(np.median(taken / expected)))
    return float(np.where(taken > _STALL * usual, taken - usual, 0.0).sum())
