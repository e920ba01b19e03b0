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
from foredraft.generator import Generator, Prompt
from foredraft.request import templated
from foredraft.sampling import SEED_LIMIT, LogitsProcessor
from foredraft.server.bodies import Speculation
from foredraft.server.choice import Choice, Delta
from foredraft.server.generators import Generators
from foredraft.server.metrics import Metrics
from foredraft.server.processors import GRAMMAR, Bias, Constraint, Logprobs, Penalties, grammar_tokenizer
from foredraft.server.writer import Event, Job, Writer
from foredraft.text import StopStrings

TOOL_CALL = "<tool_call>"
"""What a call of a tool begins with, in the form that is known here."""
_UNLIMITED = 1 << 20  # tokens of a text whose length is not limited, where the model has no window


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one request wants written."""

    prompts: Sequence[Prompt]  # each is answered `n` times
    options: Mapping[str, Any]  # generation arguments, None where one is not given
    tools: Sequence[Mapping[str, Any]] | None = (
        None  # told to the chat template; None where no message has to do with any
    )
    n: int = 1
    stops: Sequence[str] = ()
    logprobs: int | None = None  # most probable tokens told at every position; None for no log-probabilities
    bias: Mapping[int, float] = field(default_factory=dict)  # added to scores, by token id
    presence: float = 0.0
    frequency: float = 0.0
    shape: tuple[str, Any] | None = None  # "json_object", "json_schema" or "regex", and the schema or expression
    ignore_eos: bool = False  # write on after the end
    speculative: Speculation | bool | None = None


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a request: `n` choices for each prompt, in order, and the job that writes each."""

    choices: list[Choice]
    prompt_tokens: int  # ids of all prompts
    jobs: list[Job]
    events: asyncio.Queue[tuple[int, Event]]  # what is told of the jobs, in order, by the number of the choice
    until: float  # when what is not written is given up, in seconds of the loop's clock

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield what the answers grow by until all have ended; what came meanwhile comes at once.

        Raises what ended one of them instead, or TimeoutError.
        """
        while any(choice.finish is None for choice in self.choices):
            grown: dict[int, Delta] = {}
            async with asyncio.timeout_at(self.until):
                told = [await self.events.get()]
            while not self.events.empty():
                told.append(self.events.get_nowait())
            for number, event in told:
                grown.setdefault(number, Delta()).extend(self.choices[number].take(event))
            for each in grown.items():
                yield each

    async def whole(self) -> list[Delta]:
        """Return everything that each answer grew by, when all have ended; raises as `deltas`."""
        grown = [Delta() for _ in self.choices]
        async for number, delta in self.deltas():
            grown[number].extend(delta)
        return grown


class Service:
    """Writes answers for one model.

    Args:
        generator: has the model and the tokenizer.
        generators: what drafts for a request.
        metrics: of the server.
        most_at_once: texts that are written together; `most_waiting` more may wait.
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
        """Have answers written, or raise what cannot be honoured, or BusyError."""
        self._loop = asyncio.get_running_loop()
        until, count = self._loop.time() + self._timeout, len(wanted.prompts) * wanted.n
        self.writer.check_room(self._prepared_now + count)
        self._prepared_now += count
        try:
            made = await self.prepared_in_turn(self._prepared, wanted, key)
        finally:
            self._prepared_now -= count
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        jobs = [Job(prepared, partial(_queue, events, number)) for number, (_, prepared) in enumerate(made)]
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
    def _grammar_tokenizer(self) -> Any:
        generator = self.generator
        return grammar_tokenizer(generator.tokenizer, generator.target.vocabulary, generator.eos_token_ids())

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
        tokenizer, made = generator.tokenizer, []
        for prompt in wanted.prompts:
            ids = generator.encode(prompt if wanted.tools is None else _ids_with_tools(prompt, wanted.tools, tokenizer))
            made += [self._choice(generator, ids, wanted, number) for number in range(wanted.n)]
        return made

    def _choice(self, generator: Generator, ids: Any, wanted: Wanted, number: int) -> tuple[Choice, Prepared]:
        tokenizer, target = generator.tokenizer, generator.target
        most = _UNLIMITED if target.window is None else max(target.window - len(ids), 1)
        asked = {"max_new_tokens": most} | {name: each for name, each in wanted.options.items() if each is not None}
        if number and "seed" in asked:
            asked["seed"] = (asked["seed"] + number) % SEED_LIMIT
        arguments = generator.arguments(asked)
        logprobs = None if wanted.logprobs is None else Logprobs(wanted.logprobs)
        processors: list[LogitsProcessor] = [] if logprobs is None else [logprobs]
        if wanted.bias:
            processors.append(Bias(wanted.bias, target.vocabulary))
        if wanted.presence or wanted.frequency:
            processors.append(Penalties(len(ids), wanted.presence, wanted.frequency))
        constraint = None
        if wanted.shape is not None:
            if wanted.ignore_eos:
                raise UsageError("ignore_eos cannot be had with a response_format, which says where the text ends.")
            constraint = Constraint(self._grammar_tokenizer, *wanted.shape, len(ids))
            processors.append(constraint)
        choice, given = Choice(tokenizer, wanted.stops, logprobs), arguments["wrap_drafter"]

        def wrap_drafter(drafter: Drafter) -> Drafter:
            drafter = given(drafter)
            choice.watch(drafter)
            if constraint is None or generator.method == "none":
                return drafter
            return ForetoldDrafter(drafter, constraint, GRAMMAR)

        arguments |= {"processors": processors, "wrap_drafter": wrap_drafter}
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


def _queue(events: "asyncio.Queue[tuple[int, Event]]", number: int, event: Event) -> None:
    events.put_nowait((number, event))


def _ids_with_tools(messages: Any, tools: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """Return the ids of a conversation with tools, or refuse a chat template that knows no such calls."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if tools and ("tools" not in template or TOOL_CALL not in template):
        raise UsageError(
            f"This model's chat template has no tools in a form that is known here ({TOOL_CALL}); leave tools out."
        )
    ids: list[int] = tokenizer(templated(messages, tokenizer, tools or None), add_special_tokens=False).input_ids
    return ids
