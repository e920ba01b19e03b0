"""One file of named arrays: written in pieces, opened by memory-mapping, checked by checksums.

Knows bytes, names and dtypes, and who may read them (format version, kind, tokenizer). Does not know what any array
means: each kind of store (tri-gram table, datastore) says that in its own file. Laid out in docs/reference/formats.md.
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import filelock
import numpy as np
import numpy.typing as npt

from foredraft.atomic_file import place_file
from foredraft.errors import StoreError, UsageError

AnyArray = npt.NDArray[Any]

MAGIC = b"\x89FDRAFT\n"  # not valid UTF-8, so no text file begins like this
FORMAT_VERSION = 1
ALIGNMENT = 64
BUILDING_SUFFIX = ".building"
EAGER_CHECK_BYTES = 32 << 20
"""Files up to this size have their arrays' checksums verified whenever they are opened."""

_PREAMBLE = struct.Struct("<8sIIQI36x")  # magic, format version, header bytes, file bytes, crc32 of these and header
_MAX_HEADER_BYTES = 16 << 20
_COPY_BYTES = 8 << 20
_DTYPES = frozenset(
    ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """Where one array lies: `length` elements of `dtype` from byte `offset`, and the crc32 of its bytes."""

    name: str
    dtype: str
    length: int
    offset: int
    crc32: int

    @property
    def end(self) -> int:
        """Byte behind the array's last."""
        return self.offset + self.length * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Store:
    """An open store.

    Attributes:
        path: the file.
        kind: what the arrays are, such as ``trigram-table``.
        tokenizer_hash: of the tokenizer whose ids the arrays hold.
        vocabulary: number of token ids.
        metadata: whatever the writer noted; JSON values.
        entries: the arrays' places, in file order.
        arrays: name to a read-only, 64-byte-aligned, one-dimensional view of the mapped file.
    """

    path: Path
    kind: str
    tokenizer_hash: str
    vocabulary: int
    metadata: Mapping[str, Any]
    entries: tuple[ArrayEntry, ...]
    arrays: Mapping[str, AnyArray]


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _header_crc(preamble: bytes, header: bytes) -> int:
    """Return the crc32 of the 64-byte preamble, its own crc field taken as zero, and the header behind it."""
    return zlib.crc32(header, zlib.crc32(preamble[:24] + bytes(4) + preamble[28:]))


# --- reading


def open_store(path: str | os.PathLike[str], kind: str | None = None, *, check: bool = True) -> Store:
    """Map a store into memory. Takes milliseconds whatever the size; files up to 32 MiB are checked in full.

    Args:
        path: the file.
        kind: the kind it must be; None takes any.
        check: False leaves the arrays of small files unchecked too.

    Raises:
        StoreError: missing, empty, truncated, damaged, of another format version, or of another kind.
    """
    store, mapped, header_end = _map_store(Path(path), kind)
    if check and len(mapped) <= EAGER_CHECK_BYTES:
        _check_arrays(store, mapped, header_end)
    return store


def check_store(path: str | os.PathLike[str], kind: str | None = None) -> Store:
    """Open a store and verify every byte of it, in pieces of a few MiB.

    Raises:
        StoreError: as `open_store`, or an array whose bytes are not those that were written.
    """
    store, mapped, header_end = _map_store(Path(path), kind)
    _check_arrays(store, mapped, header_end)
    return store


def _map_store(path: Path, kind: str | None) -> tuple[Store, npt.NDArray[np.uint8], int]:
    """Return the store, the whole file as mapped bytes, and where its header ends."""
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
    if kind is not None and fields["kind"] != kind:
        raise StoreError(f"{path} holds a {fields['kind']!r}, not a {kind!r}. Give a file that was built as one.")
    entries = _checked_entries(path, fields["arrays"], header_end, size)
    arrays = {entry.name: mapped[entry.offset : entry.end].view(entry.dtype) for entry in entries}
    store = Store(
        path, fields["kind"], fields["tokenizer_hash"], fields["vocabulary"], fields["metadata"], entries, arrays
    )
    return store, mapped, header_end


def _damaged(path: Path, how: str) -> StoreError:
    return StoreError(f"The store {path} is damaged: {how}. Build or copy it again.")


def _read_header(path: Path, file: IO[bytes], size: int) -> tuple[dict[str, Any], int]:
    """Read and verify preamble and header; return the header's fields and the byte where it ends."""
    preamble = file.read(_PREAMBLE.size)
    if not preamble:
        raise _damaged(path, "it is empty")
    if preamble[: len(MAGIC)] != MAGIC:
        raise StoreError(f"{path} is not a foredraft store: it does not begin with the store's magic bytes.")
    if len(preamble) < _PREAMBLE.size:
        raise _damaged(path, f"it ends after {len(preamble)} bytes, inside its header")
    _, version, header_bytes, file_bytes, crc = _PREAMBLE.unpack(preamble)
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{path} has format version {version}, and this foredraft reads version {FORMAT_VERSION}. Build it again."
        )
    if size != file_bytes:
        raise _damaged(path, f"it has {size} bytes and should have {file_bytes}")
    if header_bytes > min(size - _PREAMBLE.size, _MAX_HEADER_BYTES):
        raise _damaged(path, f"its header claims {header_bytes} bytes")
    header = file.read(header_bytes)
    if _header_crc(preamble, header) != crc:
        raise _damaged(path, "its header does not match its checksum")
    try:
        fields = json.loads(header)
    except ValueError as error:
        raise _damaged(path, "its header is not JSON") from error
    wanted = {"kind": str, "tokenizer_hash": str, "vocabulary": int, "metadata": dict, "arrays": list}
    if not isinstance(fields, dict) or fields.get("byte_order") != "little":
        raise _damaged(path, "its header does not say that its byte order is little-endian")
    for name, kind in wanted.items():
        if not isinstance(fields.get(name), kind):
            raise _damaged(path, f"its header has no usable {name!r}")
    return fields, _PREAMBLE.size + header_bytes


