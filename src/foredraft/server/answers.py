"""The answers of a request: converts events to parts of an answer, and cuts a text at a stop string.

Does not depend on the format in which an answer is sent.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from foredraft.contracts import StepRecord
from foredraft.drafters.prediction import ChainDrafter
from foredraft.server.notation import first_mark
from foredraft.server.parts import Part, Piece, split
from foredraft.server.processors import Logprobs, Position
from foredraft.server.speech import Speech
from foredraft.server.writer import Event, Job


@dataclass
class Delta:
    """An increment of an answer: its parts, log-probabilities if requested, and OpenAI's finish reason."""

    parts: list[Part] = field(default_factory=list)
    tokens: list[Position] = field(default_factory=list)
    finish: str | None = None

    @property
    def text(self) -> str:
        """What is said, without thoughts and calls."""
        return "".join(part.text for part in self.parts if part.kind == "text")

    @property
    def blocks(self) -> list[Part]:
        """The parts, each of which is whole."""
        whole: list[Part] = []
        for part in self.parts:
            if not whole or not part.continues(whole[-1]):
                whole.append(part._replace(pieces=[]))
            whole[-1].pieces.extend(part.pieces)
        return whole


class StopFilter:
    """Passes text up to the first stop string, then stored in `found`, and holds back a possible beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._stops = stops
        self._held: list[Piece] = []

    def push(self, pieces: list[Piece], *, searched: bool = True, last: bool = False) -> list[Piece]:
        """Add pieces and return those that can be sent; `last` releases the text held back.

        Those that are not `searched` pass, and a stop string that has begun before them does not go on behind them.
        """
        if not searched:
            return [*self.push([], last=True), *(pieces if self.found is None else [])]
        self._held += pieces
        if self.found is not None:
            return []
        passed, self.found = first_mark("".join(text for text, _ in self._held), self._stops, last=last)
        pieces, self._held = split(self._held, passed)
        return pieces


class Choice(Delta):
    """One answer: the sum of the increments taken so far, and the job that writes it; `news` is set when it goes on."""

    job: Job

    def __init__(
        self, speech: Speech, stops: Sequence[str], logprobs: Logprobs | None, prediction: ChainDrafter | None,
        news: asyncio.Event,
    ) -> None:  # fmt: skip
        super().__init__()
        self.stops, self.prediction = StopFilter(stops), prediction
        self.thought_tokens = 0  # without those of the marks
        self._stream, self._hidden = speech.stream()
        self._unsearched = speech.unsearched(stops)
        self._splitter, self._logprobs, self._news = speech.splitter(), logprobs, news
        self._new = Delta()  # not taken yet
        self._failure: Exception | None = None

    def take(self) -> Delta:
        """Return the increment since the last call, which may be empty; raises the answer's failure."""
        if self._failure is not None:
            raise self._failure
        new, self._new = self._new, Delta()
        self.parts += new.parts
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
        for record in event.records:
            for token, source in zip(record.emitted, record.sources, strict=True):
                thought = self._splitter.thinking
                if token not in self._hidden:
                    self._split(self._stream.push(token), source, searched=token not in self._unsearched)
                self.thought_tokens += thought and self._splitter.thinking
                if self._logprobs is not None:
                    self._new.tokens.append(self._logprobs.take(token))
        if event.finish == "eos":
            self._new.tokens = self._new.tokens[:-1]  # an end token is not of the text
        if event.finish is not None:
            self._split(self._stream.finish(), None, last=True)
            self._new.finish = "stop" if event.finish in ("eos", "stop") else "length"

    def _split(self, text: str, source: str | None, *, searched: bool = True, last: bool = False) -> None:
        shown = self.stops.push([(text, source)] if text else [], searched=searched, last=last)
        self._new.parts += self._splitter.push(shown, last=last)


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a request: `n` choices for each prompt, in order."""

    choices: list[Choice]
    each: int  # choices of a prompt
    news: asyncio.Event  # set when a choice goes on
    until: float  # deadline, in seconds of the loop's clock
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # which each protocol prefixes
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def content(self) -> list[Part]:
        """The blocks of the only answer, at least one."""
        [choice] = self.choices
        return choice.blocks or [Part("text", [])]

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

    async def blocks(self) -> AsyncIterator[tuple[Literal["begin", "add", "end"], int, Part]]:
        """Yield what happens to each block of `content`, and its number: it begins, grows by a part, and ends whole."""
        number, before = -1, None
        async for _, delta in self.deltas():
            for part in delta.parts:
                if before is None or not part.continues(before):
                    if before is not None:
                        yield "end", number, self.content[number]
                    number += 1
                    yield "begin", number, part
                if part.text:
                    yield "add", number, part
                before = part
        if before is None:
            number = 0
            yield "begin", number, self.content[number]
        yield "end", number, self.content[number]

    async def ended(self) -> None:
        """Wait until all choices have ended; raises what `deltas` raises."""
        async for _ in self.deltas():
            pass
