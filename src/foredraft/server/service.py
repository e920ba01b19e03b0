"""Turns requests into answers: tokenizes on one thread, and generates on the writer's thread.

Does not depend on routes or on the format in which answers are sent.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import llguidance.hf

from foredraft.contracts import TokenIds
from foredraft.drafters.prediction import ChainDrafter
from foredraft.errors import UsageError
from foredraft.generator import CACHE_BYTES, Generator
from foredraft.model.compiled.library import release_threads
from foredraft.sampling import SEED_LIMIT
from foredraft.server.answers import TOOL_CALL, Answers, Choice
from foredraft.server.bodies import TextRequest
from foredraft.server.generators import Generators
from foredraft.server.metrics import Metrics
from foredraft.server.processors import GRAMMAR, Constraint, Logprobs, Penalties
from foredraft.server.stores import Stores
from foredraft.server.writer import Event, Job, Writer

Result = TypeVar("Result")
_MOST_TEXTS = 64  # per request (chosen)
_UNLIMITED = 1 << 20  # default maximum of new tokens for a model without a window (chosen)


class Service:
    """Generates answers with one model, whose name for clients is `name`.

    `generator` and `config` are those of `Generators`, `stores` is the folder for what clients fill. The batch has room
    for `most_at_once` texts and `cache_bytes` of keys and values, including prefixes kept from earlier requests;
    `most_waiting` more texts may wait. An answer fails after `timeout` seconds.
    """

    def __init__(
        self, generator: Generator, name: str, config: Mapping[str, Any], *, stores: Path | None = None,
        most_at_once: int = 16, most_waiting: int = 64, cache_bytes: int = CACHE_BYTES, timeout: float = 600.0,
    ) -> None:  # fmt: skip
        if generator.drafter.needs.target is not None:
            raise UsageError(
                f"Method {generator.method!r} drafts with the target's own layers, for one text at a time, so a server "
                "cannot use it; choose another method."
            )
        self.generator, self.name, self._timeout = generator, name, timeout
        self.stores = Stores(stores, generator.tokenizer.backend_tokenizer)
        self.generators = Generators(generator, config, self.stores)
        self._preparing = ThreadPoolExecutor(1, "foredraft-prompts")
        self._preparing_now = 0  # texts being tokenized
        self._loop: asyncio.AbstractEventLoop | None = None
        batch = generator.batch(cache_bytes)
        self.writer = Writer(batch, most_at_once, most_waiting)
        self.metrics = Metrics(name, self.writer)
        release_threads()  # from now on, passes run in the writer's thread

    async def begin(self, request: TextRequest, key: str) -> Answers:
        """Submit the texts of a request; UsageError if it is invalid, BusyError if too many texts are waiting."""
        self._loop, news = asyncio.get_running_loop(), asyncio.Event()
        until, count = self._loop.time() + self._timeout, len(request.prompts) * request.n
        if count > _MOST_TEXTS:
            raise UsageError(f"The request needs {count} texts; the limit is {_MOST_TEXTS}.")
        self.writer.check_room(self._preparing_now + count)
        self._preparing_now += count
        try:
            choices = await self.in_turn(self._choices, request, key, news)
        finally:
            self._preparing_now -= count
        self.writer.submit([choice.job for choice in choices])
        prompt_tokens = sum(len(choice.job.prepared.prompt) for choice in choices[:: request.n])
        return Answers(choices, prompt_tokens, news, until)

    @contextmanager
    def attending(self, answers: Answers) -> Iterator[None]:
        """Cancel unfinished answers when the block is left."""
        try:
            yield
        finally:
            for choice in answers.choices:
                if choice.finish is None:
                    self.writer.cancel(choice.job)
                self.metrics.ended(choice.job, choice.finish)

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

    def _choices(self, request: TextRequest, key: str, news: asyncio.Event) -> list[Choice]:
        generator = self.generators.get(key, request.speculative)
        template = str(getattr(generator.tokenizer, "chat_template", None))
        if request.tools and ("tools" not in template or TOOL_CALL not in template):
            raise UsageError(
                f"This model's chat template does not support tools in the format {TOOL_CALL}; leave tools out."
            )
        made = []
        for prompt in request.prompts:
            ids = generator.encode(prompt, request.tools)
            made += [self._choice(generator, ids, request, number, news) for number in range(request.n)]
        return made

    def _choice(
        self, generator: Generator, ids: TokenIds, request: TextRequest, number: int, news: asyncio.Event
    ) -> Choice:
        target, tokenizer = generator.target, generator.tokenizer
        logprobs = None if request.logprobs is None else Logprobs(request.logprobs, tokenizer)
        constraint = None if request.shape is None else Constraint(self._grammar_tokenizer, request.shape, len(ids))
        weights = request.presence, request.frequency, request.bias
        penalties = Penalties(len(ids), *weights, target.vocabulary) if any(weights) else None
        most = _UNLIMITED if target.window is None else max(target.window - len(ids), 1)
        options = {"max_new_tokens": most} | {name: each for name, each in request.options.items() if each is not None}
        options["logits_processor"] = [each for each in (logprobs, penalties, constraint) if each is not None]
        if number and "seed" in options:
            options["seed"] = (options["seed"] + number) % SEED_LIMIT
        arguments = generator.arguments(options)
        drafter = arguments["drafter"]
        prediction = drafter if isinstance(drafter, ChainDrafter) else None
        if constraint is not None and generator.method != "none":
            arguments["drafter"] = ChainDrafter(drafter, constraint.chains, GRAMMAR)
        stops, tools = options.get("stop_strings", ()), bool(request.tools)
        choice = Choice(tokenizer, stops, tools, logprobs, prediction, news)
        choice.job = Job(generator.prepare(ids, **arguments), partial(self._deliver, choice))
        return choice

    def _deliver(self, choice: Choice, event: Event) -> None:
        """Pass an event from the writer's thread to the loop's."""
        assert self._loop is not None, "jobs are submitted from the loop"
        with suppress(RuntimeError):  # the loop has ended, so nobody receives the event
            self._loop.call_soon_threadsafe(self._receive, choice, event)

    def _receive(self, choice: Choice, event: Event) -> None:
        self.metrics.advanced(choice.job, event)
        choice.receive(event)
