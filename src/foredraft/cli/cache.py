"""What is in the cache folder, and which of it nobody needs any more.

Reads names, times and the records of compiled packages. Does not depend on how the files are made: all of them are made
again when they are needed.
"""

import shutil
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import time

import filelock
import typer

from foredraft.atomic_file import TEMPORARY_SUFFIX
from foredraft.cache_folder import cache_path
from foredraft.cli.screen import show_json, show_table
from foredraft.errors import StoreError

_COST, _PACKAGE, _CONVERTED, _ROUNDED = "measured cost", "compiled package", "converted GGUF file", "rounded checkpoint"
_KINDS = {  # of entries, by their names in the cache folder
    "cost-*.json": _COST,
    "compiled/*/*": _PACKAGE,
    "gguf/*": _CONVERTED,
    "rounded/*": _ROUNDED,
    "standard-library-*": "default table or store",
    "numba-*": "numba kernels",
}
_LOCK = ".wait"  # suffix of a lock's file
_LOCKS = (_LOCK, ".lock")  # the second of a table
_MOST_DAYS, _MOST_COSTS = 90, 200  # of measured costs: since a model was loaded, and how many (chosen)
_DAY = 86_400  # seconds


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder of the cache."""

    path: Path
    kind: str
    bytes: int
    days: float  # since it was written or, for a measured cost, used
    unneeded: str = ""  # why nobody needs it; "" if somebody may


def show_cache(*, prune: bool, as_json: bool) -> None:
    """Print what the cache folder holds, after removing what nobody needs if `prune`.

    StoreError if something cannot be removed.
    """
    found = entries(cache_path())
    removed = [entry for entry in found if entry.unneeded and remove(entry)] if prune else []
    left = [entry for entry in found if entry not in removed]
    if as_json:
        listed = {name: [asdict(entry) for entry in each] for name, each in (("entries", left), ("removed", removed))}
        show_json({"folder": cache_path(), **listed})
        return
    typer.echo(f"{cache_path()}: {_size(left)}")
    kinds = {kind: [entry for entry in left if entry.kind == kind] for kind in _KINDS.values()}
    rows = [
        (kind, len(each), sum(entry.bytes for entry in each) / 2**20, max(entry.days for entry in each))
        for kind, each in kinds.items()
        if each
    ]
    show_table(("kind", "entries|,", "MiB|,.1f", "oldest, days|.0f"), rows)
    unneeded = removed if prune else [entry for entry in left if entry.unneeded]
    for entry in unneeded:
        typer.echo(f"{entry.path.relative_to(cache_path())}: {entry.unneeded}")
    if unneeded:
        typer.echo(f"Removed: {_size(removed)}." if prune else f"--prune removes: {_size(unneeded)}.")


def entries(cache: Path) -> list[Entry]:
    """Return the entries of a cache folder by kind, the measured costs used last first; none if it does not exist."""
    now, found = time(), list[Entry]()
    for pattern, kind in _KINDS.items():
        for path in sorted(cache.glob(pattern)):
            with suppress(FileNotFoundError):  # another process has removed it
                if path.suffix not in _LOCKS:
                    days = (now - path.stat().st_mtime) / _DAY
                    found.append(Entry(path, kind, _bytes(path), days, _unneeded(path, kind, days)))
    costs = sorted((entry for entry in found if entry.kind == _COST), key=lambda entry: entry.days)
    others = [entry for entry in found if entry.kind != _COST]
    over = f"{_MOST_COSTS} others were used since"
    kept, many = costs[:_MOST_COSTS], costs[_MOST_COSTS:]
    return [*kept, *(replace(entry, unneeded=entry.unneeded or over) for entry in many), *others]


def remove(entry: Entry) -> bool:
    """Remove an entry, and return whether it did: not if a process is writing it; StoreError if it cannot be."""
    lock = _lock_of(entry)
    try:
        with nullcontext() if lock is None else filelock.FileLock(lock, timeout=0):
            if entry.path.is_dir():
                shutil.rmtree(entry.path)
            else:
                entry.path.unlink(missing_ok=True)
    except filelock.Timeout:
        return False
    except OSError as error:
        raise StoreError(f"{entry.path} cannot be removed ({error.strerror}); remove it yourself.") from error
    return True


def _unneeded(path: Path, kind: str, days: float) -> str:
    """Return why an entry by itself is not needed, or ""."""
    if kind == _COST and days > _MOST_DAYS:
        return f"its model was not used for {days:.0f} days"
    if kind in (_CONVERTED, _ROUNDED) and path.suffix == TEMPORARY_SUFFIX:
        return "unfinished; the process that wrote it was killed"
    return _why_not_loaded(path) if kind == _PACKAGE else ""


def _why_not_loaded(folder: Path) -> str:
    """Return why no compiled package of a folder is loaded any more, or ""."""
    import torch

    from foredraft.model.compiled.package import read_record

    try:
        record = read_record(folder)
    except StoreError:
        return "compiled by another version of foredraft, or damaged"
    if record is None:
        return "unfinished; the process that compiled it was killed"
    return "" if record.torch == torch.__version__ else f"compiled by torch {record.torch}, not {torch.__version__}"


def _lock_of(entry: Entry) -> Path | None:
    """Return the lock that a process holds while it writes an entry, if there is one."""
    if entry.kind == _COST:
        return None
    return entry.path / f"compiling{_LOCK}" if entry.kind == _PACKAGE else entry.path.with_suffix(_LOCK)


def _bytes(path: Path) -> int:
    """Return the bytes of a file, or of the files of a folder without those that links name."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if file.is_symlink() or file.is_file())


def _size(found: Sequence[Entry]) -> str:
    return f"{sum(entry.bytes for entry in found) / 2**20:,.1f} MiB (entries: {len(found):,})"
