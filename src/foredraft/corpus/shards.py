"""Shards of a corpus as files of token ids: planned, made one by one, reused after a kill, and cut into segments.

The same files under the same paths give the same shards and segments on every machine. Memory use does not depend on
the size of a shard. Does not depend on how the work is distributed over machines, nor on how a segment is sorted.
"""

import contextlib
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from foredraft.atomic_file import unwritable
from foredraft.corpus.documents import Document, Part, ReadReport, parts_of, read_documents
from foredraft.corpus.words import Words, tokenize
from foredraft.errors import StoreError, UsageError
from foredraft.index.datastore import Progress, SegmentEntry, write_segment
from foredraft.index.storage import BUILDING_SUFFIX, open_store, write_store
from foredraft.index.suffix_array import Symbols, grouped, symbol_dtype

KIND = "token-shard"
SUFFIX = ".tokens"
SHARD_BYTES = 64 << 20
_RECIPE = 2  # increased whenever the same text would give other ids, so that shards made before are not reused
_BLOCK_SYMBOLS = 1 << 20  # read at once
_PROGRESS_BYTES = 1 << 18  # between progress reports

Spread = Callable[[Callable[..., Any], Iterable[Any]], Iterator[Any]]
"""Applies a function to items and yields the results in order, like `map`, on other processes or machines."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Some of the inputs, and how they are processed."""

    parts: tuple[Part, ...]  # files, or ranges of them
    strict: bool = False  # stop at the first line, row or document that cannot be used, instead of counting it

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def identity(self, words: Words) -> str:
        """Return 32 hex digits that change whenever the shard's ids could change."""
        parts = [[str(part.path), part.file_bytes, part.mtime_ns, part.start, part.stop] for part in self.parts]
        described = json.dumps([_RECIPE, tokenizers.__version__, words.digest, self.strict, parts])
        return hashlib.sha256(described.encode()).hexdigest()[:32]


class FinishedShard(NamedTuple):
    """A shard's file, its counts, and whether the file existed already."""

    path: Path
    report: ReadReport
    resumed: bool


def plan_shards(files: Iterable[Path], shard_bytes: int = SHARD_BYTES, *, strict: bool = False) -> list[Shard]:
    """Cut the files into shards of about `shard_bytes` by `parts_of`, in order; small files share a shard.

    UsageError if a file cannot be read.
    """
    parts = (part for file in files for part in parts_of(file.absolute(), shard_bytes))
    return [Shard(tuple(group), strict) for group in grouped(parts, lambda part: part.bytes, shard_bytes)]


def tokenize_shards(
    shards: Sequence[Shard], words: Words, folder: Path, *,
    spread: Spread | None = None, progress: Progress | None = None,
) -> Iterator[FinishedShard]:  # fmt: skip
    """Yield the shards' files in order, making those that `folder` does not contain yet.

    A file that is damaged, or made from other inputs or with another tokenizer, is not reused. `folder` is created if
    its parent exists; it and the inputs must have the same paths wherever `spread` runs, such as `map_on_ray`; None
    works in this process, on all cores. `progress` is called with the input bytes processed, and may raise to stop.
    UsageError if an input cannot be read, or a strict shard rejects something; StoreError if the folder cannot be
    written, or another process works in it.
    """
    folder = folder.absolute()
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    done, total = 0, sum(shard.bytes for shard in shards)

    def tell(consumed: int) -> None:
        if progress is not None:
            progress("tokenising", done + consumed, total)

    finish = partial(finish_shard, words=words, folder=folder)
    results = spread(finish, shards) if spread else (finish(shard, progress=tell) for shard in shards)
    for shard, finished in zip(shards, results, strict=True):
        done += shard.bytes
        tell(0)
        yield finished


