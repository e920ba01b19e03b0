"""One file of named arrays: written in pieces, memory-mapped, verified by checksums.

The file records its format version, kind and tokenizer. Does not depend on the meaning of the arrays, which each kind
of store (tri-gram table, datastore) defines. The format is in docs/reference/formats.md.
"""

import contextlib
import errno
import json
import os
import shutil
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import filelock
import numpy as np
import numpy.typing as npt

from foredraft.atomic_file import check_place, followed, place_file, temporary_beside, unwritable
from foredraft.errors import StoreError, UsageError
from foredraft.options import user_path

AnyArray = npt.NDArray[Any]

MAGIC = b"\x89FDRAFT\n"  # invalid UTF-8, so no text file begins like this
FORMAT_VERSION = 1
ALIGNMENT = 64  # bytes: a cache line
BUILDING_SUFFIX = ".building"
EAGER_CHECK_BYTES = 32 << 20  # files up to this size are verified at every opening; chosen

_PREAMBLE = struct.Struct("<8sIIQI36x")  # magic, format version, header bytes, file bytes, crc32 of these and header
_MAX_HEADER_BYTES = 16 << 20  # limit for damaged files
_COPY_BYTES = 8 << 20  # copied or verified at once
_DTYPES = frozenset(
    ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
)
_FIELDS = {"byte_order": str, "kind": str, "tokenizer_hash": str, "vocabulary": int, "metadata": dict, "arrays": list}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """One array in the file."""

    name: str
    dtype: str
    length: int  # number of elements
    offset: int  # its first byte
    crc32: int  # of its bytes

    @property
    def end(self) -> int:
        """The byte after the array."""
        return self.offset + self.length * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Store:
    """An open store."""

    path: Path
    tokenizer_hash: str  # of the tokenizer that made the ids
    vocabulary: int  # number of token ids
    metadata: Mapping[str, Any]  # of the writer; JSON values
    entries: tuple[ArrayEntry, ...]  # in file order
    arrays: Mapping[str, AnyArray]  # read-only, 64-byte-aligned, one-dimensional views of the mapped file, by name


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _header_crc(preamble: bytes, header: bytes) -> int:
    """Return the crc32 of the 64-byte preamble, with zeros in its crc field, and of the header."""
    return zlib.crc32(header, zlib.crc32(preamble[:24] + bytes(4) + preamble[28:]))


def damaged(what: str, path: Path, how: str) -> StoreError:
    """Return the exception for a damaged file or folder; `what` is a noun for it."""
    return StoreError(f"The {what} {path} is damaged: {how}. Build or copy it again.")


def check_fit(
    path: Path, made_for: tuple[str, int], tokenizer_hash: str | None, vocabulary: int | None, remedy: str
) -> None:
    """Raise StoreError if `made_for`, tokenizer hash and vocabulary, does not fit the model's; None and "" fit any."""
    if tokenizer_hash and made_for[0] != tokenizer_hash:
        raise StoreError(
            f"{path} was made with another tokenizer ({made_for[0][:12]}..., and this model's is "
            f"{tokenizer_hash[:12]}...). {remedy}"
        )
    if vocabulary is not None and made_for[1] > vocabulary:
        raise StoreError(
            f"{path} holds a vocabulary of {made_for[1]} tokens and this model scores {vocabulary}. {remedy}"
        )


# --- reading


def open_store(path: str | os.PathLike[str], kind: str | None = None, *, check: bool | None = None) -> Store:
    """Map a store into memory, in milliseconds whatever its size.

    `kind` is the required kind. `check` says whether to verify the checksums of all arrays; None does so for files up
    to 32 MiB. Raises StoreError for a file that is missing, damaged, or of another format version or kind.
    """
    path = user_path(path)
    if sys.byteorder != "little":
        raise StoreError(f"{path} holds little-endian arrays, and this machine is big-endian, which is not supported.")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            fields, header_end = _read_header(path, file, size)
            mapped = np.asarray(np.memmap(file, np.uint8, "r", shape=(size,)))
    except OSError as error:
        raise StoreError(
            f"The store {path} cannot be opened ({error.strerror}). Check the name, or build it."
        ) from error
    if kind not in (None, fields["kind"]):
        raise StoreError(f"{path} holds a {fields['kind']!r}, not a {kind!r}. Give a file that was built as one.")
    entries = _checked_entries(path, fields["arrays"], header_end, size)
    if check or (check is None and size <= EAGER_CHECK_BYTES):
        _check_arrays(path, entries, mapped, header_end)
    arrays = {entry.name: mapped[entry.offset : entry.end].view(entry.dtype) for entry in entries}
    return Store(path, fields["tokenizer_hash"], fields["vocabulary"], fields["metadata"], entries, arrays)


