"""Atomic file writes: a temporary file is written and renamed, so a reader sees the old file or the new one.

Does not depend on what the files contain.
"""

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from foredraft.errors import StoreError

TEMPORARY_SUFFIX = ".part"


def temporary_beside(path: Path) -> Path:
    """Return the path of a temporary file beside `path`, which no other thread or process uses."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")


def followed(path: Path) -> Path:
    """Return the file that a symbolic link leads to, as a rename would replace the link; other paths as they are."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that replaces `path`, synced to disk, when the block ends; an error keeps the old file only."""
    path = followed(path)
    temporary = temporary_beside(path)
    try:
        with temporary.open("wb") as file:
            yield file
        place_file(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def unwritable(path: Path, error: OSError) -> StoreError:
    """Return the exception for a path that cannot be written."""
    return StoreError(
        f"{path} cannot be written ({error.strerror}). Free space, or choose a folder that you can write to."
    )


def store_file(path: Path, data: bytes) -> None:
    """Replace the contents of `path` by `data`, synced to disk, in a folder that is made if it is missing.

    StoreError, which keeps the old file and leaves no other, if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(data)
    except OSError as error:
        raise unwritable(path, error) from error


def check_place(path: Path, *, folder: bool = False) -> None:
    """Raise StoreError if `path`, a file or a `folder`, cannot be written later, before the work is done."""
    written = followed(path)
    found = next(place for place in (written, *written.absolute().parents) if os.path.exists(place))  # noqa: PTH110  # Path.exists may raise
    if found == written and not (path.is_dir() if folder else path.is_file()):
        wanted, kind = ("folder", "file") if folder else ("file", "folder" if path.is_dir() else "device or pipe")
        raise StoreError(f"{path} cannot be written later: it is a {kind}, not a {wanted}. Name another place.")
    if found != written and not found.is_dir():
        raise StoreError(f"{path} cannot be written later: {found} is a file, not a folder. Name another place.")
    place = found if found.is_dir() else written.resolve().parent
    try:  # permissions are not enough: /proc has them but takes no files
        with tempfile.TemporaryFile(dir=place), contextlib.suppress(FileNotFoundError):
            temporary_beside(place / (written.name or "folder")).lstat()  # another error if the name is too long
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written later: {place} is not writable ({error.strerror}). Name another place."
        ) from error


def place_file(complete: Path, path: Path) -> None:
    """Rename a complete file to `path`, with syncs so that its bytes and the rename survive a power failure."""
    with complete.open("rb+") as file:
        os.fsync(file.fileno())
    complete.replace(path)
    with contextlib.suppress(OSError):  # Windows opens no folders
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
