"""From what a request wants to its answers as they grow: prepared on one thread, written on another.

Knows generators, the writer and the counters; not routes, nor the shapes in which answers are sent.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from foredraft.contracts import Drafter
from foredraft.drafters.prediction import ForetoldDrafter
from foredraft.engine.state import Prepared
from foredraft.errors import UsageError
from foredraft.generator import Around, Generator, Prompt
from foredraft.sampling import SEED_LIMIT, LogitsProcessor
from foredraft.server.bodies import Speculation
from foredraft.server.choice import NOTHING, Choice, Delta, StopFilter
from foredraft.server.constraint import FORCED, Grammars
from foredraft.server.generators import Generators
from foredraft.server.metrics import Metrics
from foredraft.server.processors import Bias, Logprobs, Penalties
from foredraft.server.tools import worded
from foredraft.server.writer import Event, Job, Writer
from foredraft.text import StopStrings

_UNLIMITED = 1 << 20  # tokens of a text whose length is not limited, where the model has no window


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one request wants written.

    Attributes:
        prompts: each is answered.
        tools: what the chat template is told of tools; None where a conversation has to do with none.
        options: generation arguments, transformers' names; `max_new_tokens` may be missing.
        n: answers to each prompt.
        stops: strings that end an answer, and are not part of it.
        logprobs: how many of the most probable tokens are told at every position; None for no log-probabilities.
        bias: added to scores, by token id.
        presence: penalty for tokens that were written.
        frequency: likewise, for every time.
        shape: what the text must look like: "json_object", "json_schema" or "regex", and the schema or expression.
        ignore_eos: write on after the end.
        speculative: how drafts are made.
    """

    prompts: Sequence[Prompt]
    options: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]] | None = None
    n: int = 1
    stops: Sequence[str] = ()
    logprobs: int | None = None
    bias: Mapping[int, float] = field(default_factory=dict)
    presence: float = 0.0
    frequency: float = 0.0
    shape: tuple[str, Any] | None = None
    ignore_eos: bool = False
    speculative: Speculation | bool | None = None


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a request.

    Attributes:
        choices: in the order of the prompts, `n` for each.
        prompt_tokens: ids of all prompts.
        jobs: what is written for them.
        events: what is told of them, in order, by the number of the choice.
        until: when what is not written is given up, in seconds of the loop's clock.
    """

    choices: list[Choice]
    prompt_tokens: int
    jobs: list[Job]
    events: asyncio.Queue[tuple[int, Event]]
    until: float

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield what the answers grow by until all have ended; what came meanwhile comes at once.

        Raises:
            ForedraftError: what ended one of them instead.
            TimeoutError: it took too long.
        """
        while any(choice.finish is None for choice in self.choices):
            grown: dict[int, Delta] = {}
            async with asyncio.timeout_at(self.until):
                told = [await self.events.get()]
            while not self.events.empty():
                told.append(self.events.get_nowait())
            for number, event in told:
                delta, before = self.choices[number].take(event), grown.get(number, NOTHING)
                grown[number] = Delta(before.pieces + delta.pieces, before.tokens + delta.tokens, delta.finish)
            for number, delta in grown.items():
                yield number, delta


