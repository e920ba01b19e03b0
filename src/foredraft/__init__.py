"""foredraft: the same text from a language model in fewer forward passes.

A drafter guesses the next tokens, the model verifies all guesses in one pass, and the tokens that the model would have
written itself are accepted. Start with `load`, or pass `generate` to a transformers model as its `custom_generate`.
Public names are imported on first use, so that `import foredraft` is fast.
"""

import importlib
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from foredraft.cache_folder import cache_folder
from foredraft.errors import (
    ForedraftError,
    NumericsError,
    OutOfMemoryError,
    StoreError,
    UnsupportedModelError,
    UsageError,
)

__version__ = "0.3.0"

__all__ = [
    "ForedraftError", "Generation", "Generator", "NumericsError", "OutOfMemoryError", "Piece", "StoreError",
    "UnsupportedModelError", "UsageError", "__version__", "generate", "load",
]  # fmt: skip

_LAZY = {
    "Generation": "foredraft.generation",
    "Generator": "foredraft.api",
    "Piece": "foredraft.generation",
    "generate": "foredraft.integrations.transformers",
    "load": "foredraft.api",
}


def _let_numba_cache() -> None:
    """Set a numba cache folder for this version: numba can fail on another version's kernels or lack a writable one."""
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    try:
        folder = str(cache_folder(f"numba-{__version__}"))
    except StoreError:
        folder = _temporary_folder()
    os.environ["NUMBA_CACHE_DIR"] = folder


def _temporary_folder() -> str:
    """Return a folder for numba in the system's temporary one; the same for every process, if it is this user's alone.

    Numba runs what it finds there.
    """
    user = getattr(os, "getuid", int)()  # none on Windows, where each process has a folder of its own
    folder = Path(tempfile.gettempdir(), f"foredraft-numba-{__version__}-{user}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077:
        return str(folder)
    return tempfile.mkdtemp(prefix="foredraft-numba-")


_let_numba_cache()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'foredraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
