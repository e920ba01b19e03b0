"""Turns requests into answers: tokenizes on one thread, and generates on the writer's thread.

Does not depend on routes or on the format in which answers are sent.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import llguidance.hf

from foredraft.contracts import StepRecord, TokenIds
from foredraft.drafters.prediction import ChainDrafter
from foredraft.engine.run import Run
from foredraft.errors import UsageError
from foredraft.generator import Generator
from foredraft.sampling import SEED_LIMIT
from foredraft.server.bodies import TextRequest
from foredraft.server.choice import Choice, Delta
from foredraft.server.generators import Generators
from foredraft.server.metrics import Metrics
from foredraft.server.processors import GRAMMAR, Constraint, Logprobs, Penalties
from foredraft.server.writer import Event, Job, Writer

TOOL_CALL = "<tool_call>"  # the beginning of a tool call in the supported format
Result = TypeVar("Result")
_UNLIMITED = 1 << 20  # default maximum of new tokens for a model without a window (chosen)


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a request: `n` choices for each prompt, in order, and the job of each."""

    choices: list[Choice]
    jobs: list[Job]
    prompt_tokens: int  # ids of all prompts
    events: asyncio.Queue[tuple[Job, Event]]  # in order
    until: float  # deadline, in seconds of the loop's clock

    @property
    def records(self) -> list[StepRecord]:
        return [record for choice in self.choices for record in choice.records]

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield the increments of the answers until all have ended, one per choice for all queued events.

        Raises the failure of an answer, and TimeoutError when the deadline has passed.
        """
        while any(choice.finish is None for choice in self.choices):
            deltas: dict[int, Delta] = {}
            async with asyncio.timeout_at(self.until):
                events = [await self.events.get()]
            while not self.events.empty():
                events.append(self.events.get_nowait())
            for job, event in events:
                number = self.jobs.index(job)
                deltas.setdefault(number, Delta()).extend(self.choices[number].take(event))
            for each in deltas.items():
                yield each

    async def whole(self) -> list[Delta]:
        """Return each complete answer once all have ended; raises what `deltas` raises."""
        answers = [Delta() for _ in self.choices]
        async for number, delta in self.deltas():
            answers[number].extend(delta)
        return answers


class Service:
    """Generates answers with one model.

    The batch has room for `most_at_once` texts and `cache_bytes` of keys and values, including prefixes kept from
    earlier requests; `most_waiting` more texts may wait. An answer fails after `timeout` seconds.
    """

    def __init__(
        self, generators: Generators, metrics: Metrics, *, most_at_once: int, most_waiting: int, cache_bytes: int,
        timeout: float,
    ) -> None:  # fmt: skip
        self.generator, self.generators, self.metrics = generators.default, generators, metrics
        self._timeout = timeout
        self._preparing = ThreadPoolExecutor(1, "foredraft-prompts")
        self._preparing_now = 0  # texts being tokenized
        self._loop: asyncio.AbstractEventLoop | None = None
        batch = self.generator.batch(cache_bytes)
        self.writer = Writer(batch, self._deliver, most_at_once=most_at_once, most_waiting=most_waiting)
        metrics.watch(self.writer)

    async def begin(self, request: TextRequest, key: str) -> Answers:
        """Submit the texts of a request; UsageError if it is invalid, BusyError if too many texts are waiting."""
        self._loop = asyncio.get_running_loop()
        until, count = self._loop.time() + self._timeout, len(request.prompts) * request.n
        self.writer.check_room(self._preparing_now + count)
        self._preparing_now += count
        try:
            made = await self.in_turn(self._prepared, request, key)
        finally:
            self._preparing_now -= count
        events: asyncio.Queue[tuple[Job, Event]] = asyncio.Queue()
        jobs = [Job(prepared, events.put_nowait) for _, prepared in made]
        self.writer.submit(jobs)
        self.metrics.begun(jobs)
        prompt_tokens = sum(job.prepared.seq.prompt_length for job in jobs[:: request.n])
        return Answers([choice for choice, _ in made], jobs, prompt_tokens, events, until)

    @contextmanager
    def attending(self, answers: Answers) -> Iterator[None]:
        """Cancel unfinished answers when the block is left."""
        try:
            yield
        finally:
            for choice, job in zip(answers.choices, answers.jobs, strict=True):
                if choice.finish is None:
                    self.writer.cancel(job)
                self.metrics.ended(job, choice.finish)

    async def in_turn(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run `work` on the thread for tokenizing and stores."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, work, *arguments)

    def close(self) -> None:
        """Fail the texts in progress, and save what was learned."""
        self.writer.close(0.0)
        self._preparing.shutdown()
        self.generator.save()

    @cached_property
    def _grammar_tokenizer(self) -> llguidance.LLTokenizer:
        """The tokenizer for constraints; making it takes half a second."""
        size, eos = self.generator.target.vocabulary, self.generator.eos_token_ids()
        return llguidance.hf.from_tokenizer(self.generator.tokenizer, n_vocab=size, eos_token=list(eos) or None)

    def _prepared(self, request: TextRequest, key: str) -> list[tuple[Choice, Run]]:
        generator = self.generators.get(key, request.speculative)
        if generator.drafter.needs.target is not None:
            raise UsageError(
                f"Method {generator.method!r} drafts with the target's own layers, for one text at a time, so a server "
                "cannot use it. Choose another method."
            )
        if request.ignore_eos and request.shape is not None:
            raise UsageError("ignore_eos and response_format exclude each other; leave one of them out.")
        template = str(getattr(generator.tokenizer, "chat_template", None))
        if request.tools and ("tools" not in template or TOOL_CALL not in template):
            raise UsageError(
                f"This model's chat template does not support tools in the format {TOOL_CALL}; leave tools out."
            )
        made = []
        for prompt in request.prompts:
            ids = generator.encode(prompt, request.tools)
            made += [self._choice(generator, ids, request, number) for number in range(request.n)]
        return made

    def _choice(self, generator: Generator, ids: TokenIds, request: TextRequest, number: int) -> tuple[Choice, Run]:
        target = generator.target
        most = _UNLIMITED if target.window is None else max(target.window - len(ids), 1)
        logprobs = None if request.logprobs is None else Logprobs(request.logprobs, generator.tokenizer)
        constraint = None if request.shape is None else Constraint(self._grammar_tokenizer, request.shape, len(ids))
        weights = request.presence, request.frequency, request.bias
        penalties = Penalties(len(ids), *weights, target.vocabulary) if any(weights) else None
        options = {"max_new_tokens": most} | {name: each for name, each in request.options.items() if each is not None}
        options["logits_processor"] = [each for each in (logprobs, penalties, constraint) if each is not None]
        options["stop_strings"] = request.stops
        if request.ignore_eos:
            options["eos_token_id"] = ()
        if number and "seed" in options:
            options["seed"] = (options["seed"] + number) % SEED_LIMIT
        arguments = generator.arguments(options)
        choice, drafter = Choice(generator.tokenizer, request.stops, logprobs), arguments["drafter"]
        if isinstance(drafter, ChainDrafter):
            choice.predicting = drafter
        if constraint is not None and generator.method != "none":
            arguments["drafter"] = ChainDrafter(drafter, constraint.chains, GRAMMAR)
        return choice, generator.begin(ids, **arguments)

    def _deliver(self, events: Sequence[tuple[Job, Event]]) -> None:
        assert self._loop is not None, "jobs are submitted from the loop"
        with suppress(RuntimeError):  # the loop has ended, so nobody receives the events
            self._loop.call_soon_threadsafe(self._send, events)

    def _send(self, events: Sequence[tuple[Job, Event]]) -> None:
        for job, event in events:
            self.metrics.advanced(job, event)
            job.send((job, event))
