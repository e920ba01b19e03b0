"""`foredraft index` and `foredraft table`: build, extend, describe and check what drafts are looked up in.

Brings together the tokenizer, the shards of token ids beside an output, and the store or table.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.atomic_file import check_place
from foredraft.cli import flags
from foredraft.cli.screen import say, show_facts, show_json, show_table, working_in_phases
from foredraft.errors import UsageError
from foredraft.model.gguf.files import SMOLLM2
from foredraft.options import user_path

if TYPE_CHECKING:  # reading, tokenising and sorting are imported when a verb runs, so that help stays quick
    from foredraft.corpus.documents import ReadReport
    from foredraft.corpus.words import Words

index = typer.Typer(no_args_is_help=True, help="Build, extend, merge, describe and check datastores.")
table = typer.Typer(no_args_is_help=True, help="Build, describe and check tri-gram tables.")

Inputs = Annotated[list[Path], typer.Argument(help="Files or folders: .txt .md .py .jsonl (also .gz), .parquet")]
ModelOption = Annotated[str, typer.Option(help="Model whose tokenizer to use: smollm2, a GGUF file, hub id, or folder")]
StrictOption = Annotated[bool, typer.Option("--strict", help="Stop at the first line that cannot be used")]
StoreArgument = Annotated[Path, typer.Argument(callback=user_path, help="The store")]
FileArgument = Annotated[Path, typer.Argument(callback=user_path, help="The table")]
SegmentOption = Annotated[
    int, typer.Option(help="Tokens of a segment at most; sorting takes 12 bytes of memory each", min=1)
]

SEGMENT_TOKENS = 64 << 20  # sorting takes 12 bytes of memory each (18 for vocabularies above 65,535), so 0.8 GB; chosen


@dataclass(frozen=True, slots=True)
class Building:
    """How a corpus becomes segments of a store."""

    model: ModelOption = SMOLLM2
    segment_tokens: SegmentOption = SEGMENT_TOKENS
    strict: StrictOption = False
    ray: Annotated[bool, typer.Option("--ray", help="Work on a Ray cluster, started on this machine")] = False
    ray_address: Annotated[str | None, typer.Option(help="Work on the Ray cluster at this address")] = None

    def add(self, inputs: list[Path], store: Path, **new: Any) -> None:
        """Tokenise the inputs, sort them into segments, and commit these to a store, made as `new` says if given."""
        from foredraft.corpus.documents import ReadReport, find_inputs
        from foredraft.corpus.shards import Spread, build_segment, plan_segments, plan_shards, tokenize_shards
        from foredraft.index.datastore import write_datastore

        words = words_of(self.model)
        shards = plan_shards(find_inputs(inputs), strict=self.strict)
        spread: Spread | None = None
        if self.ray or self.ray_address is not None:
            from foredraft.corpus.distributed import map_on_ray

            spread = partial(map_on_ray, address=self.ray_address)
        if new:
            new["vocabulary"] = words.vocabulary
        with (
            write_datastore(store, tokenizer_hash=words.tokenizer_hash, **new) as writer,
            working_in_phases("tokenising") as tell,
            _resumable_shards(writer.folder) as folder,
        ):
            words = replace(words, least_vocabulary=writer.manifest.vocabulary)  # the store's separator
            finished = list(tokenize_shards(shards, words, folder, spread=spread, progress=tell))
            total = sum((shard.report for shard in finished), ReadReport())
            _print_skipped(total)  # also where that was everything
            if not total.tokens:
                raise UsageError("The inputs hold no text, so there is nothing to store. Give files with text in them.")
            hash_, vocabulary, place = words.tokenizer_hash, writer.manifest.vocabulary, writer.folder.absolute()
            plan = plan_segments([shard.path for shard in finished], vocabulary, self.segment_tokens)
            build = partial(build_segment, folder=place, tokenizer_hash=hash_, vocabulary=vocabulary)
            built = spread(build, plan) if spread else (build(stretches, progress=tell) for stretches in plan)
            different = {entry.name: entry for entry in built}  # equal segments have one name, and are stored once
            added = [writer.adopt(entry) for entry in different.values()]
            writer.commit()
        typer.echo(
            f"{writer.folder}: {total.tokens:,} tokens of {total.kept:,} documents in {len(added):,} new segments, "
            f"{sum(entry.bytes for entry in added) / 2**20:,.1f} MiB; {writer.manifest.tokens:,} tokens in all."
        )


@index.command("build")
def build_store(
    inputs: Inputs,
    out: Annotated[Path, typer.Option(help="Folder of the store to make")],
    *,
    building: Building,
    overwrite: flags.OverwriteOption = False,
) -> None:
    """Make a store of a corpus; what a killed build had tokenised, the same command uses again."""
    building.add(inputs, out, create=True, overwrite=overwrite)


@index.command("add")
def add_to_store(store: StoreArgument, inputs: Inputs, *, building: Building) -> None:
    """Add text to a store as new segments, such as yesterday's answers; generators take them up as they are."""
    building.add(inputs, store)


@index.command("merge")
def merge_segments(store: StoreArgument, segment_tokens: SegmentOption = SEGMENT_TOKENS) -> None:
    """Sort neighbouring segments into fewer, so that looking up is quicker."""
    from foredraft.index.datastore import write_datastore

    with write_datastore(store) as writer, working_in_phases("merging") as tell:
        fewer = writer.merge(segment_tokens, tell)
        writer.commit()
    typer.echo(f"{store} has {len(writer.manifest.segments):,} segments now, {fewer:,} fewer.")