def finish_shard(
    shard: Shard, words: Words, folder: Path, progress: Callable[[int], None] | None = None
) -> FinishedShard:
    """Return the shard's file in `folder`, making it unless it exists and is sound; as `tokenize_shards`.

    The file, a container of kind `token-shard`, holds the array `tokens`: the documents' ids in order, each document
    followed by the separator V; uint16[n] if V is at most 65,535, else uint32[n].
    """
    identity = shard.identity(words)
    path = folder / (identity + SUFFIX)
    with contextlib.suppress(StoreError, KeyError, TypeError):
        noted = dict(open_store(path, KIND, check=True).metadata)
        if noted.pop("shard") == identity:
            return FinishedShard(path, ReadReport(**noted), resumed=True)
    report = ReadReport()
    documents = read_documents(shard.parts, report=report, render=words.render(), strict=shard.strict)
    told = _told(documents, progress or (lambda _: None))
    hash_, vocabulary = words.tokenizer_hash, words.vocabulary
    with write_store(path, KIND, tokenizer_hash=hash_, vocabulary=vocabulary, overwrite=True) as writer:
        writer.append("tokens", np.empty(0, symbol_dtype(vocabulary)))
        for symbols in tokenize(told, words.tokenizer(), vocabulary, words.eos_token_id, report=report):
            writer.append("tokens", symbols)
        writer.metadata |= {"shard": identity, **asdict(report)}
    return FinishedShard(path, report, resumed=False)


def _told(documents: Iterable[Document], tell: Callable[[int], None]) -> Iterator[Document]:
    """Yield the documents, and report progress in bytes."""
    reported = -_PROGRESS_BYTES
    for document in documents:
        if document.consumed - reported >= _PROGRESS_BYTES:
            reported = document.consumed
            tell(reported)
        yield document


def has_shards(folder: Path) -> bool:
    """Return whether a folder has finished shards."""
    return any(folder.glob("*" + SUFFIX))


def remove_shards(folder: Path) -> None:
    """Remove the files of `tokenize_shards`, finished or not, and the folder if it is empty then."""
    for path in folder.glob(f"*{SUFFIX}{BUILDING_SUFFIX}"):
        shutil.rmtree(path, ignore_errors=True)
    for path in (*folder.glob("*" + SUFFIX), *folder.glob(f"*{SUFFIX}.lock")):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the folder is missing or contains other files
        folder.rmdir()


def shard_symbols(paths: Iterable[Path]) -> Iterator[Symbols]:
    """Yield the documents of finished shards, in blocks of up to a million symbols; raises as `open_store`."""
    for path in paths:
        entry = open_store(path, KIND).entries[0]
        # read, not mapped: mapped pages would count as this process's memory until the system reclaims them
        for start in range(0, entry.length, _BLOCK_SYMBOLS):
            offset = entry.offset + start * np.dtype(entry.dtype).itemsize
            yield np.fromfile(path, entry.dtype, min(_BLOCK_SYMBOLS, entry.length - start), offset=offset)


class Stretch(NamedTuple):
    """Whole documents of a shard: its symbols from `start` up to `stop`."""

    shard: Path
    start: int
    stop: int


def build_segment(
    stretches: Sequence[Stretch], folder: Path, tokenizer_hash: str, vocabulary: int, progress: Progress | None = None
) -> SegmentEntry:
    """Sort the documents of `stretches`, and write them as one segment file; as `write_segment`."""
    texts = [open_store(shard, KIND, check=False).arrays["tokens"][start:stop] for shard, start, stop in stretches]
    return write_segment(folder, texts, tokenizer_hash=tokenizer_hash, vocabulary=vocabulary, progress=progress)


def plan_segments(shards: Sequence[Path], separator: int, most: int) -> Iterator[list[Stretch]]:
    """Yield the documents of each segment, in order: as many as fit into `most` symbols (tokens and separators).

    A longer document has a segment of its own. Shards without documents are skipped. UsageError if `most` is below 1,
    StoreError if a shard is missing or damaged.
    """
    if most < 1:
        raise UsageError(f"The maximum size of a segment is {most} tokens; give at least 1.")
    documents = (document for shard in shards for document in _documents(shard, separator))
    for group in grouped(documents, lambda document: document.stop - document.start, most):
        runs = [list(run) for _, run in itertools.groupby(group, lambda document: document.shard)]
        yield [Stretch(run[0].shard, run[0].start, run[-1].stop) for run in runs]


def _documents(shard: Path, separator: int) -> Iterator[Stretch]:
    start = at = 0
    for symbols in shard_symbols([shard]):
        for stop in (np.flatnonzero(symbols == separator) + at + 1).tolist():
            yield Stretch(shard, start, stop)
            start = stop
        at += len(symbols)
