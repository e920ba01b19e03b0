"""The files that a corpus is made of: those given, those in folders, their kinds, and the parts to read them in.

Knows names, sizes and times of files. Does not open them, and does not know what is in them.
"""

import os
import sysconfig
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.errors import ForedraftWarning, UsageError

DOCUMENT_SUFFIXES = (".txt", ".md", ".py")
SUFFIXES = (*DOCUMENT_SUFFIXES, ".jsonl", ".parquet")
_KINDS_NAMED = 3  # of files that are left out
_NOT_LIBRARY = frozenset(
    ["test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "turtledemo"]
)


@dataclass(frozen=True, slots=True)
class Part:
    """A file to read, or a range of one, as it was when the reading was planned.

    Attributes:
        path: the file.
        file_bytes: size of the whole file on disk.
        mtime_ns: when the file was last written, in nanoseconds since 1970.
        bytes: how many of the file's bytes the part stands for; over a file's parts they add up to `file_bytes`.
        start: the first byte (.jsonl) or row group (.parquet) of the range; 0 for files of other kinds.
        stop: the byte or row group behind the range; None for the end of the file.
    """

    path: Path
    file_bytes: int
    mtime_ns: int
    bytes: int
    start: int = 0
    stop: int | None = None


def whole_part(path: Path) -> Part:
    """Return the part that is all of a file.

    Raises:
        UsageError: there is no such file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return Part(path, status.st_size, status.st_mtime_ns, status.st_size)


def unreadable(path: Path, error: OSError) -> UsageError:
    """Return the exception for an input that the system does not let be read."""
    return UsageError(f"The input {path} cannot be read ({error.strerror or error}). Leave it out.")


def find_inputs(inputs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the files to read: those given, and those of a supported kind in the folders given, at any depth.

    A folder's files come in sorted order, without hidden files and folders, and with a warning about files of other
    kinds; a file met twice is taken once.

    Raises:
        UsageError: an input is missing, of an unsupported kind, or a folder without any supported file.
    """
    found: dict[Path, Path] = {}
    for given in map(Path, inputs):
        if given.is_dir():
            visible = sorted(path for path in given.rglob("*") if path.is_file() and _visible(path.relative_to(given)))
            files = [path for path in visible if input_kind(path)]
            if files and len(files) < len(visible):
                warnings.warn(_left_out(given, set(visible) - set(files)), ForedraftWarning, stacklevel=2)
            if not files:
                raise UsageError(f"The folder {given} has no file ending in {', '.join(SUFFIXES)} (or those with .gz).")
        elif not given.exists():
            raise UsageError(f"The input {given} does not exist. Check its name.")
        elif not input_kind(given):
            raise UsageError(
                f"The input {given} is of a kind that cannot be read. Give files ending in {', '.join(SUFFIXES)}, "
                "any but .parquet with .gz behind it too, or folders of them."
            )
        else:
            files = [given]
        for path in files:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def standard_library_sources() -> list[Path]:
    """Return the Python files of the running interpreter's standard library, without its tests: about 13 MB of text."""
    found = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return found


def total_bytes(files: Iterable[Path]) -> int:
    """Return how many bytes the files have on disk, which `Document.consumed` runs up to."""
    return sum(path.stat().st_size for path in files)


def is_packed(path: Path) -> bool:
    """Whether a file's name says that it is gzip-compressed."""
    return path.name.lower().endswith(".gz")


def input_kind(path: Path) -> str:
    """Return the supported suffix of a file, without .gz, or an empty string."""
    bare = path.name.lower().removesuffix(".gz")
    kind = next((suffix for suffix in SUFFIXES if bare.endswith(suffix)), "")
    return "" if kind == ".parquet" and is_packed(path) else kind


def _visible(path: Path) -> bool:
    return not any(part.startswith(".") for part in path.parts)


def _left_out(folder: Path, files: Collection[Path]) -> str:
    kinds = Counter(path.suffix or "no ending" for path in files)
    named = ", ".join(f"{count} of {kind}" for kind, count in kinds.most_common(_KINDS_NAMED))
    more = ", ..." if len(kinds) > _KINDS_NAMED else ""
    return f"The folder {folder} has {len(files)} files of other kinds, which are left out: {named}{more}."
