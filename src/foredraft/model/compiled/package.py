"""Finds a model's compiled forward in the cache folder, and checks it.

It was compiled for exactly these weights, this dtype, number of threads, processor and torch. Its package runs any
number of rows after any number of tokens, so nothing is padded. Does not depend on how packages are compiled.
"""

import hashlib
import json
import platform
import re
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from foredraft.atomic_file import store_file
from foredraft.cache_folder import cache_path
from foredraft.errors import ForedraftWarning, StoreError, told
from foredraft.model.compiled.blocks import stored_formats, stored_integers
from foredraft.model.compiled.library import CompiledLibrary, weights_beside
from foredraft.model.fingerprint import architecture, code_of
from foredraft.model.kv_cache import LayerShape
from foredraft.model.layers import LAST
from foredraft.model.machine import processor_lines

MOST_ROWS = 256  # of a compiled pass; longer prompts take several passes; chosen
_FORMAT = 33  # of a folder; increased when the code that a package is compiled from changes
RECORD = "compiled.json"  # of a folder; it names the package
_FOLDER = "compiled"


@dataclass(frozen=True, slots=True)
class CompiledRecord:
    """The record of a compiled forward: how its package was made, and what its passes take and return."""

    sha256: str  # of the package's bytes
    torch: str  # the version that compiled
    kernels: tuple[str, ...]  # ours and torch's that it calls
    dequantised: str  # a sentence about matrices of a quantised model that are not multiplied as integers
    shapes: tuple[LayerShape, ...]  # of each layer
    taps: tuple[tuple[int, ...], ...]  # layers whose states a pass returns, beside the last
    dtype: str  # of the model, as torch names it
    vocabulary: int  # logits of a row
    parameters: int  # how many numbers the model's weights are
    precise: bool = False  # whether rows have 15 bits in all blocks, where weights are integers

    def told(self) -> list[str]:
        """Describe how it was compiled."""
        compiled = f"Compiled by torch {self.torch}; kernels: {', '.join(self.kernels)}."
        return [compiled, self.dequantised] if self.dequantised else [compiled]


class CompiledForward:
    """The loaded package of a folder, with its record. Raises StoreError if it cannot be loaded."""

    def __init__(self, folder: Path, record: CompiledRecord) -> None:
        self.record, self._folder, path = record, folder, package_path(folder, record)
        try:
            self.library = CompiledLibrary(path)
        except (OSError, zipfile.BadZipFile, RuntimeError, AttributeError) as error:
            raise StoreError(f"The compiled forward {path} cannot be loaded ({told(error)}). {_REMEDY}") from error

    def returns(self, hidden: tuple[int, ...]) -> bool:
        """Return whether passes return the states of these layers, as `Needs.hidden` names them."""
        return not set(hidden) - {LAST} or hidden in self.record.taps

    def remember(self, files: str) -> None:
        """Remember that this is the package of the model in these files, named by a hash, for `remembered_forward`."""
        with suppress(OSError):  # the cache folder may be read only
            (self._folder / _memory_of(files)).touch()

    def rounds_alike(self, rows: int) -> bool:
        """Return whether all passes of up to `rows` rows are compiled, and so give a row the same bits."""
        return rows <= MOST_ROWS


_REMEDY = "`foredraft compile MODEL --again` makes it anew."


def compiled_folder(model: Any, cache: Path) -> Path:
    """Return the folder of this model's package, which may not exist, named by all that a package depends on."""
    return cache / _FOLDER / _setting(model) / weights_hash(model)


def find_compiled(model: Any, cache: Path) -> CompiledForward | None:
    """Load what was compiled for a model on this CPU, in its dtype, with torch's current number of threads, or None.

    Raises StoreError for a damaged package or record.
    """
    setting = cache / _FOLDER / _setting(model)
    return _loaded(setting / weights_hash(model)) if setting.exists() else None  # avoids hashing every weight


def _loaded(folder: Path) -> CompiledForward | None:
    record = checked_record(folder)
    return None if record is None else CompiledForward(folder, record)


def checked_record(folder: Path) -> CompiledRecord | None:
    """Return what `read_record` does; raises StoreError also if the package is damaged."""
    record = read_record(folder)
    while record is not None and package_hash(path := package_path(folder, record)) != record.sha256:
        before, record = record, read_record(folder)
        if record == before:  # else another process compiled it anew and removed the earlier package meanwhile
            raise StoreError(f"The compiled forward {path} is damaged. {_REMEDY}")
    return record


def package_path(folder: Path, record: CompiledRecord) -> Path:
    """Return the package that a record names; packages have names of their own, so writing the record is the commit."""
    return folder / f"forward-{record.sha256[:20]}.pt2"


