"""One answer as it grows: from events to pieces of text, without what follows a stop string.

Knows ids, a tokenizer's texts and who drafted them; not the shape in which an answer is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from foredraft.contracts import Drafter, StepRecord
from foredraft.drafters.prediction import PREDICTION, ForetoldDrafter
from foredraft.server.processors import Logprobs, TokenLogprobs
from foredraft.server.writer import Event
from foredraft.text import TextStream

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "window": "length", "memory": "length"}
"""Why a text ended, as OpenAI says it."""


Piece = tuple[str, str | None]
"""A text, and the name of the drafter that guessed it, or None."""


class Told(NamedTuple):
    """A token of an answer, and its log-probabilities where they were asked for."""

    token_id: int
    logprobs: TokenLogprobs


class Delta(NamedTuple):
    """What an answer grew by.

    Attributes:
        pieces: texts, each with the name of the drafter that guessed it, or None.
        tokens: with their log-probabilities; empty where those were not asked for.
        finish: why it ended, as OpenAI says it; None while it goes on.
    """

    pieces: list[Piece]
    tokens: list[Told]
    finish: str | None

    @property
    def text(self) -> str:
        """The text."""
        return "".join(text for text, _ in self.pieces)


NOTHING = Delta([], [], None)


class StopFilter:
    """Lets text through up to a stop string, and holds back what may be the beginning of one.

    Args:
        stops: none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held: list[Piece] = []
        self.found: str | None = None  # the stop string that ended the text

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


@dataclass(slots=True, eq=False)
class Choice:
    """One answer of a request.

    Attributes:
        tokenizer: the model's.
        stops: strings that end the text, which they are not part of.
        logprobs: kept by a processor, or None.
        foretold: drafts from a prediction, or None.
        records: of the steps so far.
        finish: why the text ended, or None.
    """

    tokenizer: Any
    stops: StopFilter
    logprobs: Logprobs | None = None
    foretold: ForetoldDrafter | None = None
    records: list[StepRecord] = field(default_factory=list)
    finish: str | None = None
    _stream: TextStream = field(init=False)

    def __post_init__(self) -> None:
        """Begin the text."""
        self._stream = TextStream(self.tokenizer)

    def take(self, event: Event) -> Delta:
        """Return what an event adds.

        Raises:
            ForedraftError: what ended the text instead.
        """
        if event.failure is not None:
            raise event.failure
        self.records += event.records
        pieces: list[Piece] = []
        tokens: list[Told] = []
        for record in event.records:
            for token, source in zip(record.emitted, record.sources, strict=True):
                pieces.append((self._stream.push(token), source))
                if self.logprobs is not None:
                    tokens.append(Told(token, self.logprobs.take(token)))
        if event.finish is not None:
            pieces.append((self._stream.finish(), None))
            self.finish = FINISH[event.finish]
        shown = self.stops.push([piece for piece in pieces if piece[0]], last=event.finish is not None)
        return Delta(shown, tokens, self.finish)

    def watched(self, drafter: Drafter) -> Drafter:
        """Return the drafter, and remember it where it drafts from a prediction."""
        if isinstance(drafter, ForetoldDrafter) and drafter.source == PREDICTION:
            self.foretold = drafter
        return drafter

    @property
    def predicted(self) -> tuple[int, int]:
        """How many tokens of a prediction were written, and how many were drafted from it and refused."""
        if self.foretold is None:
            return 0, 0
        accepted = sum(source == PREDICTION for record in self.records for source in record.sources)
        return accepted, max(self.foretold.drafted - accepted, 0)


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
