"""A target by the name of its model, whose weights are read when the first pass needs them.

Compiled passes have weights of their own. So if a package is remembered for a checkpoint's files, the model is built
without weights, and they are read only for what does not run compiled. Does not know how either is loaded.
"""

import hashlib
import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Unpack

import torch

from foredraft.errors import ForedraftWarning, UsageError
from foredraft.model.compiled.package import kept_forward
from foredraft.model.fingerprint import files_identity
from foredraft.model.gguf.files import SOURCE
from foredraft.model.loading import LoadingOptions, has_other_parts, load_config, load_model, load_outline
from foredraft.model.target import TorchTarget


def load_target(
    model: str, dtype: str | torch.dtype = "auto", device: str | None = None, *, compiled: bool = True,
    **options: Unpack[LoadingOptions],
) -> TorchTarget:  # fmt: skip
    """Load a model as a target, with what is compiled of it if `compiled`; arguments and errors are `load_model`'s.

    The weights of files that changed since a package was found for them are read at once. A ForedraftWarning says if
    only the text model of a checkpoint with a vision or audio part is loaded.
    """
    config = load_config(model, **options)
    if has_other_parts(config):
        warnings.warn(
            f"{model} is a {config.model_type} model; only its text model is loaded. Images and sounds are not read.",
            ForedraftWarning,
            stacklevel=2,
        )
    read = partial(load_model, model, dtype, device, **options)
    outline = load_outline(model, dtype, device, **options) if compiled else None
    if outline is not None:
        files = hash_of_files(outline.name_or_path)  # before they are read, as they may change meanwhile
        if (package := kept_forward(outline, files)) is not None:
            return TorchTarget(outline, package, read=partial(_read_unchanged, read, outline.name_or_path, files))
    loaded = read()
    package = kept_forward(loaded) if compiled else None
    if outline is not None and package is not None:
        package.remember(files)
    return TorchTarget(loaded, package)


def _read_unchanged(read: Callable[[], Any], location: str, files: str) -> Any:
    """Return what `read` does; UsageError if the files of a checkpoint have not the hash `files` any more."""
    if hash_of_files(location) != files:
        raise UsageError(f"The files of {location} changed after the model was loaded; load it again.")
    return read()


def hash_of_files(location: str) -> str:
    """Return a hash of the state of a checkpoint's files, and of the code that reads them; `load_outline` names it."""
    from transformers.utils.hub import cached_file

    folder = Path(str(cached_file(location, "config.json"))).parent
    reader = version("gguf") if (folder / SOURCE).exists() else ""
    return hashlib.sha256(repr((files_identity(folder), reader, _hash_of_code())).encode()).hexdigest()[:20]


@cache
def _hash_of_code() -> str:
    """Return a hash of this package's sources: a mended loader may make other weights of the same files."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