def _checked_entries(path: Path, raw: list[Any], header_end: int, size: int) -> tuple[ArrayEntry, ...]:
    """Turn the header's array list into entries that are known to lie inside the file, in order, without overlap."""
    entries: list[ArrayEntry] = []
    end = header_end
    for item in raw:
        try:
            entry = ArrayEntry(**item)
            sound = entry.dtype in _DTYPES and entry.length >= 0 and entry.offset == _aligned(end) and entry.crc32 >= 0
        except TypeError as error:
            raise _damaged(path, f"its header describes an array as {item!r}") from error
        if not sound or entry.end > size or any(entry.name == other.name for other in entries):
            raise _damaged(path, f"its array {entry.name!r} is not where it could be")
        entries.append(entry)
        end = entry.end
    if end != size:
        raise _damaged(path, f"it has {size} bytes and its arrays end after {end}")
    return tuple(entries)


def _check_arrays(store: Store, mapped: npt.NDArray[np.uint8], header_end: int) -> None:
    """Verify every array's checksum and that the gaps between arrays are zero."""
    end = header_end
    for entry in store.entries:
        if mapped[end : entry.offset].any():
            raise _damaged(store.path, f"the gap before its array {entry.name!r} is not zero")
        crc = 0
        for start in range(entry.offset, entry.end, _COPY_BYTES):
            crc = zlib.crc32(mapped[start : min(start + _COPY_BYTES, entry.end)].data, crc)
        if crc != entry.crc32:
            raise _damaged(store.path, f"its array {entry.name!r} does not match its checksum")
        end = entry.end


# --- writing


@dataclass(slots=True)
class _Spool:
    """An array being written: its bytes so far lie in `file`."""

    file: IO[bytes]
    dtype: np.dtype[Any]
    length: int = 0
    crc32: int = 0


