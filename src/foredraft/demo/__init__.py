"""Where the model shipped in the package lies: the folders behind the names `demo` and `demo-draft`.

Knows names and folders only; loading is the caller's. What the weights are, where they come from and how they fail is
in `CARD.md` beside this file; `evaluation.toml` says which public texts the card's figures were measured on.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from foredraft.errors import UsageError
from foredraft.options import nearest

EMBEDDED: Mapping[str, str] = MappingProxyType({"demo": "target", "demo-draft": "draft"})
"""Name a user may give instead of a path -> folder in this package. Both folders hold the same tokenizer."""


EMBEDDED_DRAFT = "demo-draft"
"""The one that drafts for the others."""


def embedded_heads() -> Mapping[str, Path]:
    """Return the folders of the trained heads that come with `demo`, by the method that drafts with them."""
    folder = Path(__file__).parent
    return {method: folder / method for method in ("eesd", "medusa")}


def embedded_path(name: str) -> Path:
    """Return the transformers folder of an embedded model.

    Args:
        name: a key of `EMBEDDED`.

    Raises:
        UsageError: no model of that name is embedded.
    """
    if name not in EMBEDDED:
        raise UsageError(
            f"No embedded model is called {name!r}.{nearest(name, EMBEDDED)} There are: {', '.join(EMBEDDED)}."
        )
    return Path(__file__).parent / EMBEDDED[name]
