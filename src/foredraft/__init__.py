"""foredraft: the same text from a language model in fewer forward passes.

A drafter guesses the next tokens, the model checks all guesses in one pass, and what it would have written anyway is
kept. Start with `load`, or hand `generate` to a transformers model as its `custom_generate`; the names below are
imported when they are first used, so that `import foredraft` is quick.
"""

import importlib
import os
import tempfile
from typing import Any

from foredraft.cache_folder import cache_path
from foredraft.errors import (
    ForedraftError,
    NumericsError,
    OutOfMemoryError,
    StoreError,
    UnsupportedModelError,
    UsageError,
)

__version__ = "0.2.0"

__all__ = [
    "ForedraftError",
    "Generation",
    "Generator",
    "NumericsError",
    "OutOfMemoryError",
    "Piece",
    "StoreError",
    "UnsupportedModelError",
    "UsageError",
    "__version__",
    "generate",
    "load",
]

_LAZY = {
    "Generation": "foredraft.generation",
    "Generator": "foredraft.api",
    "Piece": "foredraft.generation",
    "generate": "foredraft.integrations.transformers",
    "load": "foredraft.api",
}


def _let_numba_cache() -> None:
    """Give numba a folder of this version's own: it fails on what another version compiled, or finds none to write."""
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    folder = cache_path() / f"numba-{__version__}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    os.environ["NUMBA_CACHE_DIR"] = str(folder) if writable else tempfile.mkdtemp(prefix="foredraft-numba-")


_let_numba_cache()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'foredraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
