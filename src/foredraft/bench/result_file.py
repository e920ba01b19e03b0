"""A file of results: whole in its place, or not there at all and a sentence says why.

Knows bytes and folders; what they mean is for cells, sweeps and cost curves to know.
"""

from pathlib import Path

from foredraft.atomic_file import write_file
from foredraft.errors import StoreError


def write_result(path: Path, data: bytes) -> None:
    """Put `data` in the place of `path`, whose folder is made if need be; the old file stays until it is done.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)
    except OSError as error:
        raise StoreError(f"The results {path} cannot be written ({error.strerror}); give another folder.") from error
