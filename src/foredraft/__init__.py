"""foredraft: the same text from a language model in fewer forward passes.

A drafter guesses the next tokens, the model checks all guesses in one pass, and what it would have written anyway is
kept. Start with `load`; the names below are imported when they are first used, so that `import foredraft` is quick.
"""

import importlib
from typing import Any

from foredraft.errors import ForedraftError, NumericsError, StoreError, UnsupportedModelError, UsageError

__version__ = "0.1.0"

__all__ = [
    "ForedraftError",
    "Generation",
    "Generator",
    "NumericsError",
    "Piece",
    "StoreError",
    "UnsupportedModelError",
    "UsageError",
    "__version__",
    "load",
]

_LAZY = dict.fromkeys(("Generation", "Generator", "Piece", "load"), "foredraft.api")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'foredraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
