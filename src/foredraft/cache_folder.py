"""Where foredraft keeps what it can make again: built tables, measured costs.

Knows only the folder; what is in it belongs to the modules that write there.
"""

import os
from pathlib import Path

import platformdirs

from foredraft.errors import StoreError

CACHE_VARIABLE = "FOREDRAFT_CACHE"


def cache_path() -> Path:
    """Return where the cache folder is or would be: `$FOREDRAFT_CACHE`, or the platform's user cache folder."""
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("foredraft"))


def cache_folder() -> Path:
    """Return the cache folder, made if needed, for writing.

    Raises:
        StoreError: the folder cannot be made or written to.
    """
    folder = cache_path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"The cache folder {folder} cannot be made ({error.strerror}). Set {CACHE_VARIABLE} to a folder you can "
            "write to."
        ) from error
    if not os.access(folder, os.W_OK):
        raise StoreError(
            f"The cache folder {folder} is not writable. Set {CACHE_VARIABLE} to a folder you can write to."
        )
    return folder
