"""Files that are replaced at once: by one writer, and by several of one process."""

import os
from pathlib import Path

import pytest

from foredraft.atomic_file import check_place, replacing
from foredraft.errors import StoreError


def test_two_writers_of_one_process_do_not_share_a_temporary_file(tmp_path):
    path = tmp_path / "table"
    with replacing(path) as first:
        first.write(b"the first ")
        with replacing(path) as second:
            second.write(b"the second")
        assert path.read_bytes() == b"the second"
        first.write(b"one, complete")
    assert path.read_bytes() == b"the first one, complete"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_while_writing_keeps_the_old_file_alone(tmp_path):
    path = tmp_path / "table"
    path.write_bytes(b"the old one")

    def write_half():
        with replacing(path) as file:
            file.write(b"half of the new")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write_half()
    assert path.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_symbolic_link_stays_and_the_file_that_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    link, path = tmp_path / "table", tmp_path / "disk" / "table"
    link.symlink_to(path)
    for content in (b"the first", b"the second"):
        with replacing(link) as file:
            file.write(content)
        assert link.is_symlink()
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_device_is_no_place_for_a_file():
    """Root could rename a file to it, and every program of the machine would read and write that."""
    with pytest.raises(StoreError, match="it is a device or a pipe"):
        check_place(Path(os.devnull))
