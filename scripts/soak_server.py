"""Load-test a server with misbehaving clients, and check every text.

`python scripts/soak_server.py --minutes 20 --clients 64`. Requests, some of them with tools, thoughts or a schema, are
answered by plain decoding, one at a time; then they are drafted, one at a time and eight at once. Clients concurrently
request such answers with and without streaming, cancel, read slowly, and send damaged bodies. Then the server is killed
while it works and restarted, and all requests are made again. Each finished answer is compared with plain decoding's.
The exit status is 1 if one differs or is lost, a log-probability differs by more than 1e-5, or memory grows.
"""

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

from foredraft.bench.tasks import load_tasks

BUSY = (429, 503)
MOST_GROWTH = 1.1  # memory at the end / after the first samples, when all that is learned has its room; chosen
CACHE = ("--kv-cache-gib", "0.4")  # so small that all of its memory is in use after minutes; chosen
FIRST_SAMPLES = 20  # of 15 seconds each: it grew for five minutes on 2 cores
WAYS: list[Any] = [None, None, False, {"method": "prompt_lookup"}, {"method": "adaptix", "num_speculative_tokens": 7}]


NEAR = 1e-5  # difference of log-probabilities
CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city", "days"], "additionalProperties": False,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]
KINDS: tuple[dict[str, Any], ...] = (
    {}, {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object"}}, {"chat_template_kwargs": {"enable_thinking": True}},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, {"tools": TOOLS},
    {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}},
)  # fmt: skip
Said = dict[str, Any]  # of an answer: content, reasoning, calls, finish
Known = list[tuple[dict[str, Any], Said]]


def bodies(count: int, data: Path | None, *, tools: bool) -> list[dict[str, Any]]:
    """Return different request bodies, those with tools only if asked for."""
    prompts = [task.turns[0] for task in load_tasks((), data, count) if len(task.turns[0]) < 1500]
    kinds = [kind for kind in KINDS if tools or "tools" not in kind]
    found = []
    for number in range(count):
        said = [{"role": "user", "content": prompts[number % len(prompts)]}]
        options: dict[str, Any] = {"temperature": 0.0} if number % 2 else {"temperature": 0.7, "seed": number}
        found.append({"messages": said, "max_tokens": 16 + 24 * (number % 5)} | options | kinds[number % len(kinds)])
    return found


def said_by(choice: dict[str, Any]) -> Said:
    """Return what an answer says."""
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    text, thought = message["content"] or "", message.get("reasoning_content", "")
    return {"content": text, "reasoning": thought, "calls": calls, "finish": choice["finish_reason"]}


def said_in(chunks: list[dict[str, Any]]) -> Said:
    """Return what a streamed answer says."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    for choice in (choice for chunk in chunks for choice in chunk.get("choices", ())):
        delta, finish = choice["delta"], choice["finish_reason"] or finish
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return said_by({"message": message, "finish_reason": finish})


async def all_said(
    address: str, asked: list[dict[str, Any]], at_once: int, **fields: Any
) -> list[tuple[Said, list[float]]]:
    """Return what the answers to all bodies say, so many at once, and their log-probabilities."""
    room = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=address, timeout=600) as http:

        async def one(body: dict[str, Any]) -> tuple[Said, list[float]]:
            async with room:
                answer = await http.post(CHAT, json=body | {"logprobs": True} | fields)
            answer.raise_for_status()
            choice = answer.json()["choices"][0]
            return said_by(choice), [token["logprob"] for token in choice["logprobs"]["content"]]

        return await asyncio.gather(*(one(body) for body in asked))


def differences(how: str, plain: list[tuple[Said, list[float]]], drafted: list[tuple[Said, list[float]]]) -> list[str]:
    """Return a line for each answer that differs from plain decoding's, and print how many do and by how much."""
    far = [
        max((abs(one - other) for one, other in zip(first, second, strict=False)), default=0.0)
        for (_, first), (_, second) in zip(plain, drafted, strict=True)
    ]
    wrong = [
        f"{how}: {found} ({distance:.1g}) instead of {expected}"
        for (expected, _), (found, _), distance in zip(plain, drafted, far, strict=True)
        if expected != found or distance > NEAR
    ]
    print(f"{how}: {len(wrong)} of {len(plain)} differ; log-probabilities by {max(far):.1g} at most", flush=True)
    return wrong


def damaged(body: bytes, rng: random.Random) -> bytes:
    """Return a body with some bytes changed, removed or repeated."""
    data = bytearray(body)
    for _ in range(rng.randint(1, 8)):
        place = rng.randrange(len(data))
        how = rng.random()
        if how < 0.5:
            data[place] = rng.randrange(256)
        elif how < 0.8:
            del data[place : place + rng.randint(1, 20)]
        else:
            data[place:place] = data[: rng.randint(1, 20)]
        data = data or bytearray(b"{")
    return bytes(data)


