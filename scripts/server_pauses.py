"""Send a server what is long or hostile, and print how long its other clients waited meanwhile.

`python scripts/server_pauses.py ADDRESS MODEL`. A stream and short questions run beside each request. Of the requests
the status and the seconds are printed; of the others the longest time between two pieces of the stream, and the
longest short question, each beside what it was without the request.
"""

import argparse
import asyncio
import contextlib
import json
import time
from typing import Any

import httpx

IDLE_SECONDS = 5.0  # for which the others are watched alone
LEAST_SECONDS = 2.0  # for which they are watched with each request
CHAT = "/v1/chat/completions"


def asked(text: str = "Hello.", **fields: Any) -> dict[str, Any]:
    """Return the body of a short request."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0, **fields}


def formed(schema: Any) -> dict[str, Any]:
    """Return the body of a request for JSON of a schema."""
    return asked(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})


def matching(pattern: str) -> dict[str, Any]:
    """Return the body of a request for a text that a regular expression matches."""
    return asked(response_format={"type": "regex", "pattern": pattern})


def nested(depth: int, schema: Any) -> Any:
    """Return a schema of alternatives of alternatives."""
    for number in range(depth):
        schema = {"anyOf": [{"type": "object", "properties": {f"p{number}_{each}": schema}} for each in range(4)]}
    return schema


def cases() -> dict[str, Any]:
    """Return the bodies by what they are; bytes are sent as they are."""
    words = "time " * 790_000
    texts = {"type": "string"}
    parts = [{"type": "text", "text": "a"}] * 4000
    loop = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    wide = {"type": "object", "properties": {f"p{each}": texts for each in range(5000)}}
    return {
        "prompt of 6,000 tokens": asked("time and tide wait " * 1500),
        "prompt of 3.9 MB": asked(words),
        "prediction of 3.9 MB": asked(prediction={"type": "content", "content": words}),
        "100,000 messages": asked() | {"messages": [{"role": "user", "content": "a"}] * 100_000},
        "100,000 parts in messages": asked() | {"messages": [{"role": "user", "content": parts}] * 25},
        "30,000 tools": asked(tools=[{"type": "function", "function": {"name": "f"}}] * 30_000),
        "list of 1,900,000 ids": {"prompt": [5] * 1_900_000, "max_tokens": 4},
        "first schema": formed({"type": "object", "properties": {"a": texts, str(time.time()): {"type": "integer"}}}),
        "first logprobs": asked(logprobs=True, top_logprobs=5),
        "schema: itself": formed({"$ref": "#"}),
        "schema: a loop": formed(loop),
        "schema: 5,000 optional properties": formed(wide),
        "schema: alternatives, 4 ** 7": formed(nested(7, texts)),
        "schema: 60,000 values": formed({"enum": [f"value{each}" for each in range(60_000)]}),
        "schema: minItems 10 ** 9": formed({"type": "array", "minItems": 10**9, "items": texts}),
        "schema: multiple of 999999937": formed({"type": "integer", "multipleOf": 999_999_937}),
        "schema: 4,000 nested arrays": json.dumps(formed("X")).replace('"X"', '{"items":' * 4000 + "{}" + "}" * 4000),
        "regex: (a{1000}){1000}": matching("(a{1000}){1000}"),
        "regex: nothing": matching(r"[^\s\S]"),
        "regex: look-ahead": matching("(?=a)b"),
        "regex: 1 MB": matching("a(b|c)*" * 150_000),
        "regex: .*a.{500}": matching(".*a.{500}"),
        "regex: (.*a){200}": matching("(.*a.*b){200}[0-9]{100,1000}"),
        "not UTF-8": b'{"messages": "\xff"}',
        "10,000 nested lists": b"[" * 10_000,
    }  # fmt: skip


class Others:
    """A stream without an end and short questions, and the seconds that they waited since `reset`."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self.http, self.model = http, model
        self.reset()

    def reset(self) -> None:
        self.pause = self.question = 0.0

    async def stream(self) -> None:
        body = asked("Tell me a story.", model=self.model, max_tokens=4000, ignore_eos=True, stream=True, temperature=1)
        while True:
            async with self.http.stream("POST", CHAT, json=body) as answer:
                before = None
                async for _ in answer.aiter_lines():
                    now = time.monotonic()
                    self.pause, before = max(self.pause, now - (before or now)), now

    async def ask(self) -> None:
        while True:
            began = time.monotonic()
            await self.http.post(CHAT, json=asked("What is it?", model=self.model))
            self.question = max(self.question, time.monotonic() - began)
            await asyncio.sleep(0.05)


async def run(address: str, model: str) -> None:
    """Print a line for each case."""
    prepared = {
        name: json.dumps(body | {"model": model}) if isinstance(body, dict) else body for name, body in cases().items()
    }
    async with httpx.AsyncClient(base_url=address, timeout=300) as http:
        others = Others(http, model)
        tasks = [asyncio.create_task(work()) for work in (others.stream, others.ask)]
        await asyncio.sleep(IDLE_SECONDS)
        others.reset()
        await asyncio.sleep(IDLE_SECONDS)
        print(f"{'':36} status  seconds   stream  question")
        print(f"{'nothing':36} {'':6} {'':8} {others.pause:8.2f}  {others.question:8.2f}")
        for name, body in prepared.items():
            others.reset()
            began = time.monotonic()
            answer = await http.post("/v1/completions" if "ids" in name else CHAT, content=body)
            seconds = time.monotonic() - began
            await asyncio.sleep(max(LEAST_SECONDS - seconds, 0.5))
            told = "" if answer.status_code == 200 else answer.text[:110]
            print(
                f"{name:36} {answer.status_code:6} {seconds:8.2f} {others.pause:8.2f}  {others.question:8.2f}  {told}",
                flush=True,
            )
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("model")
    given = parser.parse_args()
    asyncio.run(run(given.address, given.model))


if __name__ == "__main__":
    main()
