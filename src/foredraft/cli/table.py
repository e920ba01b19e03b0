"""`foredraft table`: build, describe and check tri-gram tables.

Parses, prints, and brings together the tokenizer, the reader and the builder. Does not catch errors: the command's
main function turns them into a sentence and an exit status.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli import flags
from foredraft.cli.building import (
    Inputs,
    ModelOption,
    StrictOption,
    TokenizerOption,
    print_skipped,
    progress_bars,
    resumable_shards,
    words_of,
)
from foredraft.cli.screen import show_facts, show_json

app = typer.Typer(no_args_is_help=True, help="Build, describe and check tri-gram tables.")

FileArgument = Annotated[Path, typer.Argument(help="The table")]


@app.command()
def build(
    inputs: Inputs,
    out: Annotated[Path, typer.Option(help="The table to write")],
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
    keep: Annotated[int, typer.Option(help="Successors kept of each pair of tokens")] = 12,
    least: Annotated[int, typer.Option(help="Leave out pairs of tokens that occur fewer times")] = 1,
    strict: StrictOption = False,
    overwrite: flags.OverwriteOption = False,
) -> None:
    """Count the tri-grams of a corpus into a table; what a killed build had tokenised, the same command uses again."""
    # imported here, as in every verb, so that help stays quick
    from foredraft.corpus.documents import ReadReport, find_inputs
    from foredraft.corpus.shards import plan_shards, shard_symbols, tokenize_shards
    from foredraft.corpus.trigrams import count_trigrams
    from foredraft.index.trigram import table_info

    words = words_of(model, tokenizer)
    shards = plan_shards(find_inputs(inputs), strict=strict)
    reports: list[ReadReport] = []
    with progress_bars() as tell, resumable_shards(out) as folder:

        def finished() -> Iterator[Path]:
            for shard in tokenize_shards(shards, words, folder, progress=tell):
                reports.append(shard.report)
                yield shard.path

        count_trigrams(
            shard_symbols(finished()), words.tokenizer_hash, words.vocabulary, out, keep=keep, least=least,
            eos_token_id=words.eos_token_id, overwrite=overwrite,
            metadata={"inputs": [path.name for path in inputs]}, progress=tell,
        )  # fmt: skip
    made = table_info(out)
    noted = made["metadata"]
    typer.echo(
        f"{out}: {made['bytes'] / 2**20:,.1f} MiB, {made['bigrams']:,} bigrams, {made['trigrams']:,} of "
        f"{noted['distinct_trigrams']:,} tri-grams kept, from {noted['tokens']:,} tokens in {noted['documents']:,} "
        "documents."
    )
    print_skipped(sum(reports, ReadReport()))


@app.command()
def info(file: FileArgument, as_json: flags.JsonOption = False) -> None:
    """Describe a table."""
    from foredraft.index.trigram import table_info

    fields = table_info(file)
    if as_json:
        show_json(fields)
        return
    show_facts({name.replace("_", " "): value for name, value in (fields | fields.pop("metadata")).items()})


@app.command()
def check(file: FileArgument) -> None:
    """Verify a table to the last byte: checksums and structure."""
    from foredraft.index.trigram import check_table

    table = check_table(file)
    typer.echo(f"{file} is sound: {len(table.arrays.second):,} bigrams, {len(table.arrays.tokens):,} tri-grams.")
