"""Compare drafting methods inside vLLM: tokens per second and per step of one server per method on the same prompts.

Runs in the environment of `make test-vllm`: `.venv-vllm/bin/python scripts/compare_vllm.py --data PROMPTS`. All
servers run at the same time; each group of prompts goes to all of them, one after the other, in random order.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from foredraft.bench.summary import LOOP_SHARE, repeated_share
from foredraft.bench.tasks import DEFAULT_TASKS, TaskPrompt, load_task
from foredraft.model.gguf.files import SMOLLM2
from foredraft.model.loading import located
from vllm_server import Answer, complete, counter, proposer, serving

FIRST_PORT = 8760


@dataclass(slots=True)
class Tally:
    """The results of a method on a task.

    Attributes:
        answers: one per prompt.
        seconds: for each group of prompts.
        drafted: tokens, by vLLM's counter.
        accepted: tokens, by vLLM's counter, which also counts tokens after the end of a text.
        iterations: passes of the model, by vLLM's counter.
        streams: concurrent requests.
    """

    answers: list[Answer] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    drafted: float = 0.0
    accepted: float = 0.0
    iterations: float = 0.0
    streams: int = 1

    @property
    def tokens(self) -> int:
        """Number of emitted tokens."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_target_step(self) -> float:
        """Tokens per decoding step of a request; the first token comes from the prompt's pass and is not counted.

        With one stream, steps are passes of the model. With several, they are derived from the accepted tokens, which
        overestimates the last step of each text.
        """
        after_first = self.tokens - len(self.answers)
        if self.streams == 1:
            return after_first / (self.iterations - len(self.answers))
        return after_first / (after_first - self.accepted)

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each group."""
        groups = (self.answers[start : start + self.streams] for start in range(0, len(self.answers), self.streams))
        tokens = (sum(len(answer.token_ids) for answer in group) for group in groups)
        return [each / seconds for each, seconds in zip(tokens, self.seconds, strict=True)]


def methods(most: int, table: str | None, store: str | None) -> dict[str, tuple[Any, Any]]:
    """Return each method's `speculative_config` and options."""
    adaptix = {"method": "adaptix"} | ({"table": table} if table else {})
    stored = {"store": store} if store else {}
    auto = {"method": "auto", **stored} | ({"table": table} if table else {})
    own = {"rest, own store": (proposer(most), {"method": "rest", **stored})} if store else {}
    ngram = {"method": "ngram", "num_speculative_tokens": most, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    return {
        "none": (None, None),
        "vLLM ngram": (ngram, None),
        "vLLM suffix": ({"method": "suffix", "num_speculative_tokens": most}, None),
        "adaptix": (proposer(most), adaptix),
        "auto": (proposer(most), auto),
        "rest": (proposer(most), {"method": "rest"}),
        **own,
    }


@contextmanager
def started(configurations: Mapping[str, tuple[Any, Any]]) -> Iterator[dict[str, str]]:
    """Start a server for each method, and yield their addresses.

    Start new servers for every number of streams: vLLM's suffix decoding caches its answers.
    """
    with ExitStack() as stack:
        folder, model = Path(stack.enter_context(tempfile.TemporaryDirectory())), located(SMOLLM2)
        servers = [
            serving(model, FIRST_PORT + number, folder / f"{number}.log", *configuration)
            for number, configuration in enumerate(configurations.values())
        ]
        with ThreadPoolExecutor(len(servers)) as pool:  # each takes up to a minute to start
            urls = dict(zip(configurations, pool.map(stack.enter_context, servers), strict=True))
        for url in urls.values():  # the first request includes one-time work
            complete(url, "def main():", 32)
        yield urls


def measure(
    urls: Mapping[str, str], prompts: Sequence[TaskPrompt], streams: int, tokens: int, temperature: float
) -> dict[str, Tally]:
    """Send the prompts in groups of `streams` to every server, in random order."""
    order, tallies = random.Random(0), {name: Tally(streams=streams) for name in urls}  # noqa: S311  # an order, no secret
    before = {name: counts(url) for name, url in urls.items()}
    for start in range(0, len(prompts), streams):
        group = prompts[start : start + streams]
        for name in order.sample(list(urls), len(urls)):
            clock = time.perf_counter()
            with ThreadPoolExecutor(streams) as pool:
                answers = pool.map(
                    lambda prompt, url=urls[name]: complete(url, prompt.prompt(), tokens, temperature, prompt.number),
                    group,
                )
                tallies[name].answers += list(answers)
            tallies[name].seconds.append(time.perf_counter() - clock)
    for name, url in urls.items():
        tally, more = tallies[name], (b - a for a, b in zip(before[name], counts(url), strict=True))
        tally.drafted, tally.accepted, tally.iterations = more
    return tallies


def counts(url: str) -> list[float]:
    """Return a server's counters: drafted and accepted tokens, and passes of the model."""
    names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "iteration_tokens_total_count")
    return [counter(url, name) for name in names]


