"""The datastore: a folder of immutable sorted segments and a manifest that lists the valid ones.

A segment is a container (index/storage.py) of a text and its suffix array (index/suffix_array.py). One writer at a time
changes a store. The manifest is written last and renamed into place, so a reader sees the store before or after a
change. Does not depend on where the text comes from, nor on searches. The format is in docs/reference/formats.md.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.atomic_file import TEMPORARY_SUFFIX, store_file, unwritable
from foredraft.errors import StoreError, UsageError
from foredraft.index import suffix_array
from foredraft.index.storage import BUILDING_SUFFIX, check_fit, damaged, open_store, write_lock, write_store
from foredraft.index.suffix_array import SuffixArrays, Symbols, grouped, pieces, symbol_dtype

SEGMENT_KIND = "datastore-segment"
MANIFEST = "datastore.json"
LOCK = "datastore.lock"
SEGMENT_SUFFIX = ".segment"
WORDS_FILE = "own-words"  # of a memory, beside the store of its texts
FORMAT_VERSION = 1

_FORMAT = "foredraft-datastore"
_SEGMENT_NAME = re.compile(r"[0-9a-f]{16}")
_SEGMENT_FILE = _SEGMENT_NAME.pattern + re.escape(SEGMENT_SUFFIX)
# files and folders that foredraft makes in a store, and removes; a user's own backup.segment or film.part is not one
_STORE_FILE = re.compile(
    f"{re.escape(LOCK)}|{_SEGMENT_FILE}{re.escape(BUILDING_SUFFIX)}"
    f"|({re.escape(MANIFEST)}|{_SEGMENT_FILE})([.][0-9a-f]+{re.escape(TEMPORARY_SUFFIX)})?"
)
_REMEDY = "Build a store for this model: foredraft index build INPUT... --model MODEL --out FOLDER"

Progress = Callable[[str, int, int], None]
"""Called with a phase, such as ``sorting``, the part of its work that is done, and all of it."""


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A segment in the manifest."""

    name: str  # the first 16 hex digits of the SHA-256 of its symbols; its file is `<name>.segment`
    tokens: int  # without separators
    documents: int
    bytes: int  # of its file


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a store."""

    tokenizer_hash: str  # of the tokenizer that made the ids
    vocabulary: int  # number of token ids, and the separator after each document
    segments: tuple[SegmentEntry, ...]  # in the order added

    @property
    def tokens(self) -> int:
        """Tokens of all segments."""
        return sum(entry.tokens for entry in self.segments)


@dataclass(frozen=True, slots=True)
class Datastore:
    """An open store."""

    folder: Path
    manifest: Manifest
    segments: tuple[SuffixArrays, ...]  # memory-mapped, in the manifest's order
    version: tuple[int, int, int]  # see `manifest_version`


def segment_path(folder: Path, name: str) -> Path:
    """Return the path of a segment."""
    return folder / (name + SEGMENT_SUFFIX)


# --- reading


def open_datastore(
    folder: str | os.PathLike[str], tokenizer_hash: str | None = None, vocabulary: int | None = None
) -> Datastore:
    """Map a store into memory, in milliseconds whatever its size. Only `check_datastore` verifies its checksums.

    Raises StoreError for a store that is missing, visibly damaged, of another version or tokenizer (None and "" accept
    any), or with more tokens than `vocabulary`.
    """
    folder = Path(folder)
    for _ in range(3):
        version = manifest_version(folder)
        manifest = read_manifest(folder)
        check_fit(folder, (manifest.tokenizer_hash, manifest.vocabulary), tokenizer_hash, vocabulary, _REMEDY)
        try:
            segments = tuple(open_segment(folder, manifest, entry) for entry in manifest.segments)
        except StoreError:
            if manifest_version(folder) == version:
                raise
            continue  # the store changed meanwhile, so files of the old manifest may be gone
        return Datastore(folder, manifest, segments, version)
    raise StoreError(f"The store {folder} keeps changing while it is opened. Try again when nothing writes to it.")


def manifest_version(folder: Path) -> tuple[int, int, int]:
    """Return a value that changes with the manifest: its modification time, inode and size; zeros without one."""
    try:
        status = (folder / MANIFEST).stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_ino, status.st_size)


def read_manifest(folder: Path) -> Manifest:
    """Read and verify the manifest; raises StoreError if it is missing, damaged, or of another version."""
    path = folder / MANIFEST
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise StoreError(f"{folder} is not a datastore: it has no {MANIFEST}. {_REMEDY}") from error
    except OSError as error:
        raise StoreError(f"The store {folder} cannot be opened ({error.strerror}). Check the name.") from error
    except (ValueError, RecursionError) as error:
        raise damaged("store", folder, f"{MANIFEST} is not JSON") from error
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise StoreError(f"{path} is not the manifest of a datastore. {_REMEDY}")
    if (fields.get("version"), fields.get("byte_order")) != (FORMAT_VERSION, "little"):
        raise StoreError(
            f"The store {folder} has format version {fields.get('version')} and byte order "
            f"{fields.get('byte_order')!r}; this foredraft reads version {FORMAT_VERSION}, little. Build it again."
        )
    if fields.pop("crc32", None) != _manifest_crc(fields):
        raise damaged("store", folder, f"{MANIFEST} does not match its checksum")
    try:
        segments = tuple(SegmentEntry(**entry) for entry in fields["segments"])
        if any([type(each) for each in astuple(entry)] != [str, int, int, int] for entry in segments):
            raise TypeError("a segment's field has the wrong type")
        strange = [entry.name for entry in segments if not _SEGMENT_NAME.fullmatch(entry.name)]
        manifest = Manifest(str(fields["tokenizer_hash"]), int(fields["vocabulary"]), segments)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged("store", folder, f"{MANIFEST} lacks a field, or has one too many or of a wrong type") from error
    if strange:
        raise damaged("store", folder, f"{MANIFEST} names a segment {strange[0]!r}")
    return manifest


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the serialised manifest."""
    fields = {"format": _FORMAT, "version": FORMAT_VERSION, "byte_order": "little", **asdict(manifest)}
    return json.dumps(fields | {"crc32": _manifest_crc(fields)}, indent=1).encode() + b"\n"


