"""Finds a model's compiled forward in the cache folder, checks it, and chooses the package of each pass.

It was compiled for exactly these weights, this dtype, number of threads, processor and torch. A package runs one row or
any number of rows after any number of tokens, so nothing is padded. A pass runs in the package, or uncompiled, by
whichever took less time when it was compiled. Does not depend on how packages are compiled.
"""

import hashlib
import json
import platform
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
import transformers

from foredraft.atomic_file import store_file
from foredraft.cache_folder import cache_path
from foredraft.contracts import CostCurve
from foredraft.errors import ForedraftWarning, StoreError, told
from foredraft.model.compiled.library import CompiledLibrary, weights_beside
from foredraft.model.fingerprint import architecture
from foredraft.model.kv_cache import LayerShape
from foredraft.model.layers import LAST

MOST_ROWS = 256  # of a compiled pass; longer prompts take several passes; chosen
EAGER = "eager"
_FORMAT = 22  # of a package; increased when the code that it is compiled from changes
RECORD = "compiled.json"  # the file beside the packages of a folder
_CLEARLY = 1.1
"""A package is used if it takes at most this many times as long as the uncompiled model, because the same passes, timed
twice on a shared machine, differ by as much."""
_FOLDER = "compiled"


@dataclass(frozen=True, slots=True)
class PackageRecord:
    """The record of one compiled package; before it is compiled, only its name and rows are set."""

    name: str  # for `any` number of rows, or for `one`
    file: str  # in the folder
    least_rows: int
    most_rows: int
    sha256: str = ""  # of its bytes
    recipe: str = ""  # how it was compiled
    kernels: tuple[str, ...] = ()  # ours and the vendor's that it calls
    dequantised: str = ""  # a sentence about matrices of a quantised model that are not multiplied as integers
    lost: Mapping[str, str] = field(default_factory=dict)  # better recipes that failed, and why
    ranges: bool = False  # whether each row has its own range of slots, as passes over several sequences need

    def takes(self, rows: int) -> bool:
        """Return whether it runs passes of `rows` rows."""
        return self.least_rows <= rows <= self.most_rows

    def told(self) -> str:
        """Describe how it was compiled."""
        rows = "one row" if self.most_rows == 1 else f"{self.least_rows} to {self.most_rows} rows"
        made_of = f" ({', '.join(self.kernels)})" if self.kernels else ""
        failed = "".join(f" {name[0].upper()}{name[1:]} failed: {reason}." for name, reason in self.lost.items())
        left = f" {self.dequantised}" if self.dequantised else ""
        return f"The package for {rows} is made of {self.recipe}{made_of}.{left}{failed}"


ANY = PackageRecord("any", "any.pt2", 2, MOST_ROWS)  # from 2: the exporter treats a dimension that may be 1 as constant
ONE = PackageRecord("one", "one.pt2", 1, 1)


@dataclass(frozen=True, slots=True)
class CompiledRecord:
    """The record of a folder of packages, with the times of their passes."""

    packages: tuple[PackageRecord, ...]  # in the order in which they were compiled
    costs: Mapping[str, CostCurve]  # times of passes, by package name and `eager`, the uncompiled model
    same_bits: bool  # whether a row's bits do not depend on the other rows of its pass, as far as compared
    shapes: tuple[LayerShape, ...]  # of each layer
    torch: str  # the version that compiled
    warning: str  # what an earlier torch compiled better; "" for nothing
    taps: tuple[tuple[int, ...], ...] = ()  # layers whose states a pass returns, beside the last

    def told(self) -> list[str]:
        """Describe how each package was compiled, with the warning."""
        packages = (package.told() for package in self.packages)
        return [f"Compiled by torch {self.torch}.", *packages, *([self.warning] if self.warning else [])]

    def quickest(self) -> list[str]:
        """Return the fastest package or `eager` for 0 .. MOST_ROWS rows; entry 0 is `eager`.

        The uncompiled model is chosen only if it is clearly faster, because its rows round differently; and never
        where layers keep a state, as it keeps another.
        """
        names = list(self.costs)
        times = np.stack([self.costs[name].table(MOST_ROWS) for name in names])
        times[names.index(EAGER)] *= np.inf if any(shape.taps for shape in self.shapes) else _CLEARLY
        rows = np.arange(MOST_ROWS + 1)
        for package in self.packages:
            times[names.index(package.name), (rows < package.least_rows) | (rows > package.most_rows)] = np.inf
        return [EAGER, *(names[best] for best in np.argmin(times, axis=0)[1:])]


