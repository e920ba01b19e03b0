"""Replay: runs drafters on recorded texts, without a model.

At each step, the drafted tokens that match the recorded answer are accepted. Does not depend on any drafter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.bench.drafts import DraftCounts, count_drafts
from foredraft.bench.tasks import read_json_lines
from foredraft.contracts import Budget, DraftContext, Drafter, SequenceView, TokenIds, Verdict
from foredraft.control import cut
from foredraft.errors import UsageError
from foredraft.graph.tree import ROOT
from foredraft.request import templated


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The results of one drafter at one budget."""

    tokens: npt.NDArray[np.int64]  # int64[records], tokens of each answer
    steps: npt.NDArray[np.int64]  # int64[records], target passes needed for each answer
    counts: DraftCounts
    nanoseconds: npt.NDArray[np.int64]  # int64[steps], time of each `propose`

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name, times in microseconds; "macro" is the mean over records of tokens per step."""
        tokens, steps, micros = int(self.tokens.sum()), int(self.steps.sum()), self.nanoseconds / 1e3
        return {
            "records": len(self.tokens),
            "tokens": tokens,
            "steps": steps,
            "drafted": sum(self.counts.drafted_by_depth),
            "accepted": sum(self.counts.accepted_by_depth),
            "tokens_per_target_step": tokens / max(steps, 1),
            "tokens_per_target_step_macro": float(np.mean(self.tokens / self.steps)) if len(self.tokens) else 0.0,
            "reliability": [asdict(each) for each in self.counts.reliability],
            "propose_median_us": float(np.median(micros)) if len(micros) else 0.0,
            "propose_p99_us": float(np.quantile(micros, 0.99)) if len(micros) else 0.0,
        }


def read_records(path: Path, tokenizer: Any) -> list[tuple[TokenIds, TokenIds]]:
    """Return prompt ids and output ids, int64[n] each, of JSON lines with `prompt` and `output`.

    Prompts go through the chat template, if any; records with an empty text are skipped. UsageError for a file that
    cannot be read, an invalid line, or no record.
    """
    rows = list(read_json_lines(path))
    if not rows:
        raise UsageError(f"{path} holds no record; each line needs `prompt` and `output`.")
    texts, has_template = [], getattr(tokenizer, "chat_template", None)
    for number, row in rows:
        if not isinstance(row, Mapping) or not all(isinstance(row.get(name), str) for name in ("prompt", "output")):
            raise UsageError(f"Line {number} of {path} needs the texts `prompt` and `output`; add them.")
        prompt = row["prompt"]
        question = templated([{"role": "user", "content": prompt}], tokenizer) if has_template else prompt
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in (question, row["output"])]
        if ids[0] and ids[1]:
            texts.append((np.array(ids[0], np.int64), np.array(ids[1], np.int64)))
    return texts


def replay(drafter: Drafter, texts: Sequence[tuple[TokenIds, TokenIds]], nodes: int, vocabulary: int) -> ReplayResult:
    """Run `drafter` on every text, as separate sequences, with at most `nodes` nodes per step."""
    steps, times = [], list[int]()

    def verdicts() -> Iterator[Verdict]:
        for prompt, output in texts:
            before = len(times)
            for verdict, elapsed in replay_steps(drafter, prompt, output, nodes, vocabulary):
                times.append(elapsed)
                yield verdict
            steps.append(len(times) - before)

    counts = count_drafts(verdicts(), drafter.source_names)
    tokens = [len(output) for _, output in texts]
    return ReplayResult(np.array(tokens, np.int64), np.array(steps, np.int64), counts, np.array(times, np.int64))


def replay_steps(
    drafter: Drafter, prompt: TokenIds, output: TokenIds, nodes: int, vocabulary: int
) -> Iterator[tuple[Verdict, int]]:
    """Yield each step's verdict and the nanoseconds of its `propose`; ValueError for a draft that is not a tree."""
    ids = np.concatenate([prompt, output])
    ids.flags.writeable = False
    drafting = drafter.open(DraftContext(vocabulary, seed=0, max_nodes=nodes))
    length = len(prompt)
    try:
        while length < len(ids):
            budget = Budget(nodes, len(ids) - length - 1)
            start = perf_counter_ns()
            draft = drafting.propose(SequenceView(ids[:length], len(prompt)), budget)
            elapsed = perf_counter_ns() - start
            draft = cut(draft, budget)
            draft.check()
            child_of, path, node = draft.child_of(), list[int](), ROOT
            for token in ids[length:].tolist():
                if (child := child_of.get((node, token))) is None:
                    break
                path.append(child)
                node = child
            emitted = tuple(ids[length : length + len(path) + 1].tolist())
            verdict = Verdict(emitted, tuple(path), draft, length - 1)
            length += len(emitted)
            drafting.observe(verdict)
            yield verdict, elapsed
    finally:
        drafting.close()