def _manifest_crc(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def open_segment(folder: Path, manifest: Manifest, entry: SegmentEntry, *, check: bool = False) -> SuffixArrays:
    """Map a segment into memory, and `check` its checksums; raises StoreError if it contradicts the manifest."""
    path, vocabulary = segment_path(folder, entry.name), manifest.vocabulary
    if not path.exists():
        raise damaged("store", folder, f"its segment {entry.name} is missing")
    store = open_store(path, SEGMENT_KIND, check=check)
    if (store.tokenizer_hash, store.vocabulary) != (manifest.tokenizer_hash, vocabulary):
        raise damaged("store", folder, f"its segment {entry.name} belongs to another tokenizer")
    wanted = {"symbols": (symbol_dtype(vocabulary).name,), "suffixes": ("int32", "int64"), "first": ("int64",)}
    for name, dtypes in wanted.items():
        if name not in store.arrays or store.arrays[name].dtype.name not in dtypes:
            raise damaged("store", folder, f"its segment {entry.name} has no usable array {name!r}")
    text = SuffixArrays(*(store.arrays[name] for name in wanted))
    lengths = tuple(map(len, text))
    if lengths != (entry.tokens + entry.documents, entry.tokens, vocabulary + 1) or entry.documents < 1:
        raise damaged("store", folder, f"the arrays of its segment {entry.name} have lengths {lengths}")
    return text


def check_datastore(folder: str | os.PathLike[str]) -> Iterator[SegmentEntry]:
    """Yield each segment once its checksums and order are verified; raise StoreError. Takes 8 bytes per token."""
    folder = Path(folder)
    version, manifest = manifest_version(folder), read_manifest(folder)
    for entry in manifest.segments:
        try:
            text = open_segment(folder, manifest, entry, check=True)
            size = segment_path(folder, entry.name).stat().st_size
        except (StoreError, FileNotFoundError) as error:
            if manifest_version(folder) == version:
                raise
            raise StoreError(f"The store {folder} was changed while it was checked. Check it again.") from error
        if size != entry.bytes:
            raise damaged("store", folder, f"its segment {entry.name} differs in size from {MANIFEST}")
        if segment_name([text.symbols]) != entry.name:
            raise damaged("store", folder, f"the text of its segment {entry.name} does not match its name")
        if text.symbols[-1] != manifest.vocabulary or not suffix_array.first_matches(text):
            raise damaged("store", folder, f"the text and the array 'first' of its segment {entry.name} do not match")
        if not suffix_array.is_sorted(text):
            raise damaged("store", folder, f"the suffixes of its segment {entry.name} are out of order")
        yield entry


# --- writing segments


def segment_name(texts: Sequence[Symbols]) -> str:
    """Return the name of a segment made of `texts`: the first 16 hex digits of the SHA-256 of their bytes."""
    digest = hashlib.sha256()
    for piece in pieces(texts):
        digest.update(np.ascontiguousarray(piece).data)
    return digest.hexdigest()[:16]


def write_segment(
    folder: Path, texts: Sequence[Symbols], *, tokenizer_hash: str, vocabulary: int, progress: Progress | None = None
) -> SegmentEntry:
    """Sort texts and write them as one segment file, which belongs to a store only once a manifest lists it.

    The file depends on the texts alone. Memory: 12 bytes per token for vocabularies of 255 to 65,535; 18 above. The
    texts are documents, each followed by the separator `vocabulary`; read one after the other, best memory-mapped.

    Raises UsageError without a token, for one above the vocabulary, or for a text that does not end in the separator,
    and StoreError if the folder is not writable or the disk is full.
    """
    report = progress or (lambda *_: None)
    if any(len(text) and int(text[-1]) != vocabulary for text in texts):
        raise UsageError("A text for a segment must end in the separator, so that no continuation crosses its end.")
    length = sum(map(len, texts))
    report("sorting", 0, length)
    suffixes, first = suffix_array.sorted_suffixes(texts, vocabulary)
    if not len(suffixes):
        raise UsageError("The inputs hold no text, so there is nothing to store. Give files with text in them.")
    report("sorting", length, length)
    name = segment_name(texts)
    path = segment_path(folder, name)
    dtype = np.int32 if length <= np.iinfo(np.int32).max else np.int64
    with write_store(
        path, SEGMENT_KIND, tokenizer_hash=tokenizer_hash, vocabulary=vocabulary, overwrite=True, exclusive=False
    ) as writer:
        for piece in pieces(texts):
            writer.append("symbols", piece)
        for places in pieces([suffixes]):
            writer.append("suffixes", places.astype(dtype, copy=False))
            report("writing", writer.length("suffixes"), len(suffixes))
        writer.append("first", first)
    return SegmentEntry(name, len(suffixes), length - len(suffixes), path.stat().st_size)


# --- changing a store


@contextlib.contextmanager
def write_datastore(
    folder: str | os.PathLike[str], *, tokenizer_hash: str | None = None, vocabulary: int | None = None,
    create: bool = False, overwrite: bool = False,
) -> Iterator["DatastoreWriter"]:  # fmt: skip
    """Yield a writer that holds the store's lock; the files of a new store that was not committed are removed.

    Tokenizer hash and vocabulary are the store's if None. With `create` an empty store is begun, and with `overwrite`
    an existing one replaced; without `create` the store must exist. StoreError if it is being written or damaged.
    """
    folder = Path(folder)
    if not create:
        read_manifest(folder)  # refuses a folder that is not a store, before a lock file is created there
    elif tokenizer_hash is None or vocabulary is None:
        raise UsageError("A new store needs a tokenizer's hash and a vocabulary.")
    else:
        check_folder(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(folder, error) from error
    with write_lock(folder / LOCK, folder):
        manifest = Manifest(tokenizer_hash or "", vocabulary or 0, ())
        if not create:
            manifest = open_datastore(folder, tokenizer_hash).manifest
        elif (folder / MANIFEST).exists() and not overwrite:
            raise StoreError(
                f"The store {folder} exists already. Add to it (foredraft index add), replace it with overwrite=True "
                "(--overwrite), or give another name."
            )
        try:
            yield DatastoreWriter(folder, manifest)
        finally:
            if not (folder / MANIFEST).exists():
                _remove(path for path in folder.glob("*") if _STORE_FILE.fullmatch(path.name))
                with contextlib.suppress(OSError):  # it holds other things
                    folder.rmdir()


def check_folder(folder: Path) -> None:
    """Raise StoreError if `folder`, which need not exist, is a file or holds what is not of a store or a memory."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file. Give the name of a folder.")
    names = sorted(path.name for path in folder.glob("*"))
    foreign = [name for name in names if not (_STORE_FILE.fullmatch(name) or name.startswith(WORDS_FILE))]
    if foreign:
        raise StoreError(f"{folder} holds other things ({foreign[0]}). Give an empty folder, or a new name.")


@dataclass(slots=True)
class DatastoreWriter:
    """Adds, merges and removes segments of a store.

    Changes take effect at `commit`, which writes the manifest and then removes the files that it does not list. A
    killed process leaves the store unchanged, and files that the next `commit` removes.
    """

    folder: Path
    manifest: Manifest  # of the store after `commit`

    def add(self, texts: Sequence[Symbols], progress: Progress | None = None) -> SegmentEntry:
        """Sort texts into a new segment; raises what `write_segment` and `adopt` do."""
        return self.adopt(self._write(texts, progress))

    def _write(self, texts: Sequence[Symbols], progress: Progress | None) -> SegmentEntry:
        hash_, vocabulary = self.manifest.tokenizer_hash, self.manifest.vocabulary
        return write_segment(self.folder, texts, tokenizer_hash=hash_, vocabulary=vocabulary, progress=progress)

    def holds(self, texts: Sequence[Symbols]) -> bool:
        """Return whether the store has a segment of exactly these texts."""
        return segment_name(texts) in self._names()

    def _names(self) -> list[str]:
        return [entry.name for entry in self.manifest.segments]

    def adopt(self, entry: SegmentEntry) -> SegmentEntry:
        """Add a segment whose file is in the folder; raises UsageError if the store holds its text already."""
        if entry.name in self._names():
            raise UsageError(f"The store {self.folder} holds this text already, as segment {entry.name}.")
        self.manifest = replace(self.manifest, segments=(*self.manifest.segments, entry))
        return entry

    def remove(self, name: str) -> SegmentEntry:
        """Remove a segment; raises UsageError for an unknown name."""
        names = self._names()
        if name not in names:
            raise UsageError(
                f"The store {self.folder} has no segment {name!r}. Its segments are: {', '.join(names) or 'none'}."
            )
        kept = list(self.manifest.segments)
        removed = kept.pop(names.index(name))
        self.manifest = replace(self.manifest, segments=tuple(kept))
        return removed

    def drop_oldest(self, tokens: int) -> None:
        """Remove the oldest segment; of one with more than `tokens`, which a user merged, only documents with as many.

        What stays of such a segment is written anew. Raises what `write_segment` does.
        """
        oldest = self.manifest.segments[0]
        self.remove(oldest.name)
        if oldest.tokens <= tokens:
            return
        symbols = open_segment(self.folder, self.manifest, oldest, check=True).symbols
        ends = np.flatnonzero(symbols == self.manifest.vocabulary)
        dropped = ends[np.searchsorted(ends - np.arange(len(ends)), tokens)] + 1  # whole documents
        if np.any(symbols[dropped:] != self.manifest.vocabulary):
            kept = self._write([symbols[dropped:]], None)
            self.manifest = replace(self.manifest, segments=(kept, *self.manifest.segments))

    def merge(self, most_tokens: int, progress: Progress | None = None) -> int:
        """Merge neighbouring segments up to `most_tokens` each; return by how many segments the store shrank."""
        before = self.manifest.segments
        merged: list[SegmentEntry] = []
        for group in grouped(before, lambda entry: entry.tokens, most_tokens):
            # checked, as a damaged text would get sound checksums
            opened = (open_segment(self.folder, self.manifest, entry, check=True) for entry in group)
            merged.append(group[0] if len(group) == 1 else self._write([each.symbols for each in opened], progress))
        different = tuple(dict.fromkeys(merged))  # merged texts may be those of another segment
        self.manifest = replace(self.manifest, segments=different)
        return len(before) - len(different)

    def commit(self) -> None:
        """Apply the changes and remove unlisted files; a StoreError leaves the store unchanged."""
        store_file(self.folder / MANIFEST, manifest_bytes(self.manifest))
        _remove(leftovers(self.folder))


def leftovers(folder: Path) -> list[Path]:
    """Return the files that a killed writer left and the manifest does not list. Raises what `read_manifest` does."""
    listed = [segment_path(folder, entry.name).name for entry in read_manifest(folder).segments]
    kept = {MANIFEST, LOCK, *listed}
    return sorted(path for path in folder.iterdir() if _STORE_FILE.fullmatch(path.name) and path.name not in kept)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # Windows keeps mapped files; the next commit tries again
                path.unlink(missing_ok=True)
