"""Replay: recorded texts drive the drafters without any model.

A record's answer stands in for the target: at each step the drafter guesses, and the guesses that the record continues
with are accepted. Knows drafters and ids; the only text it reads is a file of records.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from foredraft.bench.drafts import DraftTally, Reliability
from foredraft.bench.tasks import read_json_lines
from foredraft.contracts import Budget, Draft, DraftContext, Drafter, SequenceView, TokenIds, Verdict
from foredraft.control import cut
from foredraft.errors import UsageError
from foredraft.graph.tree import ROOT


@dataclass(frozen=True, slots=True)
class Record:
    """A recorded prompt and answer.

    Attributes:
        prompt: what was asked.
        output: what was answered.
        sampling: how, such as "greedy"; "" where the file does not say.
    """

    prompt: str
    output: str
    sampling: str


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one drafter made of the records at one budget.

    Attributes:
        records: how many were replayed.
        tokens: of all answers.
        steps: forward passes a target would have needed.
        drafted: nodes.
        accepted: drafted tokens that the records hold.
        tokens_by_record: int64[records], tokens of each answer.
        steps_by_record: int64[records], forward passes of each.
        reliability: how far the drafter's estimates were right; empty where it gives none.
        propose_nanoseconds: int64[steps], the time of each `propose`.
    """

    records: int
    tokens: int
    steps: int
    drafted: int
    accepted: int
    tokens_by_record: np.ndarray
    steps_by_record: np.ndarray
    reliability: tuple[Reliability, ...]
    propose_nanoseconds: np.ndarray

    @property
    def tokens_per_target_step(self) -> float:
        """Tokens / steps over all records: the micro average."""
        return self.tokens / max(self.steps, 1)

    @property
    def macro(self) -> float:
        """Mean over records of tokens / steps; 0 of no record."""
        return float(np.mean(self.tokens_by_record / self.steps_by_record)) if self.records else 0.0

    @property
    def quarters(self) -> tuple[float, ...]:
        """Tokens / steps over the first, second, third and last quarter of the records; fewer of fewer than four."""
        pairs = zip(*(np.array_split(each, 4) for each in (self.tokens_by_record, self.steps_by_record)), strict=True)
        return tuple(float(tokens.sum() / steps.sum()) for tokens, steps in pairs if len(steps))

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name, times in microseconds."""
        micros = self.propose_nanoseconds / 1e3
        return {
            "records": self.records,
            "tokens": self.tokens,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens_per_target_step": self.tokens_per_target_step,
            "tokens_per_target_step_macro": self.macro,
            "tokens_per_target_step_by_quarter": self.quarters,
            "reliability": [asdict(each) for each in self.reliability],
            "propose_median_us": float(np.median(micros)) if len(micros) else 0.0,
            "propose_p99_us": float(np.quantile(micros, 0.99)) if len(micros) else 0.0,
        }


def read_records(path: Path) -> list[Record]:
    """Read records from JSON lines with `prompt` and `output`, and `sampling` if they say.

    Raises:
        UsageError: no such file, a line that is no record, or no record at all.
    """
    records = [_record(row, path, number) for number, row in read_json_lines(path)]
    if not records:
        raise UsageError(f"{path} holds no record; each line needs `prompt` and `output`.")
    return records


def _record(row: Any, path: Path, number: int) -> Record:
    if not isinstance(row, Mapping) or not all(isinstance(row.get(name), str) for name in ("prompt", "output")):
        raise UsageError(f"Line {number} of {path} has no texts `prompt` and `output`.")
    return Record(row["prompt"], row["output"], str(row.get("sampling", "")))


def encode_records(records: Iterable[Record], tokenizer: Any) -> list[tuple[TokenIds, TokenIds]]:
    """Return prompt ids, through the chat template where there is one, and output ids, int64[n] each."""
    encoded = []
    for record in records:
        if getattr(tokenizer, "chat_template", None):
            message = [{"role": "user", "content": record.prompt}]
            prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        else:
            prompt = record.prompt
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, record.output)]
        if ids[0] and ids[1]:
            encoded.append((np.array(ids[0], np.int64), np.array(ids[1], np.int64)))
    return encoded


def replay(drafter: Drafter, texts: Sequence[tuple[TokenIds, TokenIds]], nodes: int, vocabulary: int) -> ReplayResult:
    """Drive `drafter` through every text, with at most `nodes` nodes a step; each text is a sequence of its own."""
    steps_by_record = np.zeros(len(texts), np.int64)
    tally, times = DraftTally(drafter.source_names), []
    for number, (prompt, output) in enumerate(texts):
        for verdict, elapsed in replay_steps(drafter, prompt, output, nodes, vocabulary):
            steps_by_record[number] += 1
            tally.add(verdict)
            times.append(elapsed)
    tokens_by_record = np.array([len(output) for _, output in texts], np.int64)
    counts = tally.counts()
    return ReplayResult(
        len(texts), int(tokens_by_record.sum()), int(steps_by_record.sum()), sum(counts.drafted_by_depth),
        sum(counts.accepted_by_depth), tokens_by_record, steps_by_record, counts.reliability,
        np.array(times, np.int64),
    )  # fmt: skip


def resident_bytes() -> int:
    """Return how much memory this process has in use now, mapped pages included; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def replay_steps(
    drafter: Drafter, prompt: TokenIds, output: TokenIds, nodes: int, vocabulary: int
) -> Iterator[tuple[Verdict, int]]:
    """Yield each step's verdict and the nanoseconds of its `propose`.

    Raises:
        ValueError: the drafter proposed something that is no tree, or the replay did not reproduce the record.
    """
    ids = np.concatenate([prompt, output])
    ids.flags.writeable = False
    drafting = drafter.open(DraftContext(vocabulary, seed=0, max_nodes=nodes))
    length = len(prompt)
    written: list[int] = []
    try:
        while length < len(ids):
            budget = Budget(nodes, len(ids) - length - 1)
            start = perf_counter_ns()
            draft = drafting.propose(SequenceView(ids[:length], len(prompt)), budget)
            elapsed = perf_counter_ns() - start
            draft = cut(draft, budget)
            draft.check()
            verdict = _follow(draft, ids[length:].tolist(), length - 1)
            written.extend(verdict.tokens)
            length += len(verdict.tokens)
            drafting.observe(verdict)
            yield verdict, elapsed
    finally:
        drafting.close()
    if written != output.tolist():
        raise ValueError("The replayed output differs from the record; this is a defect of the replay.")


def _follow(draft: Draft, future: list[int], at: int) -> Verdict:
    """Return the verdict of a target that writes `future`."""
    child_of = draft.child_of()
    node, path = ROOT, []
    for token in future:
        child = child_of.get((node, token))
        if child is None:
            break
        path.append(child)
        node = child
    return Verdict(tuple(future[: len(path) + 1]), tuple(path), draft, at)