def remove_unnamed(folder: Path, record: CompiledRecord) -> None:
    """Remove the packages of a folder that its record does not name, such as what killed compilations left.

    Processes that have loaded one keep it in memory. Called while the folder's lock is held.
    """
    for path in folder.glob("forward*"):
        if path.stem != package_path(folder, record).stem:
            path.unlink()


def runs_on_cpu(model: Any) -> bool:
    """Return whether all of a model is on the CPU, the only device that packages are compiled for."""
    return model.device.type == "cpu" and not getattr(model, "hf_device_map", None)


def kept_forward(model: Any) -> CompiledForward | None:
    """Load this model's package from the cache folder as `find_compiled` does; warns of a damaged one."""
    return _unless_damaged(lambda: find_compiled(model, cache_path())) if runs_on_cpu(model) else None


def remembered_forward(files: str) -> CompiledForward | None:
    """Load the package that is remembered for these files (`CompiledForward.remember`); warns of a damaged one."""
    found = next((cache_path() / _FOLDER).glob(f"*/*/{_memory_of(files)}"), None)
    return None if found is None else _unless_damaged(lambda: _loaded(found.parent))


def _unless_damaged(load: Callable[[], CompiledForward | None]) -> CompiledForward | None:
    try:
        return load()
    except StoreError as error:
        warnings.warn(f"{error} Generation goes on without it.", ForedraftWarning, stacklevel=3)
        return None


def read_record(folder: Path) -> CompiledRecord | None:
    """Return the record of `folder`, or None if nothing was compiled; raises StoreError if it is damaged."""
    path = folder / RECORD
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        shapes = tuple(LayerShape._make((*sizes, tuple(matrices))) for *sizes, matrices in data["shapes"])
        taps = tuple(tuple(map(int, layers)) for layers in data["taps"])
        return CompiledRecord(**data | {"kernels": tuple(data["kernels"]), "shapes": shapes, "taps": taps})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"The record of compiled forwards {path} is damaged. {_REMEDY}") from error


def records_of(folder: Path) -> list[CompiledRecord]:
    """Return the records of the weights of `folder`, by any torch with any number of threads, the latest one last."""
    records = []
    paths = folder.parents[1].glob(f"*/{folder.name}/{RECORD}")
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        with suppress(StoreError):  # reported when it is used
            records.append(read_record(path.parent))
    return [record for record in records if record is not None]


def write_record(folder: Path, record: CompiledRecord) -> None:
    """Write the record of `folder`; raises StoreError if it cannot be written."""
    store_file(folder / RECORD, json.dumps(asdict(record), indent=1).encode())


def kernels_in(path: Path) -> tuple[str, ...]:
    """Return the names of our kernels, and of torch's, in the C++ sources of a package."""
    with zipfile.ZipFile(path) as package:
        sources = [package.read(name).decode() for name in package.namelist() if name.endswith(".cpp")]
    found = set(re.findall(r"// foredraft kernel: (.+)", "".join(sources)))
    calls = set(re.findall(r"\baoti_torch_cpu_(\w+)\(", "".join(sources)))
    return (*sorted(found), *(f"torch's {call.removesuffix('_out').strip('_')}" for call in sorted(calls)))


def _machine() -> tuple[Any, ...]:
    """Return what a package depends on but the model: threads, processor, and libraries."""
    flags = processor_lines("flags", "features", "model name")  # code compiled for other instructions may crash
    processor = (platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability(), *flags)
    return (_FORMAT, torch.get_num_threads(), torch.__version__, transformers.__version__, processor)


def _memory_of(files: str) -> str:
    """Return the name of the empty file that says that a folder has the package of the model in these files."""
    return hashlib.sha256(repr((files, _machine())).encode()).hexdigest()[:20] + ".files"


def _setting(model: Any) -> str:
    """Hash what a package depends on but the weights: architecture and code, dtype, and the machine."""
    parts = (
        architecture(model.config), code_of(model), str(model.dtype), model.config._attn_implementation, *_machine(),  # noqa: SLF001  # transformers has no public name for it
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def weights_hash(model: Any) -> str:
    """Return a hash of every parameter and buffer, by name, dtype, shape and bytes, and of the formats of integers.

    A file of integers and one of the same numbers in bfloat16 have packages of their own, as these round differently.
    """
    digest = hashlib.sha256()
    if (tensors := stored_integers(model)) is not None:
        digest.update(repr(stored_formats(tensors)).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:20]


def package_hash(path: Path) -> str:
    """Return the SHA-256 of a package and its weights, in hexadecimal; "" if they cannot be read."""
    digest = hashlib.sha256()
    try:
        for each in (path, weights_beside(path)):
            with each.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError:
        return ""
    return digest.hexdigest()
