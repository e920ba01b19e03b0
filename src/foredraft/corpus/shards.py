"""Shards of a corpus as files of token ids: made one by one on all cores, found again after a kill, read in blocks.

Knows the folder of finished shards and what is noted in each. Does not know what is built from them, or how the work
is spread over machines (corpus/distributed.py). A process's memory does not depend on the size of a shard.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from foredraft.corpus.documents import Document, ReadReport, read_parts
from foredraft.corpus.plan import ALL_DOCUMENTS, Shard, ShardOptions
from foredraft.corpus.tokens import SymbolBlock, separated, tokenize_documents
from foredraft.corpus.words import Words
from foredraft.errors import StoreError
from foredraft.index.storage import BUILDING_SUFFIX, StoreWriter, check_store, open_store
from foredraft.index.suffix_array import symbol_dtype

KIND = "token-shard"
SUFFIX = ".tokens"
_BLOCK_SYMBOLS = 1 << 20


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What one shard, or several, came to.

    Attributes:
        documents: documents written; documents without any token are not.
        tokens: their ids, ends of text included and separators not.
        held_out_documents: documents that the share to hold out took, whether they were written or left out.
        read: what reading the inputs met.
    """

    documents: int = 0
    tokens: int = 0
    held_out_documents: int = 0
    read: ReadReport = field(default_factory=ReadReport)


class FinishedShard(NamedTuple):
    """A shard's file, what it came to, and whether it was there already."""

    path: Path
    report: ShardReport
    resumed: bool


@dataclass(frozen=True, slots=True)
class ShardProgress:
    """How far tokenising is.

    Attributes:
        done: bytes of the inputs, as they lie on disk, that are done; those found finished count.
        total: bytes of the inputs.
        tokens: tokens made so far; those found finished do not count.
    """

    done: int
    total: int
    tokens: int


Progress = Callable[[ShardProgress], None]


def add_reports(reports: Iterable[ShardReport]) -> ShardReport:
    """Return the sum of what several shards came to."""
    total, read = ShardReport(), ReadReport()
    for report in reports:
        read = ReadReport(**{name: count + getattr(read, name) for name, count in asdict(report.read).items()})
        total = ShardReport(
            total.documents + report.documents,
            total.tokens + report.tokens,
            total.held_out_documents + report.held_out_documents,
            read,
        )
    return total


# --- making shards


def tokenize_shard(
    shard: Shard,
    words: Words,
    out: Path,
    *,
    options: ShardOptions = ALL_DOCUMENTS,
    progress: Progress | None = None,
) -> ShardReport:
    """Write a shard's token ids: the array `tokens`, its documents in order, each followed by the separator V.

    The file, a container of kind ``token-shard``, depends on the shard, the words and the options alone.

    Args:
        shard: from `plan_shards`.
        words: how its text becomes ids; V is their vocabulary.
        out: the file to write; replaced if it exists. uint16[n] where V is at most 65,535, else uint32[n].
        options: which documents are taken.
        progress: called for every stretch of text; may raise to stop.

    Raises:
        UsageError: an input that cannot be read, or what `options.strict` refuses.
        StoreError: `out` cannot be written, or is being written by another process.
    """
    read, counted = ReadReport(), _Counted()
    tell = progress or (lambda _: None)
    documents = read_parts(shard.parts, report=read, render=words.render(), strict=options.strict)
    pieces = tokenize_documents(_taken(documents, options, counted), words.tokenizer())
    with StoreWriter(
        out, KIND, tokenizer_hash=words.tokenizer_hash, vocabulary=words.vocabulary, overwrite=True
    ) as writer:
        writer.append("tokens", np.empty(0, symbol_dtype(words.vocabulary)))
        for symbols, consumed in separated(pieces, words.vocabulary, words.eos_token_id):
            writer.append("tokens", symbols)
            counted.documents += len(symbols) > 0 and int(symbols[-1]) == words.vocabulary
            tell(ShardProgress(consumed, shard.bytes, writer.length("tokens") - counted.documents))
        tokens = writer.length("tokens") - counted.documents
        report = ShardReport(counted.documents, tokens, counted.held_out, read)
        writer.metadata |= {"shard": shard.identity(words, options), **asdict(report)}
    return report


@dataclass(slots=True)
class _Counted:
    """Documents written, and documents that the share to hold out took."""

    documents: int = 0
    held_out: int = 0


