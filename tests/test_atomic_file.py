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


def test_a_link_to_a_file_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file" / "table")
    with pytest.raises(StoreError, match=r"link cannot be written later: .*file is a file, not a folder"):
        check_place(link)


def test_a_device_is_no_place_for_a_file():
    """Root could rename a file to it, and every program of the machine would read and write that."""
    with pytest.raises(StoreError, match="it is a device or pipe"):
        check_place(Path(os.devnull))


def test_a_place_is_refused_if_the_temporary_file_has_too_long_a_name(tmp_path):
    long = tmp_path / ("n" * 240)  # of itself it may have 255
    with pytest.raises(StoreError, match=r"cannot be written later: .* is not writable \(File name too long\)"):
        check_place(long)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self/comm").is_file(), reason="a file of Linux")
def test_a_place_in_a_folder_that_takes_no_files_is_refused_though_the_file_can_be_written():
    with pytest.raises(StoreError, match=r"cannot be written later: /proc/\d+ is not writable"):
        check_place(Path("/proc/self/comm"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such files")
def test_a_pipe_is_refused_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(StoreError, match=r"pipe cannot be written later: it is a device or pipe, not a file"):
        check_place(pipe)
    assert pipe.is_fifo()
