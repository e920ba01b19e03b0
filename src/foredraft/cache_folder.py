"""The cache folder, for files that foredraft can recreate: built tables, measured costs, compiled packages.

Does not depend on what other modules store there.
"""

import os
from pathlib import Path

import platformdirs

from foredraft.errors import StoreError

CACHE_VARIABLE = "FOREDRAFT_CACHE"


def cache_path() -> Path:
    """Return the cache folder's path: `$FOREDRAFT_CACHE`, or the platform's user cache folder. It need not exist."""
    named = os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("foredraft")
    return Path(os.path.expanduser(named))  # noqa: PTH111  # Path.expanduser raises for an unknown user


def cache_folder(name: str = "") -> Path:
    """Return the cache folder, or the folder `name` in it, created if missing; StoreError if it cannot be written."""
    folder = cache_path() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"The cache folder {folder} cannot be created ({error.strerror}). Set {CACHE_VARIABLE} to a folder you can "
            "write to."
        ) from error
    if not os.access(folder, os.W_OK):
        raise StoreError(
            f"The cache folder {folder} is not writable. Set {CACHE_VARIABLE} to a folder you can write to."
        )
    return folder