class CompiledForward:
    """The loaded packages of a folder, with its record."""

    def __init__(self, folder: Path, record: CompiledRecord) -> None:
        self.record = record
        self._quickest = record.quickest()
        self.packages = load_packages(folder, record.packages)

    def package_for(self, rows: int) -> CompiledLibrary | None:
        """Return the loaded package that runs `rows` rows, or None if the uncompiled model is faster."""
        return self.packages.get(self._quickest[rows]) if rows <= MOST_ROWS else None

    def returns(self, hidden: tuple[int, ...]) -> bool:
        """Return whether passes return the states of these layers, as `Needs.hidden` names them."""
        return not set(hidden) - {LAST} or hidden in self.record.taps

    def rounds_alike(self, rows: int) -> bool:
        """Return whether all passes of up to `rows` rows are compiled, and give a row the same bits."""
        return self.record.same_bits and rows <= MOST_ROWS and EAGER not in self._quickest[1 : rows + 1]


def load_packages(folder: Path, packages: Iterable[PackageRecord]) -> dict[str, CompiledLibrary]:
    """Load a folder's packages, by their names; raises StoreError if one cannot be loaded."""
    loaded = {}
    for package in packages:
        path = folder / package.file
        try:
            loaded[package.name] = CompiledLibrary(path, ranges=package.ranges)
        except (OSError, zipfile.BadZipFile, RuntimeError, AttributeError) as error:
            raise StoreError(f"The compiled forward {path} cannot be loaded ({told(error)}). {_REMEDY}") from error
    return loaded


_REMEDY = "`foredraft compile MODEL --again` makes it anew."


def compiled_folder(model: Any, cache: Path) -> Path:
    """Return the folder of this model's packages, which may not exist, named by all that a package depends on."""
    return cache / _FOLDER / _setting(model) / weights_hash(model)


def find_compiled(model: Any, cache: Path) -> CompiledForward | None:
    """Load what was compiled for a model on this CPU, in its dtype, with torch's current number of threads, or None.

    Raises StoreError for a damaged package or record.
    """
    setting = cache / _FOLDER / _setting(model)
    if not setting.exists():  # avoids hashing every weight
        return None
    folder = setting / weights_hash(model)
    record = read_record(folder)
    if record is not None and _damaged(folder, record):  # or a compilation has replaced a package, but not the record
        try:
            with compiling(folder, wait=False):
                record = read_record(folder)
        except filelock.Timeout:
            return None
        if record is not None and (damaged := _damaged(folder, record)):
            raise StoreError(f"The compiled forward {damaged} is damaged. {_REMEDY}")
    return CompiledForward(folder, record) if record is not None and record.packages else None


def compiling(folder: Path, *, wait: bool = True) -> filelock.BaseFileLock:
    """Return the lock of a folder's compilation; without `wait`, entering it raises Timeout if another one goes on."""
    return filelock.FileLock(folder / "compiling.wait", timeout=-1 if wait else 0)


def _damaged(folder: Path, record: CompiledRecord) -> Path | None:
    """Return a package whose bytes are not those of the record, or None."""
    paths = ((folder / package.file, package.sha256) for package in record.packages)
    return next((path for path, known in paths if package_hash(path) != known), None)


def runs_on_cpu(model: Any) -> bool:
    """Return whether all of a model is on the CPU, the only device that packages are compiled for."""
    return model.device.type == "cpu" and not getattr(model, "hf_device_map", None)


def kept_forward(model: Any) -> CompiledForward | None:
    """Load this model's packages from the cache folder; warns of a damaged one, which is not used."""
    if not runs_on_cpu(model):
        return None
    try:
        return find_compiled(model, cache_path())
    except StoreError as error:
        warnings.warn(f"{error} Generation goes on without it.", ForedraftWarning, stacklevel=2)
        return None