def _read_header(path: Path, file: IO[bytes], size: int) -> tuple[dict[str, Any], int]:
    """Read and verify preamble and header; return the header's fields and its end in bytes."""
    preamble = file.read(_PREAMBLE.size)
    if not preamble:
        raise damaged("store", path, "it is empty")
    if preamble[: len(MAGIC)] != MAGIC:
        raise StoreError(f"{path} is not a foredraft store: it does not begin with the magic bytes of one.")
    if len(preamble) < _PREAMBLE.size:
        raise damaged("store", path, f"it ends after {len(preamble)} bytes, inside its header")
    _, version, header_bytes, file_bytes, crc = _PREAMBLE.unpack(preamble)
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{path} has format version {version}, and this foredraft reads version {FORMAT_VERSION}. Build it again."
        )
    if size != file_bytes:
        raise damaged("store", path, f"it has {size} bytes and should have {file_bytes}")
    header = file.read(min(header_bytes, _MAX_HEADER_BYTES))
    if len(header) != header_bytes or _header_crc(preamble, header) != crc:
        raise damaged("store", path, "its header does not match its checksum")
    try:
        fields = json.loads(header)
        sound = all(isinstance(fields[name], kind) for name, kind in _FIELDS.items())
    except (ValueError, LookupError, TypeError, RecursionError):
        sound = False
    if not sound or fields["byte_order"] != "little":
        raise damaged("store", path, "its header is not JSON, or a field is missing or wrong")
    return fields, _PREAMBLE.size + header_bytes


def _checked_entries(path: Path, raw: list[Any], header_end: int, size: int) -> tuple[ArrayEntry, ...]:
    """Return the header's array list as entries; checks that they lie in the file, in order and without overlap."""
    entries: list[ArrayEntry] = []
    end = header_end
    for item in raw:
        try:
            entry = ArrayEntry(**item)
            kinds = [type(each) for each in astuple(entry)]
            sound = kinds == [str, str, int, int, int] and entry.dtype in _DTYPES and entry.length >= 0
            sound = sound and entry.offset == _aligned(end) and entry.end <= size
        except TypeError:
            sound = False
        if not sound or any(entry.name == other.name for other in entries):
            raise damaged("store", path, f"its header describes an array as {item!r}, which is impossible")
        entries.append(entry)
        end = entry.end
    if end != size:
        raise damaged("store", path, f"it has {size} bytes and its arrays end after {end}")
    return tuple(entries)


def _check_arrays(path: Path, entries: tuple[ArrayEntry, ...], mapped: npt.NDArray[np.uint8], header_end: int) -> None:
    """Verify that every array matches its checksum and that the gaps between arrays are zero."""
    end = header_end
    for entry in entries:
        if mapped[end : entry.offset].any():
            raise damaged("store", path, f"the gap before its array {entry.name!r} is not zero")
        crc = 0
        for start in range(entry.offset, entry.end, _COPY_BYTES):
            crc = zlib.crc32(mapped[start : min(start + _COPY_BYTES, entry.end)].data, crc)
        if crc != entry.crc32:
            raise damaged("store", path, f"its array {entry.name!r} does not match its checksum")
        end = entry.end


# --- writing


@contextlib.contextmanager
def write_lock(lock: Path, path: Path) -> Iterator[None]:
    """Hold the lock file `lock` for writing `path`; StoreError if another process holds it or it cannot be made."""
    if not lock.parent.is_dir():  # some versions of filelock create it
        raise StoreError(f"{path} cannot be written, as its folder does not exist. Make it, or choose another.")
    check_place(lock)  # of a folder that takes no files, such as /proc, filelock would say that the lock is held
    try:
        held = filelock.FileLock(lock, timeout=0).acquire()
    except filelock.Timeout as error:
        raise StoreError(
            f"{path} is being written by another process, which holds {lock}. Wait for it, or write to another place."
        ) from error
    except OSError as error:
        raise unwritable(path, error) from error
    with held:
        yield


