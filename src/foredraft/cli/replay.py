"""`foredraft replay`: drive drafters with recorded texts, without a model.

Parses and prints; the replay is `foredraft.bench.replay`.
"""

import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.cli.screen import working
from foredraft.cli.tables import show_reliability, show_table
from foredraft.model.gguf import SMOLLM2

_DEFAULT_METHODS = ["prompt_lookup", "adaptix"]
_QUARTERS = ("1st quarter", "2nd quarter", "3rd quarter", "4th quarter")


def replay(
    records: Annotated[Path, typer.Argument(help='JSON lines with "prompt", "output" and, if known, "sampling"')],
    method: Annotated[list[str] | None, typer.Option(help='NAME or NAME:{"option": value}; repeatable')] = None,
    nodes: Annotated[list[int] | None, typer.Option(help="Node budgets; repeatable [default: 16 and 64]")] = None,
    table: Annotated[str | None, typer.Option(help="Tri-gram table for adaptix [default: none]")] = None,
    tokenizer: Annotated[str, typer.Option(help="Model whose tokenizer encodes the texts")] = SMOLLM2,
    sampling: Annotated[str, typer.Option(help="Only records sampled this way; an empty text takes all")] = "greedy",
    limit: Annotated[int, typer.Option(help="Records at most; 0 takes all")] = 0,
    processes: Annotated[int, typer.Option(help="Settings replayed at the same time; times are best with 1")] = 1,
    by_quarter: Annotated[bool, typer.Option(help="Tokens a step of each quarter of the records too")] = False,
    reliability: Annotated[bool, typer.Option(help="How far the drafters' estimates were right too")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; everything is in it")] = False,
) -> None:
    """Tokens per target step that drafters would have reached on recorded texts; feedback needs a model and is off."""
    from foredraft.bench.drafts import Reliability
    from foredraft.bench.method import parse_method
    from foredraft.errors import UsageError

    methods = method or _DEFAULT_METHODS
    for text in methods:
        if parse_method(text).control is not None:  # what cannot be read is refused now, not in a process of its own
            raise UsageError(f"{text!r} names a control; a replay has no costs to control by, so give --nodes alone.")
    settings = [(text, count) for text in methods for count in nodes or [16, 64]]
    jobs = [(str(records), text, count, table, tokenizer, sampling, limit) for text, count in settings]
    rows: list[dict[str, Any]] = []
    with working("replaying") as tell, ProcessPoolExecutor(max(1, processes)) as pool:
        results = pool.map(_run, jobs) if processes > 1 else map(_run, jobs)
        for done, row in enumerate(results, 1):
            rows.append(row)
            tell(done / len(jobs), "replaying")
    if as_json:
        print(json.dumps(rows, indent=1))  # the command's output
        return
    headings = (
        "method", "nodes", "records", "tokens / target step", "macro", "drafted / step", "median us", "p99 us", "MiB"
    )  # fmt: skip
    shown = [
        (
            row["method"], str(row["nodes"]), str(row["records"]), f"{row['tokens_per_target_step']:.3f}",
            f"{row['tokens_per_target_step_macro']:.3f}", f"{row['drafted'] / row['steps']:.1f}",
            f"{row['propose_median_us']:.0f}", f"{row['propose_p99_us']:.0f}", f"{row['memory_mib']:.0f}",
        )
        for row in rows
    ]  # fmt: skip
    show_table(headings, shown)
    if by_quarter:
        quarters = []
        for row in rows:
            told = [f"{each:.3f}" for each in row["tokens_per_target_step_by_quarter"]]
            quarters.append((row["method"], str(row["nodes"]), *told, *["-"] * (len(_QUARTERS) - len(told))))
        show_table(("method", "nodes", *_QUARTERS), quarters, "tokens / target step")
    for row in rows if reliability else ():
        curve = [Reliability(**each) for each in row["reliability"]]
        show_reliability(f"{row['method']}, {row['nodes']} nodes", curve)


def _run(job: tuple[str, str, int, str | None, str, str, int]) -> dict[str, Any]:
    """Replay one setting; also in a process of its own."""
    from foredraft.bench.method import parse_method
    from foredraft.bench.replay import encode_records, read_records, resident_bytes
    from foredraft.bench.replay import replay as run_replay
    from foredraft.corpus.words import tokenizer_hash, vocabulary_size
    from foredraft.drafters import Resources, make_drafter
    from foredraft.errors import UsageError
    from foredraft.model.loading import load_tokenizer

    path, text, nodes, table, model, sampling, limit = job
    loaded = load_tokenizer(model)
    records = [record for record in read_records(Path(path)) if not sampling or record.sampling == sampling]
    if not records:
        raise UsageError(f"{path} holds no record sampled {sampling!r}; give --sampling '' to take all.")
    texts = encode_records(records[: limit or None], loaded)
    method = parse_method(text)
    options = dict(method.options)
    if method.name == "lookahead":
        raise UsageError("Method 'lookahead' lives on what a model says after drafted tokens, which no record holds.")
    if method.name == "adaptix":
        options = {"table": table or "none", "feedback": "off", **options}
    vocabulary = vocabulary_size(loaded.backend_tokenizer)
    drafter = make_drafter(method.name, options, Resources(vocabulary, tokenizer_hash(loaded.backend_tokenizer)))
    run_replay(drafter, texts[:1], nodes, vocabulary)  # compiles, and touches the table's first pages
    before = resident_bytes()
    fresh = make_drafter(method.name, options, Resources(vocabulary, tokenizer_hash(loaded.backend_tokenizer)))
    figures = run_replay(fresh, texts, nodes, vocabulary).as_dict()
    grown = (resident_bytes() - before) / 2**20
    return {"method": text, "nodes": nodes, **figures, "memory_mib": max(grown, 0.0)}