def _taken(documents: Iterable[Document], options: ShardOptions, counted: _Counted) -> Iterator[Document]:
    """Yield the documents that the options take, and count those that are held out."""
    wanted = options.keep == "held_out"
    begins, taken = True, True
    for document in documents:
        if begins:
            held_out = is_held_out(document.text, options.hold_out)
            counted.held_out += held_out
            taken = held_out == wanted
        begins = document.complete
        if taken:
            yield document


def is_held_out(text: str, share: float) -> bool:
    """Say whether a document is held out.

    Args:
        text: the document, or its first piece where it comes in pieces.
        share: of all documents, 0 to 1. What a smaller share holds out, a larger one does too.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2.0**64


# --- the folder of finished shards


def tokenize_shards(
    shards: Sequence[Shard],
    words: Words,
    folder: Path,
    *,
    options: ShardOptions = ALL_DOCUMENTS,
    progress: Progress | None = None,
) -> Iterator[FinishedShard]:
    """Yield the shards' files in order, making those that `folder` does not have yet.

    A file that is damaged, or of other inputs, words or options, is not taken for finished.

    Args:
        shards: from `plan_shards`.
        words: how text becomes ids.
        folder: where the files go; made if its own folder exists. See `remove_shards`.
        options: which documents are taken.
        progress: called now and then; may raise to stop.

    Raises:
        UsageError: an input that cannot be read, or what `options.strict` refuses.
        StoreError: the folder cannot be written to, or another process works in it.
    """
    make_shard_folder(folder)
    tell = progress or (lambda _: None)
    before, tokens, total = 0, 0, sum(shard.bytes for shard in shards)

    def tell_of_all(state: ShardProgress) -> None:
        tell(ShardProgress(before + state.done, total, tokens + state.tokens))

    for shard in shards:
        finished = finish_shard(shard, words, folder, options, tell_of_all)
        before += shard.bytes
        tokens += 0 if finished.resumed else finished.report.tokens
        tell(ShardProgress(before, total, tokens))
        yield finished


def finish_shard(
    shard: Shard, words: Words, folder: Path, options: ShardOptions, progress: Progress | None = None
) -> FinishedShard:
    """Return the shard's file in `folder`, made now unless it is there and sound. Arguments as `tokenize_shards`."""
    identity = shard.identity(words, options)
    path = folder / (identity + SUFFIX)
    report = _finished_report(path, identity)
    if report is not None:
        return FinishedShard(path, report, resumed=True)
    return FinishedShard(path, tokenize_shard(shard, words, path, options=options, progress=progress), resumed=False)


def _finished_report(path: Path, identity: str) -> ShardReport | None:
    """Return what a finished shard came to, or None where the file is missing, damaged, or of another shard."""
    try:
        noted = dict(check_store(path, KIND).metadata)
        if noted.pop("shard") != identity:
            return None
        return ShardReport(**{**noted, "read": ReadReport(**noted["read"])})
    except (StoreError, KeyError, TypeError):
        return None


def make_shard_folder(folder: Path) -> None:
    """Make the folder for finished shards.

    Raises:
        StoreError: it cannot be made.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be made ({error.strerror}). Make the folder it lies in, or choose one you can write to."
        ) from error


def has_shards(folder: Path) -> bool:
    """Whether a folder has finished shards."""
    return any(folder.glob("*" + SUFFIX))


def remove_shards(folder: Path) -> None:
    """Remove the files of `tokenize_shards`, finished or not, and the folder too if nothing else is in it."""
    for path in folder.glob(f"*{SUFFIX}*"):
        if path.name.endswith(SUFFIX + BUILDING_SUFFIX):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.endswith((SUFFIX, SUFFIX + ".lock")):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it is missing, or someone keeps something in it
        folder.rmdir()


# --- reading shards


def shard_blocks(paths: Iterable[Path]) -> Iterator[SymbolBlock]:
    """Yield the documents of finished shards, in blocks of up to a million symbols; `consumed` counts the files' bytes.

    Raises:
        StoreError: a file that is missing, damaged, or not a shard.
    """
    before = 0
    for path in paths:
        entry = open_store(path, KIND).entries[0]
        # Read, not mapped: mapped pages would count as this process's memory until the system takes them back.
        for start in range(0, entry.length, _BLOCK_SYMBOLS):
            count = min(_BLOCK_SYMBOLS, entry.length - start)
            offset = entry.offset + start * np.dtype(entry.dtype).itemsize
            symbols = np.fromfile(path, entry.dtype, count, offset=offset)
            yield SymbolBlock(symbols, before + offset + symbols.nbytes)
        before += entry.end