@dataclass(slots=True)
class StoreWriter:
    """A store being written, array by array and piece by piece."""

    folder: Path  # temporary, next to the output; the caller may put files there too
    metadata: dict[str, Any]  # of the header; the caller may add to it
    _entries: dict[str, ArrayEntry] = field(default_factory=dict)  # so far; their offsets are known at the end

    def append(self, name: str, chunk: AnyArray) -> None:
        """Append a one-dimensional `chunk` to array `name`; the file has the arrays in the order of their first chunks.

        Raises UsageError for another dtype than the array's, or a shape or dtype that a store cannot hold.
        """
        if chunk.ndim != 1 or chunk.dtype.name not in _DTYPES:
            raise UsageError(f"A store holds one-dimensional numbers; {name!r} is {chunk.dtype}{list(chunk.shape)}.")
        entry = self._entries.setdefault(name, ArrayEntry(name, chunk.dtype.name, 0, 0, 0))
        if chunk.dtype.name != entry.dtype:
            raise UsageError(f"The array {name!r} is {entry.dtype}; a piece of {chunk.dtype} cannot be added to it.")
        data = np.ascontiguousarray(chunk, chunk.dtype.newbyteorder("<")).view(np.uint8).data
        with self._place(name).open("ab") as file:
            file.write(data)
        self._entries[name] = replace(entry, length=entry.length + len(chunk), crc32=zlib.crc32(data, entry.crc32))

    def length(self, name: str) -> int:
        """Return the number of elements of array `name` so far."""
        return self._entries[name].length if name in self._entries else 0

    def _place(self, name: str) -> Path:
        return self.folder / f"array-{list(self._entries).index(name)}"

    def _header(self, fields: Mapping[str, Any]) -> bytes:
        header, header_bytes = b"", -1
        while len(header) > header_bytes:  # the header holds the offsets, which depend on its length; it only grows
            header_bytes = _aligned(len(header))
            end, entries = _PREAMBLE.size + header_bytes, []
            for each in self._entries.values():
                entry = replace(each, offset=_aligned(end))
                entries.append(asdict(entry))
                end = entry.end
            header = json.dumps({**fields, "metadata": self.metadata, "arrays": entries}).encode()
        header = header.ljust(header_bytes)  # JSON allows trailing spaces
        preamble = _PREAMBLE.pack(MAGIC, FORMAT_VERSION, len(header), end, 0)
        return _PREAMBLE.pack(MAGIC, FORMAT_VERSION, len(header), end, _header_crc(preamble, header)) + header

    def finish(self, path: Path, fields: Mapping[str, Any]) -> None:
        """Join header and arrays, and move the file to `path`."""
        whole = self.folder / "whole"
        with whole.open("wb") as out:
            out.write(self._header(fields))
            for place in map(self._place, self._entries):
                out.write(bytes(_aligned(out.tell()) - out.tell()))
                with place.open("rb") as file:
                    shutil.copyfileobj(file, out, _COPY_BYTES)
                place.unlink()  # so the disk holds only one array twice, not all
        place_file(whole, path)


@contextlib.contextmanager
def write_store(
    path: str | os.PathLike[str], kind: str, *, tokenizer_hash: str, vocabulary: int,
    metadata: Mapping[str, Any] | None = None, overwrite: bool = False, exclusive: bool = True,
) -> Iterator[StoreWriter]:  # fmt: skip
    """Yield a writer; the complete file appears when the `with` block ends without an error.

    Until then the lock `<path>.lock` is held, and everything is written to the folder `<path>.building`, which is
    always removed. A block that raises leaves the old file or none. The next writer removes the folder of a killed
    process. With `exclusive=False` there is no lock, and the folder is `<path>.*.part`, another one for each writer.

    Raises StoreError if another process writes the file, it exists and `overwrite` is not set, the folder is not
    writable, or the disk is full.
    """
    path = followed(Path(path))
    folder = path.with_name(path.name + BUILDING_SUFFIX) if exclusive else temporary_beside(path)
    lock = write_lock(path.with_name(path.name + ".lock"), path) if exclusive else contextlib.nullcontext()
    with lock:
        if path.is_dir():
            raise StoreError(f"{path} is a folder. Give the name of a file.")
        if path.exists() and not overwrite:
            raise StoreError(
                f"{path} exists already. Replace it with overwrite=True (--overwrite), or give another name."
            )
        try:
            with _store_errors(path, folder):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            writer = StoreWriter(folder, dict(metadata or {}))
            with _store_errors(path, folder, _NO_ROOM):  # other errors of the block are about other files
                yield writer
            fields = {"kind": kind, "byte_order": "little", "tokenizer_hash": tokenizer_hash, "vocabulary": vocabulary}
            with _store_errors(path, folder):
                writer.finish(path, fields)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _store_errors(path: Path, folder: Path, numbers: tuple[int, ...] | None = None) -> Iterator[None]:
    """Turn OSErrors, or only those with an errno in `numbers`, into StoreErrors."""
    try:
        yield
    except OSError as error:
        if numbers is not None and error.errno not in numbers:
            raise
        if error.errno not in _NO_ROOM:
            raise unwritable(path, error) from error
        used = sum(entry.stat().st_size for entry in os.scandir(folder)) if folder.is_dir() else 0
        raise StoreError(
            f"{path} was not written: the disk is full. {used / 2**20:.0f} MiB of temporary files were needed so far "
            "and are now removed. Free more space than that, or choose a folder on another disk."
        ) from error