@index.command("remove")
def remove_segment(
    store: StoreArgument, segment: Annotated[str, typer.Argument(help="Its name, as info shows it")]
) -> None:
    """Take a segment out of a store."""
    from foredraft.index.datastore import write_datastore

    with write_datastore(store) as writer:
        removed = writer.remove(segment)
        writer.commit()
    typer.echo(f"{store}: segment {removed.name} with {removed.tokens:,} tokens is removed.")


@index.command("info")
def describe_store(store: StoreArgument, as_json: flags.JsonOption = False) -> None:
    """Describe a store."""
    from foredraft.index.datastore import leftovers, open_datastore

    manifest = open_datastore(store).manifest
    left = [path.name for path in leftovers(store)]
    if as_json:
        show_json(asdict(manifest) | {"tokens": manifest.tokens, "leftovers": left})
        return
    size = sum(entry.bytes for entry in manifest.segments)
    typer.echo(f"{store}: {manifest.tokens:,} tokens in {len(manifest.segments):,} segments, {size / 2**20:,.1f} MiB")
    typer.echo(f"vocabulary {manifest.vocabulary:,}, tokenizer {manifest.tokenizer_hash[:16]}")
    rows = [(entry.name, entry.tokens, entry.documents) for entry in manifest.segments]
    show_table(("segment", "tokens|,", "documents|,"), rows)
    if left:
        typer.echo(f"Left by a killed writer, and removed by the next: {', '.join(left)}")


@index.command("check")
def verify_store(store: StoreArgument) -> None:
    """Verify a store: every checksum, and the order of every suffix; of a memory also the own words."""
    from foredraft.index.datastore import WORDS_FILE, check_datastore, read_manifest

    checked = tokens = 0
    for entry in check_datastore(store):
        checked, tokens = checked + 1, tokens + entry.tokens
        typer.echo(f"{entry.name} is sound.")
    if (store / WORDS_FILE).exists():
        from foredraft.index.own_words import load_words

        load_words(store / WORDS_FILE, read_manifest(store).tokenizer_hash)
        typer.echo(f"{WORDS_FILE} is sound.")
    typer.echo(f"{store} is sound: {checked:,} segments, {tokens:,} tokens.")


@table.command("build")
def build_table(
    inputs: Inputs,
    out: Annotated[Path, typer.Option(help="The table to write")],
    model: ModelOption = SMOLLM2,
    keep: Annotated[int, typer.Option(help="Successors kept of each pair of tokens", min=1, max=255)] = 12,
    strict: StrictOption = False,
    overwrite: flags.OverwriteOption = False,
) -> None:
    """Count the tri-grams of a corpus into a table; what a killed build had tokenised, the same command uses again."""
    from foredraft.corpus.documents import ReadReport, find_inputs
    from foredraft.corpus.shards import plan_shards, shard_symbols, tokenize_shards
    from foredraft.corpus.trigrams import count_trigrams
    from foredraft.index.trigram import table_info

    check_place(out)
    words = words_of(model)
    files = find_inputs(inputs)
    flags.check_output(out, files)
    shards = plan_shards(files, strict=strict)
    reports: list[ReadReport] = []
    with working_in_phases("tokenising") as tell, _resumable_shards(out) as folder:

        def finished() -> Iterator[Path]:
            for shard in tokenize_shards(shards, words, folder, progress=tell):
                reports.append(shard.report)
                yield shard.path
            _print_skipped(sum(reports, ReadReport()))  # also where that was everything

        count_trigrams(
            shard_symbols(finished()), words.tokenizer_hash, words.vocabulary, out, keep=keep,
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


@table.command("info")
def describe_table(file: FileArgument, as_json: flags.JsonOption = False) -> None:
    """Describe a table."""
    from foredraft.index.trigram import table_info

    fields = table_info(file)
    if as_json:
        show_json(fields)
        return
    show_facts({name.replace("_", " "): value for name, value in (fields | fields.pop("metadata")).items()})


@table.command("check")
def verify_table(file: FileArgument) -> None:
    """Verify a table to the last byte: checksums and structure."""
    from foredraft.index.trigram import open_table

    checked = open_table(file, check=True)
    typer.echo(f"{file} is sound: {len(checked.second):,} bigrams, {len(checked.tokens):,} tri-grams.")


# --- building


@contextmanager
def _resumable_shards(out: Path) -> Iterator[Path]:
    """Yield the folder beside `out` for a build's token shards; it stays, with a message, if the build is cut short."""
    from foredraft.corpus.shards import has_shards, remove_shards

    folder = out.absolute().with_name(out.absolute().name + ".shards")
    is_new = not folder.exists()  # else they are of a killed build, or of one that is running
    try:
        yield folder
    except BaseException as error:
        refused = isinstance(error, UsageError)
        if is_new and (refused or not has_shards(folder)):
            remove_shards(folder)
        elif not refused:
            say(f"What was tokenised so far is kept in {folder}; the same command goes on from there.", "yellow")
        raise
    remove_shards(folder)


def _print_skipped(read: "ReadReport") -> None:
    if read.left_out:
        counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in read.left_out.items())
        typer.echo(f"Skipped: {counts}. Use --strict to stop at the first.")


def words_of(model: str) -> "Words":
    """Return how text becomes ids for a model; UsageError if its tokenizer is not one of the `tokenizers` library."""
    from foredraft.corpus.words import Words
    from foredraft.model.loading import load_tokenizer

    tokenizer: Any = load_tokenizer(model)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UsageError(f"The tokenizer of {model} is not one of the tokenizers library. Choose another model.")
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # several by name
        template = template.get("default")
    specials = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if not isinstance(value, list)}
    text: str = tokenizer.backend_tokenizer.to_str()
    return Words(text, eos_token_id=tokenizer.eos_token_id, chat_template=template or None, special_tokens=specials)
