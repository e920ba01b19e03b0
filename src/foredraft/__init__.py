"""foredraft: the same text from a language model in fewer forward passes.

A drafter guesses the next tokens, the model checks all guesses in one pass, and what it would have written anyway is
kept. Start with `load`, or hand `generate` to a transformers model as its `custom_generate`; the names below are
imported when they are first used, so that `import foredraft` is quick.
"""

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

from foredraft.errors import (
    ForedraftError,
    NumericsError,
    OutOfMemoryError,
    StoreError,
    UnsupportedModelError,
    UsageError,
)

__version__ = "0.1.0"

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
    """Give numba a folder for compiled kernels where it would find none: a read-only package and no writable home."""
    places = (Path(__file__).parent, Path("~").expanduser())
    if "NUMBA_CACHE_DIR" in os.environ or any(os.access(place, os.W_OK) for place in places):
        return
    wanted = os.environ.get("FOREDRAFT_CACHE", "")
    # a folder of this process's own, as compiled code from one that others can write to is not to be trusted
    folder = wanted if wanted and os.access(wanted, os.W_OK) else tempfile.mkdtemp(prefix="foredraft-numba-")
    os.environ["NUMBA_CACHE_DIR"] = folder


_let_numba_cache()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'foredraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