def rows(task: str, streams: int, tallies: Mapping[str, Tally]) -> list[str]:
    """Return the table row of each method."""
    plain = tallies["none"]
    lines = []
    for name, tally in tallies.items():
        same = sum(a.token_ids == b.token_ids for a, b in zip(tally.answers, plain.answers, strict=True))
        loops = sum(repeated_share(answer.token_ids) > LOOP_SHARE for answer in tally.answers)
        speed, base = (each.tokens / sum(each.seconds) for each in (tally, plain))
        paired = median(own / theirs for own, theirs in zip(tally.speeds, plain.speeds, strict=True))
        rate = f"{tally.accepted / tally.drafted:.2f}" if tally.drafted else "-"
        lines.append(
            f"| {task} | {streams} | {name} | {same}/{len(tally.answers)} | {tally.tokens_per_target_step:.2f} | "
            f"{rate} | {speed:.0f} | {speed / base:.2f} | {paired:.2f} | {loops} |"
        )
    return lines


def main() -> None:
    """Start the servers, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the tasks' files")
    parser.add_argument("--task", action="append", choices=DEFAULT_TASKS, help="repeatable; all three by default")
    parser.add_argument("--prompts", type=int, default=30, help="per task")
    parser.add_argument("--tokens", type=int, default=128, help="maximum number of new tokens")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--most", type=int, default=8, help="num_speculative_tokens of every method")
    parser.add_argument("--streams", type=int, action="append", help="concurrent requests; repeatable; default 1 and 8")
    parser.add_argument("--table", help="a tri-gram table for adaptix and auto")
    parser.add_argument("--store", help="a datastore for auto, and for an additional row of rest")
    parser.add_argument("--method", action="append", help="a method; repeatable; all by default; always with none")
    parser.add_argument("--json", type=Path, help="also write the raw data to this file")
    given = parser.parse_args()
    known = methods(given.most, given.table, given.store)
    if unknown := set(given.method or ()) - set(known):
        parser.error(f"no method {unknown.pop()!r}; methods are {', '.join(known)}")
    chosen = {name: each for name, each in known.items() if name in {"none", *(given.method or known)}}
    raw = []
    print(
        "| task | streams | method | same ids | tokens / target step | accepted / drafted | tokens / s | of none | "
        "median | loops |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for streams in given.streams or (1, 8):
        with started(chosen) as urls:
            for task in given.task or DEFAULT_TASKS:
                prompts = load_task(task, given.data, given.prompts)
                tallies = measure(urls, prompts, streams, given.tokens, given.temperature)
                print("\n".join(rows(task, streams, tallies)), flush=True)
                raw += [{"task": task, "method": name, **asdict(tally)} for name, tally in tallies.items()]
    if given.json is not None:
        given.json.write_text(json.dumps(raw, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
