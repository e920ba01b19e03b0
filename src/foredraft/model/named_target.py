"""A target by the name of its model, whose weights are read when the first pass needs them.

Compiled passes have weights of their own. So if a package is remembered for a checkpoint's files, the model is loaded
only for what does not run compiled, with transformers' code for it. Does not know how either is loaded.
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
from foredraft.model.compiled.package import kept_forward, remembered_forward
from foredraft.model.fingerprint import files_identity
from foredraft.model.gguf.files import SOURCE
from foredraft.model.loading import (
    DTYPES,
    LoadingOptions,
    has_other_parts,
    load_config,
    load_model,
    load_outline,
    location_of_files,
    usage_errors,
)
from foredraft.model.target import TorchTarget


def load_target(
    model: str, dtype: str | torch.dtype = "auto", device: str | None = None, *, compiled: bool = True,
    config: Any = None, **options: Unpack[LoadingOptions],
) -> TorchTarget:  # fmt: skip
    """Load a model as a target, with what is compiled of it if `compiled`; arguments and errors are `load_model`'s.

    The weights of files that changed since a package was found for them are read at once. A ForedraftWarning says if
    only the text model of a checkpoint with a vision or audio part is loaded. `config` is its configuration, if read.
    """
    config = load_config(model, **options) if config is None else config
    if has_other_parts(config):
        warnings.warn(
            f"{model} is a {config.model_type} model; only its text model is loaded. Images and sounds are not read.",
            ForedraftWarning,
            stacklevel=2,
        )
    read = partial(load_model, model, dtype, device, **options)
    location = location_of_files(model, dtype, device, **options) if compiled else None
    if location is not None:
        files = hash_of_files(location, dtype)  # before they are read, as they may change meanwhile
        if (package := remembered_forward(files)) is not None:
            record = package.record
            outline = load_outline(location, DTYPES[record.dtype], record.vocabulary, record.parameters)
            return TorchTarget(outline, package, read=partial(_read_unchanged, read, location, dtype, files))
    loaded = read()
    package = kept_forward(loaded) if compiled else None
    if location is not None and package is not None:
        package.remember(files)
    return TorchTarget(loaded, package)


def _read_unchanged(read: Callable[[], Any], location: str, dtype: str | torch.dtype, files: str) -> Any:
    """Return what `read` does; UsageError if the files of a checkpoint have not the hash `files` any more."""
    if hash_of_files(location, dtype) != files:
        raise UsageError(f"The files of {location} changed after the model was loaded; load it again.")
    return read()


def hash_of_files(location: str, dtype: str | torch.dtype) -> str:
    """Return a hash of the state of a checkpoint's files, the dtype to load, and the code that reads them."""
    from transformers.utils.hub import cached_file

    with usage_errors("model", location):
        folder = Path(str(cached_file(location, "config.json"))).parent
    reader = version("gguf") if (folder / SOURCE).exists() else ""
    parts = (files_identity(folder), str(dtype).removeprefix("torch."), reader, _hash_of_code())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


@cache
def _hash_of_code() -> str:
    """Return a hash of this package's sources: a mended loader may make other weights of the same files."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
