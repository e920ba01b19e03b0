"""The file of named arrays: arrays are read back as written, damaged files are refused, failures leave no files."""

import errno
import json
import os
import struct
import zlib
from pathlib import Path

import filelock
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.errors import StoreError, UsageError
from foredraft.index import storage
from foredraft.index.storage import MAGIC, open_store, write_store

DTYPES = [np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int32, np.int64, np.float16, np.float32, np.float64]


def write(path, arrays, pieces=1, **options):
    with write_store(path, "test", tokenizer_hash="abc", vocabulary=7, **options) as writer:
        for name, array in arrays.items():
            for piece in np.array_split(array, pieces):
                writer.append(name, piece)
    return path


def names_in(folder):
    """The files in a folder except locks, which stay."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


@pytest.fixture
def stored(tmp_path):
    arrays = {"numbers": np.arange(100, dtype=np.uint32), "odd": np.arange(5, dtype=np.uint8), "none": np.empty(0)}
    return write(tmp_path / "a.store", arrays, metadata={"note": "für"})


@given(
    lengths=st.lists(st.integers(0, 40), max_size=6),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=6, max_size=6),
    pieces=st.integers(1, 4),
    note=st.text(max_size=80),
)
@settings(max_examples=30, deadline=None)
def test_what_is_written_comes_back(tmp_path_factory, lengths, dtypes, pieces, note):
    arrays = {
        f"array {i}": np.arange(n).astype(dtype) for i, (n, dtype) in enumerate(zip(lengths, dtypes, strict=False))
    }
    path = write(tmp_path_factory.mktemp("store") / "x", arrays, pieces, metadata={"note": note})
    for opened in (open_store(path, "test"), open_store(path, check=True)):
        assert list(opened.arrays) == list(arrays)
        assert (opened.tokenizer_hash, opened.vocabulary) == ("abc", 7)
        assert opened.metadata == {"note": note}
        for name, array in arrays.items():
            assert opened.arrays[name].dtype == array.dtype
            assert opened.arrays[name].tolist() == array.tolist()


def test_views_are_plain_aligned_and_read_only(stored):
    for array in open_store(stored).arrays.values():
        assert type(array) is np.ndarray
        assert not array.flags.writeable
        assert array.size == 0 or array.ctypes.data % 64 == 0


def test_another_reader_finds_the_arrays_where_the_documentation_says(stored):
    data = stored.read_bytes()
    assert data[:8] == MAGIC
    version, header_bytes = np.frombuffer(data, "<u4", 2, 8)
    assert (version, np.frombuffer(data, "<u8", 1, 16)[0]) == (1, len(data))
    assert np.frombuffer(data, "<u4", 1, 24)[0] == zlib.crc32(data[:24] + bytes(4) + data[28 : 64 + header_bytes])
    header = json.loads(data[64 : 64 + header_bytes])
    place = header["arrays"][0]
    assert (place["name"], place["dtype"], place["length"], place["offset"] % 64) == ("numbers", "uint32", 100, 0)
    raw = data[place["offset"] : place["offset"] + 400]
    assert np.frombuffer(raw, "<u4").tolist() == list(range(100))
    assert place["crc32"] == zlib.crc32(raw)


@pytest.mark.slow
def test_no_flipped_bit_is_taken(stored):
    data = bytearray(stored.read_bytes())
    generator = np.random.default_rng(0)
    for at in range(len(data)):
        data[at] ^= 1 << (bit := int(generator.integers(8)))
        stored.write_bytes(data)
        with pytest.raises(StoreError, match=r"a\.store"):
            open_store(stored)
        data[at] ^= 1 << bit


def test_no_other_length_is_taken(stored):
    data = stored.read_bytes()
    for length in [*range(0, len(data), 7), len(data) - 1]:
        stored.write_bytes(data[:length])
        with pytest.raises(StoreError, match=r"a\.store"):
            open_store(stored)
    stored.write_bytes(data + b"\0")
    with pytest.raises(StoreError, match="should have"):
        open_store(stored)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "empty"), (b"\x1f\x8b garbage" * 50, "not a foredraft store"), (MAGIC, "ends after 8 bytes")],
)
def test_other_files_are_refused(tmp_path, content, says):
    path = tmp_path / "b"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=says):
        open_store(path)


def test_missing_file_folder_kind_and_version_are_refused(stored, tmp_path):
    with pytest.raises(StoreError, match="No such file"):
        open_store(tmp_path / "missing")
    with pytest.raises(StoreError, match="cannot be opened"):
        open_store(tmp_path)
    with pytest.raises(StoreError, match="holds a 'test', not a 'datastore'"):
        open_store(stored, "datastore")
    data = bytearray(stored.read_bytes())
    data[8] = 9
    stored.write_bytes(data)
    with pytest.raises(StoreError, match="format version 9"):
        open_store(stored)


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 0},
        {"offset": 1 << 40},
        {"length": 1 << 40},
        {"length": 1.0},
        {"dtype": "object"},
        {"name": "odd"},
        {"name": []},
        {"more": 1},
    ],
)
def test_headers_that_point_elsewhere_are_refused(stored, change):
    """A header of another program may have a right checksum and still be wrong."""
    data = stored.read_bytes()
    size = int(np.frombuffer(data, "<u4", 1, 12)[0])
    header = json.loads(data[64 : 64 + size])
    header["arrays"][0].update(change)
    changed = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    assert len(changed) == size, "the header has no room for this change"
    unchecked = struct.pack("<8sIIQI36x", MAGIC, 1, size, len(data), 0)
    preamble = struct.pack("<8sIIQI36x", MAGIC, 1, size, len(data), zlib.crc32(unchecked + changed))
    stored.write_bytes(preamble + changed + data[64 + size :])
    with pytest.raises(StoreError, match="damaged"):
        open_store(stored)


def test_large_files_are_opened_unread_and_checked_when_asked(stored, monkeypatch):
    monkeypatch.setattr(storage, "EAGER_CHECK_BYTES", 100)
    data = bytearray(stored.read_bytes())
    data[open_store(stored).entries[0].offset] ^= 1
    stored.write_bytes(data)
    assert open_store(stored).arrays["numbers"][0] == 1
    with pytest.raises(StoreError, match="'numbers' does not match its checksum"):
        open_store(stored, check=True)


# --- writing


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failed_writer_leaves_the_old_file_and_nothing_else(stored, error):
    def fail():
        with write_store(stored, "t", tokenizer_hash="", vocabulary=1, overwrite=True) as writer:
            writer.append("x", np.zeros(1000))
            raise error

    before = stored.read_bytes()
    with pytest.raises(error):
        fail()
    assert stored.read_bytes() == before
    assert names_in(stored.parent) == ["a.store"]
    write(stored, {"x": np.zeros(3)}, overwrite=True)  # the lock is free again
    assert names_in(stored.parent) == ["a.store"]


def test_what_a_killed_writer_left_is_cleared(tmp_path):
    left = tmp_path / "a.store.building"
    left.mkdir()
    (left / "array-0").write_bytes(b"old")
    write(tmp_path / "a.store", {"x": np.arange(3)})
    assert names_in(tmp_path) == ["a.store"]
    assert open_store(tmp_path / "a.store").arrays["x"].tolist() == [0, 1, 2]


def test_existing_files_are_overwritten_only_when_asked(stored):
    before = stored.read_bytes()
    with pytest.raises(StoreError, match="exists already"):
        write(stored, {"x": np.zeros(3)})
    assert stored.read_bytes() == before
    old = open_store(stored)
    write(stored, {"x": np.ones(3)}, overwrite=True)
    assert open_store(stored).arrays["x"].tolist() == [1, 1, 1]
    assert old.arrays["numbers"].tolist() == list(range(100)), "an open store keeps the file that it opened"


def test_a_second_writer_is_refused(tmp_path):
    with filelock.FileLock(tmp_path / "x.lock"), pytest.raises(StoreError, match="being written by another process"):
        write(tmp_path / "x", {"x": np.zeros(3)})
    assert names_in(tmp_path) == []


def test_places_that_cannot_be_written_are_refused(tmp_path):
    with pytest.raises(StoreError, match="cannot be written"):
        write(tmp_path / "no folder" / "x", {})
    with pytest.raises(StoreError, match="is a folder"):
        write(tmp_path, {}, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        write(tmp_path / "file" / "x", {})


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_folder_that_takes_no_files_is_not_said_to_be_locked():
    with pytest.raises(StoreError, match="/proc is not writable"):
        write(Path("/proc/x"), {})


@pytest.mark.parametrize("where", ["append", "finish"])
def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path, monkeypatch, where):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def attempt():
        with write_store(tmp_path / "x", "t", tokenizer_hash="", vocabulary=1) as writer:
            writer.append("x", np.zeros(1000))
            if where == "append":
                full()

    if where == "finish":
        monkeypatch.setattr(storage.shutil, "copyfileobj", full)
    with pytest.raises(StoreError, match="disk is full"):
        attempt()
    assert names_in(tmp_path) == []


def test_arrays_that_a_store_cannot_hold_are_refused(tmp_path):
    for bad in (np.zeros((2, 2)), np.array(["a"]), np.array([True])):
        with pytest.raises(UsageError, match="one-dimensional numbers"):
            write(tmp_path / "x", {"x": bad})
    with write_store(tmp_path / "y", "t", tokenizer_hash="", vocabulary=1) as writer:
        writer.append("x", np.zeros(1, np.uint8))
        with pytest.raises(UsageError, match="cannot be added"):
            writer.append("x", np.zeros(1, np.uint16))
    assert names_in(tmp_path) == ["y"]


def test_big_endian_pieces_are_written_little_endian(tmp_path):
    write(tmp_path / "x", {"x": np.arange(3, dtype=">u4")})
    assert open_store(tmp_path / "x").arrays["x"].tolist() == [0, 1, 2]
