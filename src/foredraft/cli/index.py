"""`foredraft index`: build, extend, merge, describe and check datastores for retrieval.

Parses, prints, and brings together the tokenizer, the shards and the store. Does not catch errors: the command's main
function turns them into a sentence and an exit status.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.building import Tell, print_skipped, progress_bars, resumable_shards, tokenizing
from foredraft.cli.words import words_of
from foredraft.errors import UsageError

if TYPE_CHECKING:  # reading, tokenising and sorting are imported when a verb runs, so that help stays quick
    from foredraft.corpus.plan import Shard, ShardOptions
    from foredraft.corpus.shards import FinishedShard, ShardProgress
    from foredraft.corpus.words import Words
    from foredraft.index.datastore import Progress, SegmentEntry
    from foredraft.index.datastore_writer import DatastoreWriter

app = typer.Typer(no_args_is_help=True, help="Build, extend, merge, describe and check datastores.")

Inputs = Annotated[list[Path], typer.Argument(help="Files or folders: .txt .md .py .jsonl (also .gz), .parquet")]
StoreArgument = Annotated[Path, typer.Argument(help="The store")]
ModelOption = Annotated[
    str | None, typer.Option(help="Model whose tokenizer to use: smollm2, a GGUF file, a hub id, or a folder")
]
TokenizerOption = Annotated[Path | None, typer.Option(help="tokenizer.json, or a folder that has one")]
SegmentOption = Annotated[int, typer.Option(help="Tokens of a segment at most; sorting takes 12 bytes of memory each")]
HoldOutOption = Annotated[float, typer.Option(help="Share of the documents to leave out, chosen by their text")]
StrictOption = Annotated[bool, typer.Option("--strict", help="Stop at the first line that cannot be used")]
RayOption = Annotated[bool, typer.Option("--ray", help="Work on a Ray cluster, started on this machine")]
AddressOption = Annotated[str | None, typer.Option(help="Work on the Ray cluster at this address")]

SEGMENT_TOKENS = 64 << 20  # as corpus.segments has it, which help should not import


@app.command()
def build(
    inputs: Inputs,
    out: Annotated[Path, typer.Option(help="Folder of the store to make")],
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
    segment_tokens: SegmentOption = SEGMENT_TOKENS,
    hold_out: HoldOutOption = 0.0,
    strict: StrictOption = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the store if it exists")] = False,
    ray: RayOption = False,
    ray_address: AddressOption = None,
) -> None:
    """Make a store of a corpus; what a killed build had tokenised, the same command uses again."""
    from foredraft.corpus.inputs import find_inputs
    from foredraft.corpus.plan import ShardOptions, plan_shards
    from foredraft.index.datastore_writer import DatastoreWriter

    words = words_of(model, tokenizer)
    options = ShardOptions(hold_out=hold_out, strict=strict)
    shards = plan_shards(find_inputs(inputs))
    with DatastoreWriter(
        out, tokenizer_hash=words.tokenizer_hash, vocabulary=words.vocabulary, create=True, overwrite=overwrite
    ) as writer:
        _add_inputs(writer, shards, words, options, segment_tokens, _cluster(ray, ray_address))


@app.command()
def add(
    store: StoreArgument,
    inputs: Inputs,
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
    segment_tokens: SegmentOption = SEGMENT_TOKENS,
    hold_out: HoldOutOption = 0.0,
    strict: StrictOption = False,
    ray: RayOption = False,
    ray_address: AddressOption = None,
) -> None:
    """Add text to a store as new segments, such as yesterday's answers; generators take them up as they are."""
    from foredraft.corpus.inputs import find_inputs
    from foredraft.corpus.plan import ShardOptions, plan_shards
    from foredraft.index.datastore_writer import DatastoreWriter

    words = words_of(model, tokenizer)
    options = ShardOptions(hold_out=hold_out, strict=strict)
    shards = plan_shards(find_inputs(inputs))
    with DatastoreWriter(store, tokenizer_hash=words.tokenizer_hash) as writer:
        _add_inputs(writer, shards, words, options, segment_tokens, _cluster(ray, ray_address))


@app.command()
def merge(store: StoreArgument, segment_tokens: SegmentOption = SEGMENT_TOKENS) -> None:
    """Sort neighbouring segments into fewer, so that looking up is quicker."""
    from foredraft.index.datastore_writer import DatastoreWriter

    with DatastoreWriter(store) as writer, progress_bars() as tell:
        fewer = writer.merge(segment_tokens, _sorting(tell))
        writer.commit()
    typer.echo(f"{store} has {len(writer.manifest.segments):,} segments now, {fewer:,} fewer.")


