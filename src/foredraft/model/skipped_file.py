"""The file that says which sub-layers a model can do without: JSON, bound to the model by its fingerprint.

Knows the file. Does not know how the sub-layers were found.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.atomic_file import write_file
from foredraft.errors import StoreError, UsageError
from foredraft.model.fingerprint import fingerprint
from foredraft.model.skipping import Skipped, layer_numbers

_KIND, _FORMAT = "foredraft layer-skip", 1


def write_skipped(path: Path, skipped: Skipped, model: Any, about: Mapping[str, Any]) -> None:
    """Write which sub-layers `model` can do without, and what is known `about` it; an old file stays until then.

    Raises:
        StoreError: the file cannot be written.
    """
    content = {
        "kind": _KIND, "format": _FORMAT, "model": fingerprint(model), "attention": skipped.attention,
        "mlp": skipped.mlp, **about,
    }  # fmt: skip
    try:
        write_file(path, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({error.strerror or error}); name another file.") from error


def read_skipped(path: Path, model: Any) -> Skipped:
    """Return the sub-layers that a file names for `model`.

    Raises:
        StoreError: no such file, one of another kind or version, a damaged one, or one of another model.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise StoreError(
            f"The file {path} of skipped layers cannot be read ({error.strerror or error}); make one with foredraft "
            "tune layer-skip."
        ) from error
    except ValueError as error:
        raise StoreError(f"{path} is no JSON ({error}); make it anew with foredraft tune layer-skip.") from error
    if not isinstance(content, dict) or (content.get("kind"), content.get("format")) != (_KIND, _FORMAT):
        raise StoreError(
            f"{path} is no file of skipped layers of format {_FORMAT}; make one with foredraft tune layer-skip."
        )
    if content.get("model") != fingerprint(model):
        raise StoreError(f"{path} was made for another model; make one for this model with foredraft tune layer-skip.")
    try:
        skipped = Skipped(
            layer_numbers(content.get("attention"), "attention"), layer_numbers(content.get("mlp"), "mlp")
        )
        skipped.check(int(model.config.num_hidden_layers))
    except UsageError as error:
        raise StoreError(f"{path} is damaged: {error} Make it anew with foredraft tune layer-skip.") from error
    return skipped
