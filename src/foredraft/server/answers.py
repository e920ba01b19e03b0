"""The answers of a request: converts events to pieces of text, and cuts a text at a stop string.

Does not depend on the format in which an answer is sent.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from foredraft.contracts import StepRecord
from foredraft.drafters.prediction import ChainDrafter
from foredraft.server.processors import Logprobs, Position
from foredraft.server.writer import Event, Job
from foredraft.text import TextStream

TOOL_CALL = "<tool_call>"  # the beginning of a tool call in the supported format
Piece = tuple[str, str | None]  # a text, and the name of the source that drafted it, or None


@dataclass
class Delta:
    """An increment of an answer: its text, log-probabilities if requested, and OpenAI's finish reason."""

    pieces: list[Piece] = field(default_factory=list)
    tokens: list[Position] = field(default_factory=list)
    finish: str | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


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
            begun = (
                n for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])
            )
            passed = len(text) if last else len(text) - max(begun, default=0)
        pieces, self._held = _split(self._held, passed)
        return pieces

    @property
    def held(self) -> str:
        return "".join(piece for piece, _ in self._held)


class Choice(Delta):
    """One answer: the sum of the increments taken so far, and the job that writes it; `news` is set when it goes on."""

    job: Job

    def __init__(
        self, text: TextStream, stops: Sequence[str], tools: bool, logprobs: Logprobs | None,
        prediction: ChainDrafter | None, news: asyncio.Event,
    ) -> None:  # fmt: skip
        super().__init__()
        self.stops, self.prediction = StopFilter(stops), prediction
        self._stream, self._logprobs, self._news = text, logprobs, news
        self._calls = StopFilter([TOOL_CALL] if tools else [])
        self._new = Delta()  # not taken yet
        self._failure: Exception | None = None

    @property
    def held(self) -> str:
        """The text that begins, or may begin, a tool call; it is in no increment."""
        return self._calls.held

    def take(self) -> Delta:
        """Return the increment since the last call, which may be empty; raises the answer's failure."""
        if self._failure is not None:
            raise self._failure
        new, self._new = self._new, Delta()
        self.pieces += new.pieces
        self.tokens += new.tokens
        self.finish = new.finish or self.finish
        return new

    def receive(self, event: Event) -> None:
        """Add to what `take` returns, or raises."""
        try:
            self._add(event)
        except Exception as error:  # noqa: BLE001  # whoever takes the answer raises it
            self._failure = error
        self._news.set()

    def _add(self, event: Event) -> None:
        if event.failure is not None:
            raise event.failure
        pieces: list[Piece] = []
        for record in event.records:
            for token, source in zip(record.emitted, record.sources, strict=True):
                pieces.append((self._stream.push(token), source))
                if self._logprobs is not None:
                    self._new.tokens.append(self._logprobs.take(token))
        if event.finish == "eos":
            self._new.tokens = self._new.tokens[:-1]  # an end token is not of the text
        if event.finish is not None:
            pieces.append((self._stream.finish(), None))
            self._new.finish = "stop" if event.finish in ("eos", "stop") else "length"
        shown = [piece for piece in pieces if piece[0]]
        self._new.pieces += self._calls.push(self.stops.push(shown, last=event.finish is not None))


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a request: `n` choices for each prompt, in order."""

    choices: list[Choice]
    each: int  # choices of a prompt
    news: asyncio.Event  # set when a choice goes on
    until: float  # deadline, in seconds of the loop's clock

    @property
    def prompt_tokens(self) -> int:
        """Ids of all prompts."""
        return sum(choice.job.run.seq.prompt_length for choice in self.choices[:: self.each])

    @property
    def cached_tokens(self) -> int:
        """Ids of the prompts that were computed for earlier requests."""
        return sum(choice.job.run.cached_tokens or 0 for choice in self.choices[:: self.each])

    @property
    def records(self) -> list[StepRecord]:
        return [record for choice in self.choices for record in choice.job.run.records]

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield the increments of the choices, some of them empty, until all have ended.

        Raises the failure of an answer, and TimeoutError when the deadline has passed.
        """
        while any(choice.finish is None for choice in self.choices):
            async with asyncio.timeout_at(self.until):
                await self.news.wait()
            self.news.clear()
            for number, choice in enumerate(self.choices):
                yield number, choice.take()

    async def ended(self) -> None:
        """Wait until all choices have ended; raises what `deltas` raises."""
        async for _ in self.deltas():
            pass


def _split(pieces: list[Piece], at: int) -> tuple[list[Piece], list[Piece]]:
    before: list[Piece] = []
    after: list[Piece] = []
    for text, source in pieces:
        for part, side in ((text[:at], before), (text[at:], after)):
            if part:
                side.append((part, source))
        at = max(at - len(text), 0)
    return before, after
