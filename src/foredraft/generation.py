"""One generation: the run that writes it, the stream that shows it as it grows, and what came of it.

Knows a sequence, a drafter, a control and a target that were put together for it, and how ids become text.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foredraft.contracts import StepRecord, Target
from foredraft.engine.single import decode as decode_steps
from foredraft.engine.single import prefill
from foredraft.engine.state import FinishReason, Prepared, SequenceState
from foredraft.engine.statistics import Statistics, summarize
from foredraft.text import TextStream, decode

_SHOWN = 60  # characters of a text in its repr


@dataclass(frozen=True, slots=True)
class Piece:
    """One emitted token of a stream.

    Attributes:
        text: the text that it completes; may be empty, as a character can span tokens. Joined, pieces are the text.
        token_id: the token; -1 for a last piece that only releases text held back.
        drafted_by: the drafter that guessed it, or None for the target's own.
    """

    text: str
    token_id: int
    drafted_by: str | None


@dataclass(frozen=True, slots=True)
class Generation:
    """What was written, and how.

    Attributes:
        text: the new text, without special tokens.
        token_ids: the new ids, with the end id if one ended the text.
        finish_reason: "eos", "stop", "length", "window" where the model's window ended the text, "memory" where there
            was none left; None while the text is not finished.
        prompt_length: ids of the prompt.
        seed: of the sampling; the same seed gives the same text with any method, under matched verification.
        steps: a record of every step.
        statistics: what they add up to.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_length: int
    seed: int
    steps: tuple[StepRecord, ...]
    statistics: Statistics

    def __repr__(self) -> str:
        """Return the text's beginning and its counts; ids and steps would fill pages."""
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        counts = f"{self.statistics.emitted} tokens in {self.statistics.steps} steps"
        return f"Generation({text!r}, {counts}, finish_reason={self.finish_reason!r}, seed={self.seed})"


def generation(
    seq: SequenceState, records: Sequence[StepRecord], prefill_seconds: float, seed: int, tokenizer: Any
) -> Generation:
    """Return what has been written of a sequence so far; the finish reason is None while it is unfinished."""
    ids = _emitted(records)
    return Generation(
        text=decode(tokenizer, ids),
        token_ids=ids,
        finish_reason=seq.finish,
        prompt_length=seq.prompt_length,
        seed=seed,
        steps=tuple(records),
        statistics=summarize(records, prefill_seconds),
    )


class Run:
    """One generation in progress: the sequence, its records, and the time before the first step."""

    def __init__(self, prepared: Prepared, target: Target) -> None:
        seq = prepared.begin(target.new_cache())
        context = replace(prepared.context, cache=seq.cache)
        self._parts = (seq, prepared.drafter, prepared.control, target, context)
        self._records: list[StepRecord] = []
        self._prefill_seconds = 0.0
        self._seed = prepared.context.seed

    def steps(self) -> Iterator[StepRecord]:
        """Prefill, then yield each step's record."""
        seq, _, _, target, _ = self._parts
        self._prefill_seconds = prefill(seq, target) / 1e9
        for record in decode_steps(*self._parts):
            self._records.append(record)
            yield record

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids written so far."""
        return _emitted(self._records)

    @property
    def statistics(self) -> Statistics:
        """What the steps so far add up to."""
        return summarize(self._records, self._prefill_seconds)

    def result(self, tokenizer: Any) -> Generation:
        """Return what has been written so far; the finish reason is None while it is unfinished."""
        return generation(self._parts[0], self._records, self._prefill_seconds, self._seed, tokenizer)


def _emitted(records: Sequence[StepRecord]) -> tuple[int, ...]:
    """Return the ids of steps; not the sequence's, as an interrupt can fall between a step's commit and its record."""
    return tuple(token for record in records for token in record.emitted)


class Stream:
    """An iterator over the pieces of a generation."""

    def __init__(self, run: Run, tokenizer: Any) -> None:
        self._run = run
        self._tokenizer = tokenizer
        self._pieces = pieces(run.steps(), tokenizer)

    def __iter__(self) -> Iterator[Piece]:
        """Return the pieces; there is one pass."""
        return self._pieces

    def __next__(self) -> Piece:
        """Return the next piece."""
        return next(self._pieces)

    @property
    def generation(self) -> Generation:
        """What has been written so far; complete once the pieces are exhausted."""
        return self._run.result(self._tokenizer)


def pieces(records: Iterable[StepRecord], tokenizer: Any) -> Iterator[Piece]:
    """Yield the pieces of a text as its steps come."""
    text = TextStream(tokenizer)
    for record in records:
        for token, source in zip(record.emitted, record.sources, strict=True):
            yield Piece(text.push(token), token, source)
    rest = text.finish()
    if rest:
        yield Piece(rest, -1, None)
