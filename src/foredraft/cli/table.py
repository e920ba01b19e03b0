"""`foredraft table`: build, describe and check tri-gram tables.

Parses, prints, and brings together the tokenizer, the reader and the builder. Does not catch errors: the command's
main function turns them into a sentence and an exit status.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.building import Tell, print_skipped, progress_bars, resumable_shards, tokenizing
from foredraft.cli.words import words_of

if TYPE_CHECKING:  # reading, counting and tokenising are imported when a verb runs, so that help stays quick
    from foredraft.corpus.build import BuildProgress, BuildReport
    from foredraft.corpus.shards import ShardReport

app = typer.Typer(no_args_is_help=True, help="Build, describe and check tri-gram tables.")


@app.command()
def build(
    inputs: Annotated[list[Path], typer.Argument(help="Files or folders: .txt .md .py .jsonl (also .gz), .parquet")],
    out: Annotated[Path, typer.Option(help="The table to write")],
    model: Annotated[
        str | None, typer.Option(help="Model whose tokenizer to use: smollm2, a GGUF file, a hub id, or a folder")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json, or a folder that has one")] = None,
    keep: Annotated[int, typer.Option(help="Successors kept of each pair of tokens")] = 12,
    least: Annotated[int, typer.Option(help="Leave out pairs of tokens that occur fewer times")] = 1,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first line that cannot be used")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists")] = False,
) -> None:
    """Count the tri-grams of a corpus into a table; what a killed build had tokenised, the same command uses again."""
    from foredraft.corpus.build import count_trigrams
    from foredraft.corpus.inputs import find_inputs
    from foredraft.corpus.plan import ShardOptions, plan_shards
    from foredraft.corpus.shards import add_reports, shard_blocks, tokenize_shards

    words = words_of(model, tokenizer)
    shards = plan_shards(find_inputs(inputs))
    reports: list[ShardReport] = []
    with progress_bars() as tell, resumable_shards(out) as folder:

        def finished() -> Iterator[Path]:
            for shard in tokenize_shards(
                shards, words, folder, options=ShardOptions(strict=strict), progress=tokenizing(tell, "reading")
            ):
                reports.append(shard.report)
                yield shard.path

        report = count_trigrams(
            shard_blocks(finished()),
            words.tokenizer_hash,
            words.vocabulary,
            out,
            keep=keep,
            least=least,
            eos_token_id=words.eos_token_id,
            overwrite=overwrite,
            metadata={"inputs": [path.name for path in inputs]},
            progress=_merging(tell),
        )
    _print_report(report)
    print_skipped(add_reports(reports).read)


@app.command()
def info(
    file: Annotated[Path, typer.Argument(help="The table")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Describe a table."""
    from foredraft.index.trigram import table_info

    fields = table_info(file)
    if as_json:
        typer.echo(json.dumps(fields, indent=2))
        return
    for name, value in (fields | fields.pop("metadata")).items():
        typer.echo(f"{name.replace('_', ' '):18} {f'{value:,}' if isinstance(value, int) else value}")


@app.command()
def check(file: Annotated[Path, typer.Argument(help="The table")]) -> None:
    """Verify a table to the last byte: checksums and structure."""
    from foredraft.index.trigram import check_table

    table = check_table(file)
    typer.echo(f"{file} is sound: {len(table.arrays.second):,} bigrams, {len(table.arrays.tokens):,} tri-grams.")


# --- progress and report


def _merging(tell: Tell) -> "Callable[[BuildProgress], None]":
    """Show the phase that follows tokenising; counting goes along with tokenising and is quick."""

    def show(state: "BuildProgress") -> None:
        if state.total is not None:
            tell(state.phase, state.done, state.total, state.done, "tri-grams")

    return show


def _print_report(report: "BuildReport") -> None:
    typer.echo(
        f"{report.path}: {report.bytes / 2**20:,.1f} MiB, {report.bigrams:,} bigrams, {report.trigrams:,} of "
        f"{report.distinct_trigrams:,} tri-grams kept, from {report.tokens:,} tokens in {report.documents:,} documents."
    )
