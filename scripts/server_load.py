"""Load tests of a server by a client on the same machine: concurrent streams, predictions, and prefix reuse.

Uses OpenAI's chat completions over HTTP. Does not depend on the server's implementation, so others can be measured too.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

import httpx

from foredraft.bench.tasks import TaskPrompt
from foredraft.errors import ForedraftError, UsageError, told

Body = Mapping[str, Any]

PLAIN, DRAFTED = "plain", "drafted"
WAYS: Mapping[str, Body] = {PLAIN: {"speculative": False}, DRAFTED: {}}  # the fields that a request adds
_WARM_UP = 4  # untimed requests per way (chosen)
_EDITS = 5  # words replaced in an edited prediction (chosen)


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed answer, the seconds to its first text and to its end, and the server's token counts.

    The seconds of an answer without text are those to its end. A server that does not count is taken to send a token at
    a time.
    """

    text: str
    first: float
    seconds: float
    usage: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """The measurements of concurrent streams, answered in one of the `WAYS`."""

    streams: int
    way: str
    tokens_per_second: float  # sum over all streams
    first: float  # median seconds to the first text
    texts: tuple[str, ...]  # the generated text of each request


@contextmanager
def own_server(model: str) -> Iterator[str]:
    """Run a server in another process and yield its address; ForedraftError if it does not start."""
    command = [sys.executable, "-m", "foredraft", "serve", model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  # our own command
        assert process.stdout is not None, "stdout is a pipe"
        try:
            address = process.stdout.readline().partition("/v1 ")[0]
            if not address:
                raise ForedraftError("The server did not start; see its messages above.")
            yield address
        finally:
            process.terminate()


def bodies_of(prompts: Sequence[TaskPrompt], model: str, tokens: int, temperature: float) -> list[dict[str, Any]]:
    """Return a request for each prompt; all texts have the same length, because end tokens are ignored."""
    options = {"model": model, "max_tokens": tokens, "temperature": temperature, "ignore_eos": True}
    return [
        {**options, "messages": [{"role": "user", "content": each.turns[0]}], "seed": number}
        for number, each in enumerate(prompts)
    ]


async def _answer(client: httpx.AsyncClient, body: Body) -> Reply:
    start, first, texts, usage = time.perf_counter(), 0.0, list[str](), dict[str, Any]()
    streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/chat/completions", json=streaming) as response:
        if response.status_code != 200:
            raise ForedraftError(f"The server answered {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise ForedraftError(f"The server reported an error: {chunk['error']['message']}")
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    first = first or time.perf_counter() - start
                    texts.append(text)
    counts = {"completion_tokens": len(texts), **usage}
    seconds = time.perf_counter() - start
    return Reply("".join(texts), first or seconds, seconds, counts)


@asynccontextmanager
async def _client(address: str) -> AsyncIterator[httpx.AsyncClient]:
    """Connect to a server until the block ends; ForedraftError if it cannot be reached, or ends a connection."""
    limits = httpx.Limits(max_connections=None)
    try:
        async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as client:  # noqa: S113  # requests wait in the server's queue
            yield client
    except (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise ForedraftError(f"There is no server at {address} ({error}); start it, or correct the address.") from error
    except httpx.TransportError as error:
        raise ForedraftError(f"The server at {address} ended a connection ({told(error)}).") from error


async def loads(
    address: str, bodies: Sequence[Body], streams: Sequence[int], rounds: int, ways: Sequence[str]
) -> list[Load]:
    """Measure every way for every number of streams in every round, the ways in alternating order.

    UsageError for too few bodies, and ForedraftError if the server rejects a request or reports an error.
    """
    found, shares = [], shared_out(bodies, streams, rounds)
    async with _client(address) as client:
        other = [{"role": "user", "content": "Count to twenty."}]  # none of the measured prompts
        for way in ways:
            await _load(client, [{**body, "messages": other} for body in bodies[:_WARM_UP]], 1, way)
        for turn in range(rounds):
            for count in streams:
                own = next(shares)
                found += [await _load(client, own, count, way) for way in ways[:: (-1) ** turn]]
    return found


def shared_out(bodies: Sequence[Any], streams: Sequence[int], rounds: int) -> Iterator[Sequence[Any]]:
    """Divide the bodies among the loads of all rounds, with the same number per stream; UsageError for too few.

    No body is used twice in one way, because drafts for a repeated text are unusually good.
    """
    needed = rounds * sum(streams)
    each = len(bodies) // needed
    if not each:
        raise UsageError(
            f"{rounds} rounds of {' + '.join(map(str, streams))} streams need {needed} prompts, and there are "
            f"{len(bodies)}; give more --prompts, fewer --rounds, or fewer --streams."
        )
    waiting = iter(bodies)
    return iter([list(islice(waiting, each * count)) for _ in range(rounds) for count in streams])


async def _load(client: httpx.AsyncClient, bodies: Sequence[Body], streams: int, way: str) -> Load:
    """Send all bodies, `streams` at a time, and measure the answers."""
    slots = asyncio.Semaphore(streams)

    async def answer(body: Body) -> Reply:
        async with slots:
            return await _answer(client, {**body, **WAYS[way]})

    start = time.perf_counter()
    replies = await asyncio.gather(*map(answer, bodies))
    written = sum(int(reply.usage["completion_tokens"]) for reply in replies)
    speed = written / (time.perf_counter() - start)
    return Load(streams, way, speed, median(each.first for each in replies), tuple(each.text for each in replies))


async def predictions(address: str, model: str, rounds: int) -> list[dict[str, Any]]:
    """Measure a text of a thousand tokens, with a different file in each round; raises the errors of `loads`.

    Of each round: the `seconds` by case, the number of `tokens`, how many of the edited prediction were `accepted`, and
    whether all texts are the `same`. The cases are "plain" and "drafted" without a prediction, "edited" with the text
    itself, five words replaced, as the prediction, and "wrong" with another text.
    """
    found = []
    async with _client(address) as client:
        for turn in range(rounds):
            messages = [{"role": "user", "content": f"Repeat this file, with comments in French:\n\n{_file(turn)}"}]
            body = {"model": model, "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "messages": messages}
            text = (await _answer(client, {**body, **WAYS[PLAIN]})).text
            words, ways = text.split(" "), dict(WAYS)
            for edit in range(_EDITS):  # evenly spread
                words[(2 * edit + 1) * len(words) // (2 * _EDITS)] = "replaced_by_an_edit"
            wrong = " ".join(sorted(set(text.split()))) + " and nothing else that was asked for. " * 60
            for name, content in (("edited", " ".join(words)), ("wrong", wrong)):
                ways[name] = {"prediction": {"type": "content", "content": content}}
            replies = {way: await _answer(client, {**body, **ways[way]}) for way in list(ways)[:: (-1) ** turn]}
            accepted = replies["edited"].usage["completion_tokens_details"]["accepted_prediction_tokens"]
            tokens = int(replies[PLAIN].usage["completion_tokens"])
            same = len({reply.text for reply in replies.values()}) == 1
            seconds = {way: replies[way].seconds for way in ways}
            found.append({"seconds": seconds, "tokens": tokens, "accepted": accepted, "same": same})
    return found


async def turns(address: str, model: str, rounds: int) -> list[dict[str, Any]]:
    """Measure how much a second turn of a conversation of about 1,500 tokens gains from the cached first one.

    Of each round: the seconds to the `first` and `second` turn's first text, and the first one's `prompt_tokens`, None
    if the server does not count them. Raises the errors of `loads`.
    """
    found = []
    body = {"model": model, "max_tokens": 16, "temperature": 0}
    async with _client(address) as client:
        for number in range(rounds):
            question = f"Here is a file:\n{_file(number)}\n{_file(number + rounds)[:1400]}\nWhat does it do?"
            messages = [{"role": "user", "content": question}]
            one = await _answer(client, {**body, "messages": messages})
            messages += [{"role": "assistant", "content": one.text}, {"role": "user", "content": "Say it in one word."}]
            two = await _answer(client, {**body, "messages": messages})
            counted = one.usage.get("prompt_tokens")
            found.append({"first": one.first, "second": two.first, "prompt_tokens": counted})
    return found


def _file(number: int) -> str:
    """Return a file of about a thousand tokens, different for each number."""
    return "\n".join(
        f"def area_{i}(width, height):\n    # The area of shape number {i}.\n    return {i} * width * height\n"
        for i in range(30 * number + 1, 30 * number + 27)
    )