class Service:
    """Writes answers for one model.

    Args:
        generator: has the model and the tokenizer.
        generators: what drafts for a request.
        metrics: counts.
        most_at_once: texts that are written together.
        most_waiting: texts that wait.
        cache_bytes: memory for keys and values.
        timeout: seconds after which a text is given up.
    """

    def __init__(
        self, generator: Generator, generators: Generators, metrics: Metrics, *, most_at_once: int, most_waiting: int,
        cache_bytes: int, timeout: float,
    ) -> None:  # fmt: skip
        self.generator, self.generators, self.metrics = generator, generators, metrics
        self._timeout = timeout
        self._preparing = ThreadPoolExecutor(1, "foredraft-prompts")
        self._prepared_now = 0  # texts that are being prepared
        self._loop: asyncio.AbstractEventLoop | None = None
        batch = generator.batch(cache_bytes)
        self.writer = Writer(batch, self._deliver, most_at_once=most_at_once, most_waiting=most_waiting)
        metrics.watch(self.writer)

    async def begin(self, wanted: Wanted, key: str) -> Answers:
        """Have answers written.

        Raises:
            ForedraftError: what cannot be honoured, or BusyError.
        """
        self._loop = asyncio.get_running_loop()
        until, count = self._loop.time() + self._timeout, len(wanted.prompts) * wanted.n
        self.writer.check_room(self._prepared_now + count)
        self._prepared_now += count
        try:
            made = await self.prepared_in_turn(self._prepared, wanted, key)
        finally:
            self._prepared_now -= count
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        jobs = [Job(prepared, partial(_tell, events, number)) for number, (_, prepared) in enumerate(made)]
        self.writer.submit(jobs)
        self.metrics.begun(jobs)
        prompt_tokens = sum(len(prepared.prompt) for _, prepared in made[:: wanted.n])
        return Answers([choice for choice, _ in made], prompt_tokens, jobs, events, until)

    @contextmanager
    def attending(self, answers: Answers) -> Iterator[None]:
        """Cancel what is not finished when the block is left."""
        try:
            yield
        finally:
            for choice, job in zip(answers.choices, answers.jobs, strict=True):
                if choice.finish is None:
                    self.writer.cancel(job)
                self.metrics.ended(job, choice)

    async def prepared_in_turn(self, work: Any, *arguments: Any) -> Any:
        """Do something with the tokenizer or the stores on the thread for that."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, work, *arguments)

    @cached_property
    def grammars(self) -> Grammars:
        """What constraints are made from; it takes half a second."""
        target = self.generator.target
        return Grammars(self.generator.tokenizer, target.vocabulary, self.generator.eos_token_ids())

    def close(self, seconds: float) -> None:
        """Finish what is being written, or give it up after so many seconds, and keep what was learned."""
        self.writer.close(seconds)
        self._preparing.shutdown()
        self.generator.save()

    def _prepared(self, wanted: Wanted, key: str) -> list[tuple[Choice, Prepared]]:
        generator = self.generators.get(key, wanted.speculative)
        if generator.drafter.needs.target is not None:
            raise UsageError(
                f"Method {generator.method!r} drafts with the target's own layers, one text at a time; this server "
                "writes many. Ask for another method."
            )
        made = []
        for prompt in wanted.prompts:
            ids = generator.encode(
                prompt if wanted.tools is None else worded(prompt, wanted.tools, generator.tokenizer)
            )
            made += [self._choice(generator, ids, wanted, number) for number in range(wanted.n)]
        return made

    def _choice(self, generator: Generator, ids: Any, wanted: Wanted, number: int) -> tuple[Choice, Prepared]:
        tokenizer, window = generator.tokenizer, generator.target.window
        most = _UNLIMITED if window is None else max(window - len(ids), 1)
        asked = {"max_new_tokens": most} | {name: each for name, each in wanted.options.items() if each is not None}
        if number and "seed" in asked:
            asked["seed"] = (asked["seed"] + number) % SEED_LIMIT
        arguments = generator.arguments(asked)
        logprobs = None if wanted.logprobs is None else Logprobs(wanted.logprobs)
        processors: list[LogitsProcessor] = [] if logprobs is None else [logprobs]
        if wanted.bias:
            _check_tokens(wanted.bias, generator.target.vocabulary)
            processors.append(Bias(wanted.bias))
        if wanted.presence or wanted.frequency:
            processors.append(Penalties(len(ids), wanted.presence, wanted.frequency))
        choice = Choice(tokenizer, StopFilter(wanted.stops), logprobs)
        around = _around(arguments["around"], choice.watched)
        if wanted.shape is not None:
            if wanted.ignore_eos:
                raise UsageError("ignore_eos cannot be had with a response_format, which says where the text ends.")
            constraint = self.grammars.constraint(*wanted.shape, len(ids))
            processors.append(constraint)
            if generator.method != "none":
                around = _around(around, lambda drafter: ForetoldDrafter(drafter, constraint, FORCED))
        arguments |= {"processors": processors, "around": around}
        if wanted.ignore_eos:
            arguments["eos"] = ()
        if wanted.stops:
            arguments["stop"] = StopStrings(tokenizer, wanted.stops)
        return choice, generator.prepare(ids, **arguments)

    def _deliver(self, events: Sequence[tuple[Job, Event]]) -> None:
        assert self._loop is not None, "jobs come from the loop"
        with suppress(RuntimeError):  # the loop has ended, and nobody listens
            self._loop.call_soon_threadsafe(self._tell, events)

    def _tell(self, events: Sequence[tuple[Job, Event]]) -> None:
        for job, event in events:
            self.metrics.advanced(job, event)
            job.tell(event)


def _tell(events: "asyncio.Queue[tuple[int, Event]]", number: int, event: Event) -> None:
    events.put_nowait((number, event))


def _around(inner: Around, outer: Around) -> Around:
    def both(drafter: Drafter) -> Drafter:
        return outer(inner(drafter))

    return both


def _check_tokens(tokens: Mapping[int, float], vocabulary: int) -> None:
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise UsageError(f"logit_bias holds token {token}; the model has ids 0 to {vocabulary - 1}.")