def read_record(folder: Path) -> CompiledRecord | None:
    """Return the record of `folder`, or None if nothing was compiled; raises StoreError if it is damaged."""
    path = folder / RECORD
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        packages = tuple(PackageRecord(**each | {"kernels": tuple(each["kernels"])}) for each in data["packages"])
        costs = {name: _curve(data["rows"], seconds) for name, seconds in data["seconds"].items()}
        if data["format"] != _FORMAT or {EAGER, *(package.name for package in packages)} != set(costs):
            raise ValueError(f"format {data['format']}, with costs of {', '.join(costs)}")
        shapes = tuple(LayerShape._make((*sizes, tuple(matrices))) for *sizes, matrices in data["shapes"])
        same_bits, taps = bool(data["same_bits"]), tuple(tuple(map(int, layers)) for layers in data["taps"])
        return CompiledRecord(packages, costs, same_bits, shapes, data["torch"], data["warning"], taps)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"The record of compiled forwards {path} is damaged. {_REMEDY}") from error


def records_of(model: Any, cache: Path) -> list[CompiledRecord]:
    """Return the records of the same weights, compiled by any torch with any number of threads."""
    records = []
    for folder in sorted((cache / _FOLDER).glob(f"*/{weights_hash(model)}")):
        with suppress(StoreError):  # reported when it is used
            records.append(read_record(folder))
    return [record for record in records if record is not None]


def write_record(folder: Path, record: CompiledRecord) -> None:
    """Write the record of `folder`; raises StoreError if it cannot be written."""
    data: dict[str, Any] = asdict(record)
    rows = record.costs[EAGER].rows
    seconds = {name: dict(zip(curve.rows, curve.seconds, strict=True)) for name, curve in record.costs.items()}
    del data["costs"]  # written as a table by all numbers of rows, null where a package does not run so many
    table = {name: [of.get(count) for count in rows] for name, of in seconds.items()}
    data |= {"format": _FORMAT, "rows": rows, "seconds": table}
    store_file(folder / RECORD, json.dumps(data, indent=1).encode())


def kernels_in(path: Path) -> tuple[str, ...]:
    """Return the names of our kernels, and of torch's, in the C++ sources of a package."""
    with zipfile.ZipFile(path) as package:
        sources = [package.read(name).decode() for name in package.namelist() if name.endswith(".cpp")]
    found = set(re.findall(r"// foredraft kernel: (.+)", "".join(sources)))
    calls = set(re.findall(r"\baoti_torch_cpu_(\w+)\(", "".join(sources)))
    return (*sorted(found), *(f"torch's {call.removesuffix('_out').strip('_')}" for call in sorted(calls)))


def _curve(rows: list[int], seconds: list[float | None]) -> CostCurve:
    """Return the curve of the timed numbers of rows; ValueError unless each has a time or null."""
    timed = [(int(count), float(each)) for count, each in zip(rows, seconds, strict=True) if each is not None]
    return CostCurve(tuple(count for count, _ in timed), tuple(each for _, each in timed))


def _setting(model: Any) -> str:
    """Hash what a package depends on but the weights: architecture, dtype, threads, processor, library versions."""
    flags = processor_lines("flags", "features", "model name")  # code compiled for other instructions may crash
    processor = (platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability(), *flags)
    parts = (
        _FORMAT, architecture(model.config), str(model.dtype), model.config._attn_implementation,  # noqa: SLF001  # transformers has no public name for it
        torch.get_num_threads(), torch.__version__, transformers.__version__, processor,
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def processor_lines(*names: str) -> list[str]:
    """Return the distinct lines of /proc/cpuinfo that begin with one of these names; none without that file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.lower().startswith(names)})


def weights_hash(model: Any) -> str:
    """Return a hash of every parameter and buffer, by name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:20]


def package_hash(path: Path) -> str:
    """Return the SHA-256 of a package and its weights, in hexadecimal; "" if they cannot be read."""
    digest = hashlib.sha256()
    try:
        for each in [path, weights_beside(path)] if weights_beside(path).exists() else [path]:
            with each.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError:
        return ""
    return digest.hexdigest()
