"""`foredraft replay`: runs drafters on recorded texts, without a model."""

from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli import flags
from foredraft.cli.screen import show_json, show_table, working
from foredraft.errors import UsageError
from foredraft.model.gguf.files import SMOLLM2

_COLUMNS = {
    "method": "method", "nodes": "nodes", "records": "records", "tokens_per_target_step": "tokens / target step|.3f",
    "tokens_per_target_step_macro": "macro|.3f", "drafted_per_step": "drafted / step|.1f",
    "propose_median_us": "median us|.0f", "propose_p99_us": "p99 us|.0f",
}  # fmt: skip
"""Figures of `replay` and their headings."""


def replay(
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
    from foredraft.bench import replay as replaying
    from foredraft.bench.method import parse_method
    from foredraft.corpus.words import tokenizer_hash, vocabulary_size
    from foredraft.drafters import Resources, make_drafter
    from foredraft.model.loading import load_tokenizer

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
        texts = replaying.read_records(records, loaded)
        resources = Resources(vocabulary_size(backend), tokenizer_hash(backend))
        settings = [(each, count) for each in methods for count in nodes or [16, 64]]
        for number, (each, count) in enumerate(settings):
            tell(number / len(settings), "replaying")
            own = {"table": table or "none", "feedback": "off"} if each.method == "adaptix" else {}
            for measured in (texts[:1], texts):  # the first text alone is a warm-up: it compiles and loads pages
                drafter = make_drafter(each.method, {**own, **each.options}, resources)
                figures = replaying.replay(drafter, measured, count, resources.vocabulary)
            rows.append({"method": each.label, "nodes": count, **figures})
    if as_json:
        show_json(rows)
        return
    show_table(list(_COLUMNS.values()), [[row[name] for name in _COLUMNS] for row in rows])
