"""The text of a generation: its result, and the stream of its pieces. Does not depend on how it is written."""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from foredraft.contracts import StepRecord
from foredraft.engine.run import Run
from foredraft.engine.state import FinishReason
from foredraft.engine.statistics import Statistics
from foredraft.options import shown
from foredraft.text import TextStream, continuation


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

    text: str  # the new text, without special tokens; the prompt and it are the text of all ids
    token_ids: tuple[int, ...]  # the new ids, including the end id if one ended the text
    finish_reason: FinishReason | None  # None while the text is unfinished
    prompt_length: int  # in tokens
    seed: int  # the same seed gives the same text with every method
    steps: tuple[StepRecord, ...]
    statistics: Statistics

    def __repr__(self) -> str:
        counts = f"{self.statistics.emitted} tokens in {self.statistics.steps} steps"
        return f"Generation({shown(self.text)}, {counts}, finish_reason={self.finish_reason!r}, seed={self.seed})"


def generation(run: Run, tokenizer: Any) -> Generation:
    """Return the result of a run so far; its finish reason is None while it is unfinished."""
    ids = tuple(token for record in run.records for token in record.emitted)  # `seq` may be ahead after an interrupt
    seq, text = run.seq, continuation(tokenizer, _prompt(run), ids)
    return Generation(text, ids, seq.finish, seq.prompt_length, run.context.seed, tuple(run.records), run.statistics)


class Stream(Iterator[Piece]):
    """An iterator over the pieces of a generation; it can be consumed once, and closed before its end."""

    def __init__(self, run: Run, steps: Generator[StepRecord], tokenizer: Any) -> None:
        self._run, self._steps, self._tokenizer = run, steps, tokenizer
        self._pieces = _written(run, steps, tokenizer)

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """End the text here: its memory is free, and a batch can take the next text."""
        self._steps.close()

    @property
    def generation(self) -> Generation:
        """The result so far; complete once the pieces are exhausted."""
        return generation(self._run, self._tokenizer)


def _written(run: Run, steps: Iterable[StepRecord], tokenizer: Any) -> Iterator[Piece]:
    text = TextStream(tokenizer, _prompt(run))
    for record in steps:
        for token, source in zip(record.emitted, record.sources, strict=True):
            yield Piece(text.push(token), token, source)
    rest = text.finish()
    if rest:
        yield Piece(rest, -1, None)


def _prompt(run: Run) -> list[int]:
    prompt: list[int] = run.seq.view().ids[: run.seq.prompt_length].tolist()
    return prompt
