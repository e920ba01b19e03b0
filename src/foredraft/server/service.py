"""Turns requests into answers: chooses the drafter, tokenizes on other threads, and generates on the writer's thread.

Does not depend on routes or on the format in which answers are sent.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, TypeVar

import llguidance.hf

from foredraft.contracts import Learner, TokenIds
from foredraft.drafters import method_names
from foredraft.drafters.prediction import ChainDrafter
from foredraft.errors import PromptTooLongError, UsageError, told
from foredraft.generator import CACHE_BYTES, Generator
from foredraft.model.compiled.library import release_threads
from foredraft.options import check_known
from foredraft.request import checked_text
from foredraft.sampling import SEED_LIMIT
from foredraft.server.answers import Answers, Choice
from foredraft.server.bodies import MOST_TEXTS, Speculation, TextRequest
from foredraft.server.metrics import Metrics
from foredraft.server.processors import GRAMMAR, Constraint, Logprobs, Penalties, matcher_of
from foredraft.server.speech import Speech, for_template
from foredraft.server.writer import Event, Job, Writer
from foredraft.speculation import parse_speculation

Result = TypeVar("Result")
_SELECTABLE = ("none", "auto", "adaptix", "rest", "prompt_lookup", "lookahead")  # need no other model and no KV cache
_MOST_GENERATORS = 32  # kept (chosen); the learned state of `auto` takes up to 59 MB each
_UNLIMITED = 1 << 20  # default maximum of new tokens for a model without a window (chosen)
_STEP_SECONDS = 0.2  # of a step that prefills, so that others wait no longer; fewer prompt tokens are in it (chosen)
_MOST_FORMATS = 16  # kept prepared (chosen); clients send the same one with each request
_SLOW_THREADS = 2  # so that one text or format that takes long delays none of the others (chosen)
_MOST_PREDICTED = 1 << 18  # characters of all predictions of a request that are read; 0.2 s of tokenizing (chosen)


class Service:
    """Generates answers with one model, whose name for clients is `name`.

    `generator` is for requests without a key and without drafting options, and `config` is its `speculative_config`;
    for others there are more, with the same model. Drafters with learned state are not shared between API keys. The
    batch has room for `most_at_once` texts and `cache_bytes` of keys and values, including prefixes kept from earlier
    requests; `most_waiting` more texts may wait. An answer fails after `timeout` seconds.
    """

    def __init__(
        self, generator: Generator, name: str, config: Mapping[str, Any], *, most_at_once: int = 16,
        most_waiting: int = 64, cache_bytes: int = CACHE_BYTES, timeout: float = 600.0,
    ) -> None:  # fmt: skip
        self.generator, self.name, self._config, self._timeout = generator, name, config, timeout
        self.methods = [method for method in method_names() if method in (generator.method, *_SELECTABLE)]
        self._made = lru_cache(_MOST_GENERATORS)(self._make_generator)
        self._preparing = ThreadPoolExecutor(1, "foredraft-prompts")
        self._slow = ThreadPoolExecutor(_SLOW_THREADS, "foredraft-slow")  # long prompts and formats: others overtake
        self._matchers = lru_cache(_MOST_FORMATS)(matcher_of)  # each text has a copy
        self._grammar_tokenizer = self._slow.submit(self._make_grammar_tokenizer)  # before a request waits for it
        self._longest = max(map(len, generator.tokenizer.get_vocab()))  # characters of a token
        self._preparing_now = 0  # texts being tokenized
        self._loop: asyncio.AbstractEventLoop | None = None
        _ = generator.cost  # measured now, as one thread at a time may run passes
        self.writer = Writer(generator.batch(cache_bytes, _STEP_SECONDS), most_at_once, most_waiting)
        self.metrics = Metrics(name, self.writer)
        release_threads()  # from now on, passes run in the writer's thread

    async def begin(self, request: TextRequest, key: str, *, long: bool) -> Answers:
        """Submit the texts of a request; UsageError if it is invalid, BusyError if too many texts are waiting.

        It is prepared by the threads for what takes `long`, or by that for the others.
        """
        self._loop, news = asyncio.get_running_loop(), asyncio.Event()
        until, count = self._loop.time() + self._timeout, len(request.prompts) * request.n
        if count > (most := min(MOST_TEXTS, self.writer.most_texts)):
            raise UsageError(f"The request needs {count} texts; the limit is {most}.")
        self.writer.check_room(self._preparing_now + count)
        self._preparing_now += count
        try:
            prompts = await self.in_turn(self._encoded, request, long=long)
            matchers = {grammar: await self._matcher(grammar) for grammar in {speech.grammar for speech in prompts}}
            choices = await self.in_turn(self._choices, request, prompts, matchers, key, news, long=long)
        finally:
            self._preparing_now -= count
        self.writer.submit([choice.job for choice in choices])
        return Answers(choices, request.n, news, until)

    def end(self, answers: Answers) -> None:
        """Count the answers of a request, and cancel those that have not ended."""
        for choice in answers.choices:
            if choice.finish is None:
                self.writer.cancel(choice.job)
            self.metrics.ended(choice.job, choice.finish)

    async def in_turn(self, work: Callable[..., Result], *arguments: Any, long: bool = False) -> Result:
        """Run `work` on the thread for tokenizing, or on the threads for what takes `long`."""
        threads = self._slow if long else self._preparing
        return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)

    def close(self) -> None:
        """Fail the texts in progress, and save what was learned."""
        self.writer.close(0.0)
        for threads in (self._preparing, self._slow):
            threads.shutdown(wait=threads is self._preparing)
        self.generator.save()

    def encode(
        self, prompt: Any, tools: Sequence[Mapping[str, Any]] = (), variables: Mapping[str, Any] | None = None, *,
        special: bool = True,
    ) -> TokenIds:  # fmt: skip
        """Return the ids of a text, a conversation, or ids; UsageError if the chat template does not support tools.

        Those of a text are without the special tokens that the tokenizer puts around it if they are not `special`.
        """
        given, window = for_template(self.generator.tokenizer, prompt, told=bool(tools)), self.generator.target.window
        if window is not None and (size := _characters(prompt)) > window * self._longest:
            raise PromptTooLongError(
                f"The prompt has {size:,} characters, which cannot be at most {window:,} tokens; shorten it."
            )
        if not special:
            given = self.generator.tokenizer(checked_text(given), add_special_tokens=False).input_ids
        return self.generator.encode(given, tools, variables)

    def generator_for(self, key: str, speculative: Speculation | bool | None) -> Generator:
        """Return the generator of a request; UsageError for an unknown method or option."""
        if speculative in (None, True) and not (key and isinstance(self.generator.drafter, Learner)):
            return self.generator
        if not isinstance(speculative, Speculation):
            speculative = Speculation(method="none" if speculative is False else None)
        return self._made(key, speculative.model_dump_json())

    def _make_generator(self, _key: str, speculation_json: str) -> Generator:
        own, speculation = self.generator, Speculation.model_validate_json(speculation_json)
        method = own.method if speculation.method is None else speculation.method
        check_known(method, self.methods, "A request cannot select the method", "Methods are")
        servers = self._config if method == own.method else {}
        kept = {name: each for name, each in servers.items() if name != "memory"}  # only its own generator has it
        config = {**kept, **speculation.options}
        if speculation.num_speculative_tokens is not None:
            config["num_speculative_tokens"] = speculation.num_speculative_tokens
        return own.sibling(**parse_speculation(method, config).drafting)

    def _make_grammar_tokenizer(self) -> llguidance.LLTokenizer:
        """Return the tokenizer for formats and the bytes of tokens, in half a second; UsageError for one in Python."""
        size, eos = self.generator.target.vocabulary, self.generator.eos_token_ids()
        try:
            return llguidance.hf.from_tokenizer(self.generator.tokenizer, n_vocab=size, eos_token=list(eos) or None)
        except ValueError as error:
            raise UsageError(
                f"Formats, strict or required tools and log-probabilities need another tokenizer than this model has "
                f"({told(error)}); leave them out."
            ) from error

    async def _matcher(self, grammar: str | None) -> llguidance.LLMatcher | None:
        """Return what matches the grammar of an answer, if it has one; UsageError as `matcher_of`."""
        if grammar is None:
            return None
        tokenizer = await asyncio.wrap_future(self._grammar_tokenizer)
        return await self.in_turn(self._matchers, tokenizer, grammar, long=True)

    def _encoded(self, request: TextRequest) -> list[Speech]:
        tokenizer, tools = self.generator.tokenizer, request.tools.told
        return [Speech(tokenizer, prompt, self.encode(prompt, tools, request.variables), request)
                for prompt in request.prompts]  # fmt: skip

    def _choices(
        self, request: TextRequest, prompts: list[Speech], matchers: Mapping[str | None, llguidance.LLMatcher | None],
        key: str, news: asyncio.Event,
    ) -> list[Choice]:  # fmt: skip
        generator = self.generator_for(key, request.speculative)
        return [
            self._choice(generator, speech, request, matchers[speech.grammar], number, key, news)
            for speech in prompts for number in range(request.n)
        ]  # fmt: skip

    def _choice(
        self, generator: Generator, speech: Speech, request: TextRequest, matcher: llguidance.LLMatcher | None,
        number: int, key: str, news: asyncio.Event,
    ) -> Choice:  # fmt: skip
        target, ids = generator.target, speech.ids
        logprobs = None if request.logprobs is None else Logprobs(request.logprobs, self._grammar_tokenizer.result())
        constraint = None if matcher is None else Constraint(matcher.deep_copy(), target.vocabulary, len(ids))
        weights = request.presence, request.frequency, request.bias
        penalties = Penalties(len(ids), *weights, target.vocabulary) if any(weights) else None
        most = _UNLIMITED if target.window is None else max(target.window - len(ids), 1)
        options = {"max_new_tokens": most} | {name: each for name, each in request.options.items() if each is not None}
        if prediction := options.get("prediction"):  # what is left out would be drafts
            options["prediction"] = prediction[: _MOST_PREDICTED // request.n]
        options["logits_processor"] = [each for each in (logprobs, penalties, constraint) if each is not None]
        if number and "seed" in options:
            options["seed"] = (options["seed"] + number) % SEED_LIMIT
        arguments = generator.arguments(options)
        drafter = arguments["drafter"]
        predicted = drafter if isinstance(drafter, ChainDrafter) else None
        if constraint is not None and generator.method != "none":
            arguments["drafter"] = ChainDrafter(drafter, constraint.chains, GRAMMAR)
        choice = Choice(speech, options.get("stop_strings", ()), logprobs, predicted, news)
        choice.job = Job(generator.begin(ids, **arguments), partial(self._deliver, choice))
        choice.job.run.owner = key
        return choice

    def _deliver(self, choice: Choice, event: Event) -> None:
        """Pass an event from the writer's thread to the loop's."""
        assert self._loop is not None, "jobs are submitted from the loop"
        with suppress(RuntimeError):  # the loop has ended, so nobody receives the event
            self._loop.call_soon_threadsafe(self._receive, choice, event)

    def _receive(self, choice: Choice, event: Event) -> None:
        self.metrics.advanced(choice.job, event)
        choice.receive(event)


def _characters(prompt: Any) -> int:
    """Return the characters of a text or a conversation, or the number of ids."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(each["content"]) if isinstance(each, Mapping) else 1 for each in prompt)