@app.command()
def remove(store: StoreArgument, segment: Annotated[str, typer.Argument(help="Its name, as info shows it")]) -> None:
    """Take a segment out of a store."""
    from foredraft.index.datastore_writer import DatastoreWriter

    with DatastoreWriter(store) as writer:
        removed = writer.remove(segment)
        writer.commit()
    typer.echo(f"{store}: segment {removed.name} with {removed.tokens:,} tokens is removed.")


@app.command()
def info(store: StoreArgument, as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False) -> None:
    """Describe a store."""
    from dataclasses import asdict

    from foredraft.index.datastore import open_datastore
    from foredraft.index.datastore_writer import leftovers

    manifest = open_datastore(store).manifest
    left = [path.name for path in leftovers(store)]
    if as_json:
        typer.echo(json.dumps(asdict(manifest) | {"tokens": manifest.tokens, "leftovers": left}, indent=2))
        return
    size = sum(entry.bytes for entry in manifest.segments)
    typer.echo(f"{store}: {manifest.tokens:,} tokens in {len(manifest.segments):,} segments, {size / 2**20:,.1f} MiB")
    typer.echo(f"vocabulary {manifest.vocabulary:,}, tokenizer {manifest.tokenizer_hash[:16]}")
    for entry in manifest.segments:
        typer.echo(f"{entry.name} {entry.tokens:14,} tokens {entry.documents:10,} documents")
    if left:
        typer.echo(f"Left behind by a killed writer, and removed by the next: {', '.join(left)}")


@app.command()
def check(
    store: StoreArgument,
    full: Annotated[bool, typer.Option("--full", help="Verify the order of every suffix, not of a sample")] = False,
) -> None:
    """Verify a store: every checksum, and the order of its suffixes."""
    from foredraft.index.datastore import check_datastore

    checked = tokens = 0
    for entry in check_datastore(store, full=full):
        checked, tokens = checked + 1, tokens + entry.tokens
        typer.echo(f"{entry.name} is sound.")
    typer.echo(f"{store} is sound: {checked:,} segments, {tokens:,} tokens.")


# --- building


def _add_inputs(
    writer: "DatastoreWriter",
    shards: "Sequence[Shard]",
    words: "Words",
    options: "ShardOptions",
    segment_tokens: int,
    cluster: str | None,
) -> None:
    """Tokenise the inputs, sort them into segments, and commit these."""
    from foredraft.corpus.shards import add_reports

    with progress_bars() as tell, resumable_shards(writer.folder) as folder:
        finished = list(_finished_shards(shards, words, folder, options, cluster, tokenizing(tell, "tokenising")))
        total = add_reports(shard.report for shard in finished)
        if not total.tokens:
            raise UsageError("The inputs hold no text, so there is nothing to store. Give files with text in them.")
        added = [
            writer.adopt(entry)
            for entry in _built_segments(writer, [shard.path for shard in finished], segment_tokens, cluster, tell)
        ]
        writer.commit()
    typer.echo(
        f"{writer.folder}: {total.tokens:,} tokens of {total.documents:,} documents in {len(added):,} new segments, "
        f"{sum(entry.bytes for entry in added) / 2**20:,.1f} MiB; {writer.manifest.tokens:,} tokens in all."
    )
    if total.held_out_documents:
        typer.echo(f"Held out: {total.held_out_documents:,} documents.")
    print_skipped(total.read)


def _finished_shards(
    shards: "Sequence[Shard]",
    words: "Words",
    folder: Path,
    options: "ShardOptions",
    cluster: str | None,
    progress: "Callable[[ShardProgress], None]",
) -> "Iterator[FinishedShard]":
    if cluster is None:
        from foredraft.corpus.shards import tokenize_shards

        return tokenize_shards(shards, words, folder, options=options, progress=progress)
    from foredraft.corpus.distributed import tokenize_shards_on_ray

    return tokenize_shards_on_ray(shards, words, folder, address=cluster or None, options=options, progress=progress)


def _built_segments(
    writer: "DatastoreWriter", shards: Sequence[Path], segment_tokens: int, cluster: str | None, tell: Tell
) -> "Iterator[SegmentEntry]":
    from foredraft.corpus.segments import SegmentBuilder, plan_segments

    manifest = writer.manifest
    builder = SegmentBuilder(writer.folder.absolute(), manifest.tokenizer_hash, manifest.vocabulary)
    plan = plan_segments(shards, manifest.vocabulary, segment_tokens)
    if cluster is None:
        return (builder(stretches, _sorting(tell)) for stretches in plan)
    from foredraft.corpus.distributed import map_on_ray

    return map_on_ray(builder, plan, cluster or None)


def _cluster(ray: bool, address: str | None) -> str | None:
    """Return the cluster to work on: an address, "" to start one here, None for none."""
    return address or ("" if ray else None)


def _sorting(tell: Tell) -> "Progress":
    return lambda phase, done, total: tell(phase, done, total, done, "tokens")
