"""One answer as it grows: from events to pieces of text, without what follows a stop string.

Knows ids, a tokenizer's texts and who drafted them; not the shape in which an answer is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.contracts import Drafter, StepRecord
from foredraft.drafters.prediction import PREDICTION, ChainDrafter
from foredraft.server.processors import Logprobs, TokenLogprobs
from foredraft.server.writer import Event
from foredraft.text import TextStream

_FINISH = {"eos": "stop", "stop": "stop", "length": "length", "window": "length", "memory": "length"}
"""Why a text ended, as OpenAI says it."""

Piece = tuple[str, str | None]
"""A text, and the name of the drafter that guessed it, or None."""


@dataclass(slots=True)
class Delta:
    """What an answer grew by: text, log-probabilities if asked for, and why it ended, as OpenAI says it."""

    pieces: list[Piece] = field(default_factory=list)
    tokens: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None

    @property
    def text(self) -> str:
        """The text."""
        return "".join(text for text, _ in self.pieces)

    def extend(self, later: "Delta") -> None:
        """Add what came after."""
        self.pieces += later.pieces
        self.tokens += later.tokens
        self.finish = later.finish


class StopFilter:
    """Lets text through up to a stop string, then `found`, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._stops = tuple(stops)
        self._held: list[Piece] = []

    def push(self, pieces: list[Piece], *, last: bool = False) -> list[Piece]:
        """Take pieces in and return those that can be shown; with `last`, all that is left."""
        if not self._stops:
            return pieces
        self._held += pieces
        if self.found is not None:
            return []
        text = self.held
        places = [(text.find(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if places:
            free, _, self.found = min(places)
        else:
            free = len(text) if last else len(text) - self._beginning(text)
        shown, self._held = _split(self._held, free)
        return shown

    @property
    def held(self) -> str:
        """What was not let through."""
        return "".join(piece for piece, _ in self._held)

    def _beginning(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)


class Choice:
    """One answer of a request: its records so far, and why it ended, or None."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], logprobs: Logprobs | None) -> None:
        self.stops = StopFilter(stops)
        self.records: list[StepRecord] = []
        self.finish: str | None = None
        self._stream, self._logprobs = TextStream(tokenizer), logprobs
        self._predicting: ChainDrafter | None = None

    def take(self, event: Event) -> Delta:
        """Return what an event adds, or raise what ended the text instead."""
        if event.failure is not None:
            raise event.failure
        self.records += event.records
        delta, pieces = Delta(), []
        for record in event.records:
            for token, source in zip(record.emitted, record.sources, strict=True):
                pieces.append((self._stream.push(token), source))
                if self._logprobs is not None:
                    delta.tokens.append(self._logprobs.take(token))
        if event.finish is not None:
            pieces.append((self._stream.finish(), None))
            self.finish = delta.finish = _FINISH[event.finish]
        delta.pieces = self.stops.push([piece for piece in pieces if piece[0]], last=event.finish is not None)
        return delta

    def watch(self, drafter: Drafter) -> None:
        """Remember the drafter if it drafts from a prediction."""
        if isinstance(drafter, ChainDrafter):
            self._predicting = drafter

    @property
    def predicted(self) -> tuple[int, int]:
        """How many tokens of a prediction were written, and how many were drafted from it and refused."""
        if self._predicting is None:
            return 0, 0
        accepted = sum(source == PREDICTION for record in self.records for source in record.sources)
        return accepted, max(self._predicting.drafted - accepted, 0)


def _split(pieces: list[Piece], at: int) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces before a character, and those from it on."""
    before: list[Piece] = []
    after: list[Piece] = []
    for text, source in pieces:
        if text[:at]:
            before.append((text[:at], source))
        if text[at:]:
            after.append((text[at:], source))
        at = max(at - len(text), 0)
    return before, after
