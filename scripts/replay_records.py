"""Run drafters on recorded texts, without a model: tokens per target step, and the time to draft.

`python scripts/replay_records.py RECORDS --method auto --nodes 16`. Feedback needs a model and is off.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Annotated, Any

import numpy as np
import typer

from draft_counts import count_drafts
from foredraft.bench.method import parse_method
from foredraft.bench.tasks import read_json_lines
from foredraft.cli import flags
from foredraft.cli.screen import show_json, show_table, working
from foredraft.contracts import Budget, DraftContext, Drafter, SequenceView, TokenIds, Verdict
from foredraft.control import cut
from foredraft.corpus.words import tokenizer_hash, vocabulary_size
from foredraft.drafters import Resources, make_drafter
from foredraft.errors import UsageError
from foredraft.graph.tree import ROOT
from foredraft.model.gguf.files import SMOLLM2
from foredraft.model.loading import load_tokenizer
from foredraft.request import templated

_COLUMNS = {
    "method": "method", "nodes": "nodes", "records": "records", "tokens_per_target_step": "tokens / target step|.3f",
    "tokens_per_target_step_macro": "macro|.3f", "drafted_per_step": "drafted / step|.1f",
    "propose_median_us": "median us|.0f", "propose_p99_us": "p99 us|.0f",
}  # fmt: skip
"""Figures of `replay` and their headings."""


def read_records(path: Path, tokenizer: Any) -> list[tuple[TokenIds, TokenIds]]:
    """Return prompt ids and output ids, int64[n] each, of JSON lines with `prompt` and `output`.

    Prompts go through the chat template, if any; records with an empty text are skipped. UsageError for a file that
    cannot be read, an invalid line, or no record.
    """
    texts, has_template = [], getattr(tokenizer, "chat_template", None)
    for number, row in read_json_lines(path):
        if not isinstance(row, Mapping) or not all(isinstance(row.get(name), str) for name in ("prompt", "output")):
            raise UsageError(f"Line {number} of {path} needs the texts `prompt` and `output`; add them.")
        prompt = row["prompt"]
        question = templated([{"role": "user", "content": prompt}], tokenizer) if has_template else prompt
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in (question, row["output"])]
        if ids[0] and ids[1]:
            texts.append((np.array(ids[0], np.int64), np.array(ids[1], np.int64)))
    if not texts:
        raise UsageError(f"{path} holds no record; each line needs `prompt` and `output`.")
    return texts


def replay_steps(
    drafter: Drafter, prompt: TokenIds, output: TokenIds, nodes: int, vocabulary: int
) -> Iterator[tuple[Verdict, int]]:
    """Run a drafter on a recorded text, whose tokens are accepted where they match the draft.

    Yield each step's verdict and the nanoseconds of its `propose`; ValueError for a draft that is not a tree.
    """
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


def replay(drafter: Drafter, texts: Sequence[tuple[TokenIds, TokenIds]], nodes: int, vocabulary: int) -> dict[str, Any]:
    """Run `drafter` on at least one text, each a sequence, with at most `nodes` nodes per step; return figures by name.

    "steps" are target passes; "macro" is the mean over records; the times of `propose` are in microseconds.
    """
    steps, micros = [], list[float]()

    def verdicts() -> Iterator[Verdict]:
        for prompt, output in texts:
            before = len(micros)
            for verdict, nanoseconds in replay_steps(drafter, prompt, output, nodes, vocabulary):
                micros.append(nanoseconds / 1e3)
                yield verdict
            steps.append(len(micros) - before)

    counts = count_drafts(verdicts(), drafter.source_names)
    tokens = [len(output) for _, output in texts]
    return {
        "records": len(texts),
        "tokens": sum(tokens),
        "steps": sum(steps),
        "drafted": sum(counts.drafted_by_depth),
        "accepted": sum(counts.accepted_by_depth),
        "tokens_per_target_step": sum(tokens) / sum(steps),
        "drafted_per_step": sum(counts.drafted_by_depth) / sum(steps),
        "tokens_per_target_step_macro": float(np.mean(np.divide(tokens, steps))),
        "reliability": counts.reliability,
        "propose_median_us": float(np.median(micros)),
        "propose_p99_us": float(np.quantile(micros, 0.99)),
    }


def main(
    records: Annotated[Path, typer.Argument(help='JSON lines with "prompt" and "output"')],
    method: flags.MethodsOption = None,
    nodes: Annotated[
        list[int] | None, flags.in_drafting("--nodes", help="Node budgets; repeatable [default: 16 and 64]", min=0)
    ] = None,
    table: Annotated[str | None, flags.in_drafting(help="Tri-gram table for adaptix [default: none]")] = None,
    tokenizer: Annotated[str, typer.Option(help="Model whose tokenizer encodes the texts")] = SMOLLM2,
    as_json: flags.JsonOption = False,
) -> None:
    """Measure the tokens per target step of drafters on recorded texts; feedback needs a model and is off."""
    methods = [parse_method(text) for text in method or ("prompt_lookup", "adaptix")]
    for each in methods:
        if each.amount.get("control") is not None:
            raise UsageError(f"{each.label!r} names a control; a replay has no costs for it, so give only --nodes.")
        if each.method == "lookahead":
            raise UsageError(
                "Method 'lookahead' needs the model's output after drafted tokens, which records do not have; leave it "
                "out."
            )
    rows = []
    with working("replaying") as tell:
        loaded = load_tokenizer(tokenizer)
        backend = loaded.backend_tokenizer
        texts = read_records(records, loaded)
        resources = Resources(vocabulary_size(backend), tokenizer_hash(backend))
        settings = [(each, count) for each in methods for count in nodes or [16, 64]]
        for number, (each, count) in enumerate(settings):
            tell(number / len(settings), "replaying")
            own = {"table": table or "none", "feedback": "off"} if each.method == "adaptix" else {}
            for measured in (texts[:1], texts):  # the first text alone is a warm-up: it compiles and loads pages
                drafter = make_drafter(each.method, {**own, **each.options}, resources)
                figures = replay(drafter, measured, count, resources.vocabulary)
            rows.append({"method": each.label, "nodes": count, **figures})
    if as_json:
        show_json(rows)
        return
    show_table(list(_COLUMNS.values()), [[row[name] for name in _COLUMNS] for row in rows])


if __name__ == "__main__":
    typer.run(main)
