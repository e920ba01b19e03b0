"""Files that are replaced at once: by one writer, and by several of one process."""

import pytest

from foredraft.atomic_file import replacing


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
