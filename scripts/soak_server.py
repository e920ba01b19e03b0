"""Load-test a server with misbehaving clients, and check every text.

`python scripts/soak_server.py --minutes 20 --clients 64`. Clients concurrently request answers with and without
streaming, cancel, read slowly, send damaged bodies, and fill and remove stores. Each finished text is
compared with plain decoding's. At the end the server is killed while it works and restarted, and its stores are
checked. The exit status is 1 if a text differs, an answer is lost, a store is damaged, or memory grows.
"""

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

import foredraft
from foredraft.bench.tasks import DEFAULT_TASKS, load_tasks
from foredraft.errors import StoreError
from foredraft.index.datastore import MANIFEST, check_datastore

BUSY = (429, 503)
MOST_GROWTH = 1.1  # memory at the end / after the first samples, when all that is learned has its room; chosen
FIRST_SAMPLES = 20  # of 15 seconds each: it grew for five minutes on 2 cores
WAYS: list[Any] = [None, None, False, {"method": "prompt_lookup"}, {"method": "adaptix", "num_speculative_tokens": 7}]


def requests(model: str, count: int, data: Path | None) -> list[tuple[dict[str, Any], str]]:
    """Return request bodies, each with plain decoding's text."""
    tasks = load_tasks(DEFAULT_TASKS, data, count)
    prompts = [task.turns[0] for task in tasks if len(task.turns[0]) < 1500][:count]
    writer = foredraft.load(model, method="none")
    found = []
    for number, prompt in enumerate(prompts):
        said = [{"role": "user", "content": prompt}]
        options: dict[str, Any] = {"temperature": 0.0} if number % 2 else {"temperature": 0.7, "seed": number}
        tokens = 16 + 24 * (number % 5)
        text = writer.generate(said, max_new_tokens=tokens, **options).text
        found.append(({"messages": said, "max_tokens": tokens} | options, text))
    return found


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

    def __init__(self, address: str, known: list[tuple[dict[str, Any], str]], until: float) -> None:
        self.address, self.known, self.until = address, known, until
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def client(self, number: int) -> None:
        """Perform random actions until the time is over."""
        rng = random.Random(number)  # noqa: S311  # not a secret
        async with httpx.AsyncClient(base_url=self.address, timeout=300) as http:
            while time.monotonic() < self.until:
                act = rng.choices((self.whole, self.stream, self.cancel, self.garbage, self.store), (4, 6, 2, 2, 1))[0]
                try:
                    await act(http, rng)
                except httpx.HTTPError as error:
                    self.wrong.append(f"{act.__name__}: {type(error).__name__} {error}")

    def body(self, rng: random.Random) -> tuple[dict[str, Any], str]:
        """Return a request with random drafting options, and its expected text."""
        body, text = rng.choice(self.known)
        way = rng.choice(WAYS)
        predicted = (
            {"prediction": {"type": "content", "content": text[5:]}} if way is None and rng.random() < 0.3 else {}
        )
        return body | ({} if way is None else {"speculative": way}) | predicted, text

    def check(self, act: str, text: str, expected: str, finish: str | None) -> None:
        """Compare a finished text with the expected one."""
        self.counts[act] += 1
        if text != expected or finish not in ("stop", "length"):
            self.wrong.append(f"{act}: {text[:60]!r} ({finish}) instead of {expected[:60]!r}")

    async def whole(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Request an answer without streaming, sometimes one of several, or with log-probabilities."""
        body, text = self.body(rng)
        more: dict[str, Any] = rng.choice([{}, {}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}])
        answer = await http.post("/v1/chat/completions", json=body | more)
        if answer.status_code in BUSY:
            self.counts["busy"] += 1
            await asyncio.sleep(float(answer.headers["retry-after"]) * rng.random())
        elif answer.status_code != 200:
            self.wrong.append(f"whole: {answer.status_code} {answer.text[:200]}")
        else:
            choice = answer.json()["choices"][0]
            self.check("whole", choice["message"]["content"], text, choice["finish_reason"])

    async def stream(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Read a streamed answer, sometimes slowly."""
        body, expected = self.body(rng)
        slow, pieces, finish, done = rng.random() < 0.2, [], None, False
        async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            if answer.status_code in BUSY:
                self.counts["busy"] += 1
                return
            async for line in answer.aiter_lines():
                if slow:
                    await asyncio.sleep(0.2)
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:]).get("choices", []):
                        pieces.append(choice["delta"].get("content") or "")
                        finish = choice["finish_reason"] or finish
        if not done:
            self.wrong.append("stream: ended without [DONE]")
        self.check("slow stream" if slow else "stream", "".join(pieces), expected, finish)

    async def cancel(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Disconnect in the middle of an answer."""
        body, _ = self.body(rng)
        async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            left = rng.randint(0, 12)
            async for _line in answer.aiter_lines():
                left -= 1
                if left < 0:
                    break
        self.counts["cancelled"] += 1

    async def garbage(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Send a damaged body, which may still be a valid request with an unknown text."""
        body = damaged(json.dumps(self.body(rng)[0]).encode(), rng)
        answer = await http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        self.counts[f"damaged body: {answer.status_code}"] += 1
        if answer.status_code >= 500 and answer.status_code not in BUSY:
            self.wrong.append(f"damaged body: {answer.status_code} {answer.text[:200]} for {body[:200]!r}")

    async def store(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Add to a store, draft from it, or remove it."""
        name, act = f"store{rng.randint(1, 3)}", rng.random()
        if act < 0.5:
            answer = await http.post(f"/v1/stores/{name}/texts", json={"texts": [rng.choice(self.known)[1] + " "]})
        elif act < 0.6:
            answer = await http.delete(f"/v1/stores/{name}")
        else:
            body, text = rng.choice(self.known)
            answer = await http.post("/v1/chat/completions", json=body | {"speculative": {"stores": [name]}})
            if answer.status_code == 200:
                choice = answer.json()["choices"][0]
                self.check("with a store", choice["message"]["content"], text, choice["finish_reason"])
        self.counts[f"store: {answer.status_code}"] += 1
        if answer.status_code >= 500 and answer.status_code not in BUSY:
            self.wrong.append(f"store: {answer.status_code} {answer.text[:200]}")


def started(model: str, stores: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a server process; return it and its address."""
    command = [sys.executable, "-m", "foredraft", "serve", model, "--port", "0", "--stores", str(stores)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  # what is started is this package
    assert process.stdout is not None, "it is a pipe"
    return process, process.stdout.readline().partition("/v1 ")[0]


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
    """Kill the server while clients write stores."""

    async def kill() -> None:
        await asyncio.sleep(4)
        process.send_signal(signal.SIGKILL)

    await asyncio.gather(kill(), *(soak.client(number) for number in range(16)))


def main() -> None:
    """Run the load test and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, help="folder of the tasks' files; by default from the hub")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--texts", type=int, default=40, help="number of different requests")
    given = parser.parse_args()
    known = requests(given.model, given.texts, given.data)
    with tempfile.TemporaryDirectory() as folder:
        stores = Path(folder)
        process, address = started(given.model, stores)
        soak = Soak(address, known, time.monotonic() + 60 * given.minutes)
        memory = asyncio.run(soaked(process, soak, given.clients))
        last = Soak(address, known, time.monotonic() + 6)
        asyncio.run(interrupted(process, last))
        process.wait()
        process, address = started(given.model, stores)
        listed = httpx.get(f"{address}/v1/stores").json()["data"]
        for place in stores.glob(f"*/*/{MANIFEST}"):
            try:
                list(check_datastore(place.parent))
            except StoreError as error:
                soak.wrong.append(f"after the kill: {error}")
        process.send_signal(signal.SIGTERM)
        status = process.wait()
    for what, count in sorted(soak.counts.items()):
        print(f"{count:8} {what}")
    samples = memory[:: max(len(memory) // 12, 1)]
    if len(memory) > FIRST_SAMPLES and memory[-1] > MOST_GROWTH * memory[FIRST_SAMPLES]:
        soak.wrong.append(f"memory grew from {memory[FIRST_SAMPLES]} to {memory[-1]} MiB")
    print(f"memory: {samples} MiB; after the kill {len(listed)} stores; stopped with {status}")
    print(f"{len(soak.wrong)} wrong" + "".join(f"\n  {each}" for each in soak.wrong[:20]))
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
