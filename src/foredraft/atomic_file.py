"""Whole files, written beside the old one and renamed: a reader sees the old file or the new one.

Knows bytes and folders.
"""

import contextlib
import os
import tempfile
from pathlib import Path

from foredraft.errors import StoreError

TEMPORARY_SUFFIX = ".part"


def write_file(path: Path, data: bytes) -> None:
    """Put `data` in the place of `path`, synced to disk; on any failure the old file stays and nothing is left behind.

    Raises:
        OSError: it cannot be written.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        with beside.open("wb") as file:
            file.write(data)
        place_file(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def store_file(path: Path, data: bytes) -> None:
    """Do what `write_file` does.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        write_file(path, data)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written ({error.strerror}). Check the folder and its free space."
        ) from error


def check_place(path: Path) -> None:
    """Refuse a place where nothing can be written later, before the work that is to be kept there is done.

    Raises:
        StoreError: a place below a file, or in a folder without the right to write.
    """
    found = next(place for place in (path, *path.absolute().parents) if place.exists())
    if found != path and not found.is_dir():
        raise StoreError(f"{path} cannot be written later: {found} is a file, not a folder. Name another place.")
    try:
        if found.is_dir():
            tempfile.TemporaryFile(dir=found).close()  # rights alone do not tell: /proc shows them and takes no file
        writable = os.access(found, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise StoreError(f"{path} cannot be written later: {found} is not writable. Name another place.")


def place_file(complete: Path, path: Path) -> None:
    """Rename a file that is complete to `path`, such that both its bytes and the rename last through a power cut.

    Raises:
        OSError: it cannot be synced or renamed.
    """
    with complete.open("rb+") as file:
        os.fsync(file.fileno())
    complete.replace(path)
    with contextlib.suppress(OSError):  # Windows opens no folders
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
