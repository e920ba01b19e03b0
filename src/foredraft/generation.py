"""One generation: the run that performs it, the stream of its pieces, and its result.

Runs the engine on a prepared sequence and decodes the ids. Does not depend on how drafters and models are loaded.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from foredraft.contracts import StepRecord, Target
from foredraft.engine.batch import Lane
from foredraft.engine.single import decode as decode_steps
from foredraft.engine.single import prefill
from foredraft.engine.state import FinishReason, Prepared
from foredraft.engine.statistics import Statistics, summarize
from foredraft.text import TextStream, decode

_SHOWN = 60  # characters of a text in its repr


@dataclass(frozen=True, slots=True)
class Piece:
    """One emitted token of a stream."""

    text: str  # the text that the token completes; may be empty, because a character can span tokens
    token_id: int  # -1 for a last piece that only releases text held back
    drafted_by: str | None  # the source that drafted it, or None if the target chose it without a draft


@dataclass(frozen=True, slots=True)
class Generation:
    """A completion and its statistics.

    The finish reason is "eos", "stop", "length", "window" (the model's window is full) or "memory" (none is left).
    """

    text: str  # the new text, without special tokens
    token_ids: tuple[int, ...]  # the new ids, including the end id if one ended the text
    finish_reason: FinishReason | None  # None while the text is unfinished
    prompt_length: int  # in tokens
    seed: int  # under matched verification, the same seed gives the same text with every method
    steps: tuple[StepRecord, ...]
    statistics: Statistics

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        counts = f"{self.statistics.emitted} tokens in {self.statistics.steps} steps"
        return f"Generation({text!r}, {counts}, finish_reason={self.finish_reason!r}, seed={self.seed})"


class Run:
    """One generation in progress: the sequence, its step records, and the prefill time."""

    def __init__(self, prepared: Prepared, target: Target) -> None:
        self._prepared, self._target = prepared, target
        self.seq = prepared.begin(target.new_cache())
        self.seed = prepared.context.seed
        self.records: list[StepRecord] = []
        self.prefill_seconds = 0.0

    def steps(self) -> Iterator[StepRecord]:
        """Prefill, then yield each step's record."""
        self.prefill_seconds = prefill(self.seq, self._target) / 1e9
        drafter, control = self._prepared.drafter, self._prepared.control
        context = replace(self._prepared.context, cache=self.seq.cache)
        for record in decode_steps(self.seq, drafter, control, self._target, context):
            self.records.append(record)
            yield record

    @property
    def statistics(self) -> Statistics:
        """The sums over the steps so far."""
        return summarize(self.records, self.prefill_seconds)


def generation(text: Run | Lane, tokenizer: Any) -> Generation:
    """Return the result of a text so far; its finish reason is None while it is unfinished."""
    ids = tuple(token for record in text.records for token in record.emitted)  # `seq` may be ahead after an interrupt
    statistics = summarize(text.records, text.prefill_seconds)
    return Generation(
        decode(tokenizer, ids), ids, text.seq.finish, text.seq.prompt_length, text.seed, tuple(text.records), statistics
    )


class Stream:
    """An iterator over the pieces of a generation; it can be consumed once."""

    def __init__(self, run: Run, tokenizer: Any) -> None:
        self._run, self._tokenizer = run, tokenizer
        self._pieces = pieces(run.steps(), tokenizer)

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def generation(self) -> Generation:
        """The result so far; complete once the pieces are exhausted."""
        return generation(self._run, self._tokenizer)


def pieces(records: Iterable[StepRecord], tokenizer: Any) -> Iterator[Piece]:
    """Yield the pieces of a text, step by step."""
    text = TextStream(tokenizer)
    for record in records:
        for token, source in zip(record.emitted, record.sources, strict=True):
            yield Piece(text.push(token), token, source)
    rest = text.finish()
    if rest:
        yield Piece(rest, -1, None)
