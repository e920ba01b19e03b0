"""`foredraft index`: build, extend, merge, describe and check datastores for retrieval.

Parses, prints, and brings together the tokenizer, the shards and the store. Does not catch errors: the command's main
function turns them into a sentence and an exit status.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from foredraft.cli.screen import show_json, show_table
from foredraft.errors import UsageError

if TYPE_CHECKING:  # reading, tokenising and sorting are imported when a verb runs, so that help stays quick
    from foredraft.corpus.shards import Shard, Spread
    from foredraft.corpus.words import Words

app = typer.Typer(no_args_is_help=True, help="Build, extend, merge, describe and check datastores.")

StoreArgument = Annotated[Path, typer.Argument(help="The store")]
SegmentOption = Annotated[int, typer.Option(help="Tokens of a segment at most; sorting takes 12 bytes of memory each")]
HoldOutOption = Annotated[float, typer.Option(help="Share of the documents to leave out, chosen by their text")]
RayOption = Annotated[bool, typer.Option("--ray", help="Work on a Ray cluster, started on this machine")]
AddressOption = Annotated[str | None, typer.Option(help="Work on the Ray cluster at this address")]

SEGMENT_TOKENS = 64 << 20  # as corpus.shards has it, which help should not import


@app.command()
def build(
    inputs: Inputs,
    out: Annotated[Path, typer.Option(help="Folder of the store to make")],
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
    segment_tokens: SegmentOption = SEGMENT_TOKENS,
    hold_out: HoldOutOption = 0.0,
    strict: StrictOption = False,
    overwrite: flags.OverwriteOption = False,
    ray: RayOption = False,
    ray_address: AddressOption = None,
) -> None:
    """Make a store of a corpus; what a killed build had tokenised, the same command uses again."""
    words, shards = words_of(model, tokenizer), _planned(inputs, hold_out, strict)
    _add(
        shards, words, segment_tokens, _spread(ray, ray_address),
        out, tokenizer_hash=words.tokenizer_hash, vocabulary=words.vocabulary, create=True, overwrite=overwrite,
    )  # fmt: skip


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
    words, shards = words_of(model, tokenizer), _planned(inputs, hold_out, strict)
    _add(shards, words, segment_tokens, _spread(ray, ray_address), store, tokenizer_hash=words.tokenizer_hash)


@app.command()
def merge(store: StoreArgument, segment_tokens: SegmentOption = SEGMENT_TOKENS) -> None:
    """Sort neighbouring segments into fewer, so that looking up is quicker."""
    from foredraft.index.datastore_writer import DatastoreWriter

    with DatastoreWriter(store) as writer, progress_bars() as tell:
        fewer = writer.merge(segment_tokens, tell)
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
def info(store: StoreArgument, as_json: flags.JsonOption = False) -> None:
    """Describe a store."""
    from dataclasses import asdict

    from foredraft.index.datastore import open_datastore
    from foredraft.index.datastore_writer import leftovers

    manifest = open_datastore(store).manifest
    left = [path.name for path in leftovers(store)]
    if as_json:
        show_json(asdict(manifest) | {"tokens": manifest.tokens, "leftovers": left})
        return
    size = sum(entry.bytes for entry in manifest.segments)
    typer.echo(f"{store}: {manifest.tokens:,} tokens in {len(manifest.segments):,} segments, {size / 2**20:,.1f} MiB")
    typer.echo(f"vocabulary {manifest.vocabulary:,}, tokenizer {manifest.tokenizer_hash[:16]}")
    rows = [(entry.name, f"{entry.tokens:,}", f"{entry.documents:,}") for entry in manifest.segments]
    show_table(("segment", "tokens", "documents"), rows)
    if left:
        typer.echo(f"Left by a killed writer, and removed by the next: {', '.join(left)}")


@app.command()
def check(store: StoreArgument) -> None:
    """Verify a store: every checksum, and the order of every suffix."""
    from foredraft.index.datastore import check_datastore

    checked = tokens = 0
    for entry in check_datastore(store):
        checked, tokens = checked + 1, tokens + entry.tokens
        typer.echo(f"{entry.name} is sound.")
    typer.echo(f"{store} is sound: {checked:,} segments, {tokens:,} tokens.")


# --- building


def _planned(inputs: list[Path], hold_out: float, strict: bool) -> "list[Shard]":
    """Find the inputs and divide them into shards, before anything is written."""
    from foredraft.corpus.documents import find_inputs
    from foredraft.corpus.shards import plan_shards

    return plan_shards(find_inputs(inputs), hold_out=hold_out, strict=strict)


def _add(
    shards: "list[Shard]", words: "Words", segment_tokens: int, spread: "Spread | None", store: Path, **options: Any
) -> None:
    """Tokenise the shards, sort them into segments, and commit these to a store, which `options` open or make."""
    from foredraft.corpus.documents import ReadReport
    from foredraft.corpus.shards import build_segment, plan_segments, tokenize_shards
    from foredraft.index.datastore_writer import DatastoreWriter

    with (
        DatastoreWriter(store, **options) as writer,
        progress_bars() as tell,
        resumable_shards(writer.folder) as folder,
    ):
        finished = list(tokenize_shards(shards, words, folder, spread=spread, progress=tell))
        total = sum((shard.report for shard in finished), ReadReport())
        if not total.tokens:
            raise UsageError("The inputs hold no text, so there is nothing to store. Give files with text in them.")
        vocabulary = writer.manifest.vocabulary
        plan = plan_segments([shard.path for shard in finished], vocabulary, segment_tokens)
        build = partial(
            build_segment, folder=writer.folder.absolute(), tokenizer_hash=words.tokenizer_hash, vocabulary=vocabulary
        )
        built = spread(build, plan) if spread else (build(stretches, progress=tell) for stretches in plan)
        added = [writer.adopt(entry) for entry in built]
        writer.commit()
    typer.echo(
        f"{writer.folder}: {total.tokens:,} tokens of {total.kept:,} documents in {len(added):,} new segments, "
        f"{sum(entry.bytes for entry in added) / 2**20:,.1f} MiB; {writer.manifest.tokens:,} tokens in all."
    )
    if total.held_out:
        typer.echo(f"Held out: {total.held_out:,} documents.")
    print_skipped(total)


def _spread(ray: bool, address: str | None) -> "Spread | None":
    """Return what works on a cluster: that at the address, or one started here; None for none."""
    if not ray and address is None:
        return None
    from foredraft.corpus.distributed import map_on_ray

    return partial(map_on_ray, address=address)
