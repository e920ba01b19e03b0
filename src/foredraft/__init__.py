"""foredraft: the same text from a language model in fewer forward passes.

A drafter guesses the next tokens, the model verifies all guesses in one pass, and the tokens that the model would have
written itself are accepted. Start with `load`, or pass `generate` to a transformers model as its `custom_generate`.
Public names are imported on first use, so that `import foredraft` is fast.
"""

import importlib
import os
import tempfile
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
        folder = tempfile.mkdtemp(prefix="foredraft-numba-")
    os.environ["NUMBA_CACHE_DIR"] = folder


_let_numba_cache()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'foredraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
