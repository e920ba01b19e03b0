"""One answer of a request: converts events to pieces of text, and cuts the text at a stop string.

Does not depend on the format in which an answer is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.contracts import StepRecord
from foredraft.drafters.prediction import ChainDrafter
from foredraft.server.processors import Logprobs, TokenLogprobs
from foredraft.server.writer import Event
from foredraft.text import TextStream

Piece = tuple[str, str | None]  # a text, and the name of the source that drafted it, or None


@dataclass(slots=True)
class Delta:
    """An increment of an answer: text, log-probabilities if requested, and OpenAI's finish reason."""

    pieces: list[Piece] = field(default_factory=list)
    tokens: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    def extend(self, later: "Delta") -> None:
        self.pieces += later.pieces
        self.tokens += later.tokens
        self.finish = later.finish


class StopFilter:
    """Passes text up to the first stop string, then stored in `found`, and holds back a possible beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._stops = stops
        self._held: list[Piece] = []

    def push(self, pieces: list[Piece], *, last: bool = False) -> list[Piece]:
        """Add pieces and return those that can be sent; `last` releases the text held back."""
        self._held += pieces
        if self.found is not None:
            return []
        text = self.held
        places = [(text.find(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if places:
            passed, _, self.found = min(places)
        else:
            lengths = ((stop, n) for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)))
            begun = (n for stop, n in lengths if text.endswith(stop[:n]))
            passed = len(text) if last else len(text) - max(begun, default=0)
        pieces, self._held = _split(self._held, passed)
        return pieces

    @property
    def held(self) -> str:
        return "".join(piece for piece, _ in self._held)


class Choice:
    """One answer of a request."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], logprobs: Logprobs | None) -> None:
        self.stops = StopFilter(stops)
        self.records: list[StepRecord] = []  # its steps so far
        self.finish: str | None = None  # OpenAI's finish reason
        self.predicting: ChainDrafter | None = None  # drafts from a prediction, if there is one
        self._stream, self._logprobs = TextStream(tokenizer), logprobs

    def take(self, event: Event) -> Delta:
        """Return the increment of an event, or raise its failure."""
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
            self.finish = delta.finish = "stop" if event.finish in ("eos", "stop") else "length"
        delta.pieces = self.stops.push([piece for piece in pieces if piece[0]], last=event.finish is not None)
        return delta


def _split(pieces: list[Piece], at: int) -> tuple[list[Piece], list[Piece]]:
    before: list[Piece] = []
    after: list[Piece] = []
    for text, source in pieces:
        for part, side in ((text[:at], before), (text[at:], after)):
            if part:
                side.append((part, source))
        at = max(at - len(text), 0)
    return before, after