class StoreWriter:
    """Writes a store array by array and piece by piece; the file appears, complete, when the `with` block ends well.

    While it works it holds the lock `<path>.lock` and keeps everything in the folder `<path>.building` beside the
    output (`folder`, where the caller may put temporary files too). Whatever ends the block, the folder is removed; a
    block that raises leaves the old file, or none. A folder left by a killed process is cleared by the next writer.
    With `exclusive=False` it takes no lock, as its caller holds one for it.

    Raises:
        StoreError: another writer is at work, the file exists and `overwrite` is not set, the folder cannot be
            written to, or the disk is full.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        kind: str,
        *,
        tokenizer_hash: str,
        vocabulary: int,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        exclusive: bool = True,
    ) -> None:
        self.path = Path(path)
        self.folder = self.path.with_name(self.path.name + BUILDING_SUFFIX)
        self.metadata: dict[str, Any] = dict(metadata or {})
        """Noted in the header; may be added to until the block ends."""
        self._fields = {
            "kind": kind, "byte_order": "little", "tokenizer_hash": tokenizer_hash, "vocabulary": vocabulary
        }  # fmt: skip
        self._overwrite = overwrite
        self._lock = filelock.FileLock(self.path.with_name(self.path.name + ".lock"), timeout=0)
        self._exclusive = exclusive
        self._spools: dict[str, _Spool] = {}

    def __enter__(self) -> Self:
        """Take the lock and make the folder."""
        if not self.path.parent.is_dir():  # some versions of filelock would make it
            raise StoreError(
                f"{self.path} cannot be written, as its folder does not exist. Make it, or choose another."
            )
        try:
            if self._exclusive:
                self._lock.acquire()
        except filelock.Timeout as error:
            raise StoreError(
                f"{self.path} is being written by another process, which holds {self._lock.lock_file}. "
                "Wait for it, or write to another file."
            ) from error
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._prepare()
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError):
                raise self._unwritable(error) from error
            raise
        return self

    def _prepare(self) -> None:
        """Refuse what must not be overwritten, and make an empty folder."""
        if self.path.is_dir():
            raise StoreError(f"{self.path} is a folder. Give the name of a file.")
        if self.path.exists() and not self._overwrite:
            raise StoreError(
                f"{self.path} exists already. Replace it with overwrite=True (--overwrite), or give another name."
            )
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the file in its place if the block ended well; clean up in any case."""
        try:
            with self._disk_errors():
                if error is None:
                    self._finish()
                elif isinstance(error, OSError) and error.errno in _NO_ROOM:
                    raise error
        finally:
            for spool in self._spools.values():
                with contextlib.suppress(OSError):  # closing flushes, which a full disk refuses again
                    spool.file.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.release()

    def append(self, name: str, chunk: AnyArray) -> None:
        """Add `chunk`, one-dimensional, to the end of array `name`; arrays lie in the file in order of first mention.

        Raises:
            UsageError: the chunk's shape or dtype is not what a store, or this array, can hold.
        """
        if chunk.ndim != 1 or chunk.dtype.name not in _DTYPES:
            raise UsageError(f"A store holds one-dimensional numbers; {name!r} is {chunk.dtype}{list(chunk.shape)}.")
        if name not in self._spools:
            self._spools[name] = _Spool((self.folder / f"array-{len(self._spools)}").open("w+b"), chunk.dtype)
        spool = self._spools[name]
        if chunk.dtype != spool.dtype:
            raise UsageError(f"The array {name!r} is {spool.dtype}; a piece of {chunk.dtype} cannot be added to it.")
        data = np.ascontiguousarray(chunk, chunk.dtype.newbyteorder("<")).view(np.uint8)
        spool.file.write(data.data)
        spool.length += len(chunk)
        spool.crc32 = zlib.crc32(data.data, spool.crc32)

    def length(self, name: str) -> int:
        """Return how many elements array `name` has so far."""
        return self._spools[name].length if name in self._spools else 0

    def _header(self) -> bytes:
        """Return preamble and header. Offsets depend on the header's length, which depends on the offsets' digits."""
        header_bytes = 0
        while True:
            end = _PREAMBLE.size + header_bytes
            entries = []
            for name, spool in self._spools.items():
                offset = _aligned(end)
                entries.append(
                    {"name": name, "dtype": spool.dtype.name, "length": spool.length, "offset": offset,
                     "crc32": spool.crc32}
                )  # fmt: skip
                end = offset + spool.length * spool.dtype.itemsize
            header = json.dumps({**self._fields, "metadata": self.metadata, "arrays": entries}).encode()
            if len(header) <= header_bytes:
                break
            header_bytes = _aligned(len(header))  # only grows, so this ends
        header = header.ljust(header_bytes)  # JSON may end in spaces
        preamble = _PREAMBLE.pack(MAGIC, FORMAT_VERSION, len(header), end, 0)
        return _PREAMBLE.pack(MAGIC, FORMAT_VERSION, len(header), end, _header_crc(preamble, header)) + header

    def _finish(self) -> None:
        """Join the spooled arrays behind the header, and put the file in its place."""
        whole = self.folder / "whole"
        with whole.open("wb") as out:
            out.write(self._header())
            for spool in self._spools.values():
                out.write(bytes(_aligned(out.tell()) - out.tell()))
                spool.file.seek(0)
                shutil.copyfileobj(spool.file, out, _COPY_BYTES)
                spool.file.close()
                Path(spool.file.name).unlink()  # so that the disk needs room for one array twice, not for all
        place_file(whole, self.path)

    def _unwritable(self, error: OSError) -> StoreError:
        return StoreError(
            f"{self.path} cannot be written ({error.strerror}). Make its folder, or choose one you can write to."
        )

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Turn the system's errors while writing into sentences."""
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise self._unwritable(error) from error
            used = sum(entry.stat().st_size for entry in os.scandir(self.folder))
            raise StoreError(
                f"{self.path} was not written: the disk is full. {used / 2**20:.0f} MiB of temporary files were needed "
                "so far and are now removed. Free more space than that, or choose a folder on another disk."
            ) from error