class Soak:
    """Clients of a server at `address` until the time `until`, with counts of their actions and a list of errors."""

    def __init__(self, address: str, known: Known, until: float) -> None:
        self.address, self.known, self.until = address, known, until
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def client(self, number: int) -> None:
        """Perform random actions until the time is over."""
        rng = random.Random(number)  # noqa: S311  # not a secret
        async with httpx.AsyncClient(base_url=self.address, timeout=300) as http:
            while time.monotonic() < self.until:
                act = rng.choices((self.whole, self.stream, self.cancel, self.garbage), (4, 6, 2, 2))[0]
                try:
                    await act(http, rng)
                except httpx.HTTPError as error:
                    self.wrong.append(f"{act.__name__}: {type(error).__name__} {error}")

    def body(self, rng: random.Random) -> tuple[dict[str, Any], Said]:
        """Return a request with random drafting options, and its expected text."""
        body, said = rng.choice(self.known)
        way = rng.choice(WAYS)
        predicts = way is None and rng.random() < 0.3
        predicted = {"prediction": {"type": "content", "content": said["content"][5:]}} if predicts else {}
        return body | ({} if way is None else {"speculative": way}) | predicted, said

    def check(self, act: str, said: Said, expected: Said) -> None:
        """Compare a finished answer with the expected one."""
        self.counts[act] += 1
        self.counts["with calls"] += bool(said["calls"])
        if said != expected:
            self.wrong.append(f"{act}: {said} instead of {expected}")

    async def whole(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Request an answer without streaming, sometimes one of several, or with log-probabilities."""
        body, said = self.body(rng)
        more: dict[str, Any] = rng.choice([{}, {}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}])
        answer = await http.post(CHAT, json=body | more)
        if answer.status_code in BUSY:
            self.counts["busy"] += 1
            await asyncio.sleep(float(answer.headers["retry-after"]) * rng.random())
        elif answer.status_code != 200:
            self.wrong.append(f"whole: {answer.status_code} {answer.text[:200]}")
        else:
            self.check("whole", said_by(answer.json()["choices"][0]), said)

    async def stream(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Read a streamed answer, sometimes slowly."""
        body, expected = self.body(rng)
        slow, chunks, done = rng.random() < 0.2, [], False
        async with http.stream("POST", CHAT, json=body | {"stream": True}) as answer:
            if answer.status_code in BUSY:
                self.counts["busy"] += 1
                return
            async for line in answer.aiter_lines():
                if slow:
                    await asyncio.sleep(0.2)
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    chunks.append(json.loads(line[6:]))
        if not done:
            self.wrong.append("stream: ended without [DONE]")
        self.check("slow stream" if slow else "stream", said_in(chunks), expected)

    async def cancel(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Disconnect in the middle of an answer."""
        body, _ = self.body(rng)
        async with http.stream("POST", CHAT, json=body | {"stream": True}) as answer:
            left = rng.randint(0, 12)
            async for _line in answer.aiter_lines():
                left -= 1
                if left < 0:
                    break
        self.counts["cancelled"] += 1

    async def garbage(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Send a damaged body, which may still be a valid request with an unknown text."""
        body = damaged(json.dumps(self.body(rng)[0]).encode(), rng)
        answer = await http.post(CHAT, content=body, headers={"content-type": "application/json"})
        self.counts[f"damaged body: {answer.status_code}"] += 1
        if answer.status_code >= 500 and answer.status_code not in BUSY:
            self.wrong.append(f"damaged body: {answer.status_code} {answer.text[:200]} for {body[:200]!r}")


def started(model: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server process; return it and its address."""
    command = [sys.executable, "-m", "foredraft", "serve", model, "--port", "0", *CACHE]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  # what is started is this package
    assert process.stdout is not None, "it is a pipe"
    return process, process.stdout.readline().partition("/v1 ")[0]


def tools_are_taken(address: str) -> bool:
    """Return whether the model's chat template takes tools."""
    body = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1, "tools": TOOLS}
    return httpx.post(f"{address}{CHAT}", json=body, timeout=600).status_code == 200


async def watch(process: subprocess.Popen[str], until: float) -> list[int]:
    """Return the server's resident memory in MiB, sampled every 15 seconds."""
    found, server = [], psutil.Process(process.pid)
    while time.monotonic() < until:
        found.append(server.memory_info().rss >> 20)
        await asyncio.sleep(15)
    return found


async def soaked(process: subprocess.Popen[str], soak: Soak, clients: int) -> list[int]:
    """Run all clients; return the samples of the server's memory."""
    memory, *_ = await asyncio.gather(watch(process, soak.until), *(soak.client(number) for number in range(clients)))
    return memory


async def interrupted(process: subprocess.Popen[str], soak: Soak) -> None:
    """Kill the server while clients use it."""

    async def kill() -> None:
        await asyncio.sleep(4)
        process.send_signal(signal.SIGKILL)

    await asyncio.gather(kill(), *(soak.client(number) for number in range(16)))


def main() -> None:
    """Run the load test and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, help="folder of the tasks' files; by default the embedded set")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--texts", type=int, default=40, help="number of different requests")
    given = parser.parse_args()
    process, address = started(given.model)
    asked = bodies(given.texts, given.data, tools=tools_are_taken(address))
    plain = asyncio.run(all_said(address, asked, 1, speculative=False))
    wrong = differences("alone", plain, asyncio.run(all_said(address, asked, 1)))
    wrong += differences("eight at once", plain, asyncio.run(all_said(address, asked, 8)))
    known = [(body, said) for body, (said, _) in zip(asked, plain, strict=True)]
    soak = Soak(address, known, time.monotonic() + 60 * given.minutes)
    memory = asyncio.run(soaked(process, soak, given.clients))
    last = Soak(address, known, time.monotonic() + 6)
    asyncio.run(interrupted(process, last))
    process.wait()
    process, address = started(given.model)
    soak.wrong += wrong + differences("after the restart", plain, asyncio.run(all_said(address, asked, 8)))
    process.send_signal(signal.SIGTERM)
    status = process.wait()
    for what, count in sorted(soak.counts.items()):
        print(f"{count:8} {what}")
    samples = memory[:: max(len(memory) // 12, 1)]
    if len(memory) > FIRST_SAMPLES and memory[-1] > MOST_GROWTH * memory[FIRST_SAMPLES]:
        soak.wrong.append(f"memory grew from {memory[FIRST_SAMPLES]} to {memory[-1]} MiB")
    print(f"memory: {samples} MiB; stopped with {status}")
    print(f"{len(soak.wrong)} wrong" + "".join(f"\n  {each}" for each in soak.wrong[:20]))
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
