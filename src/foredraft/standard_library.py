"""The default table and datastore: a table shipped with the package, or one built from Python's standard library.

What is built is cached, with a lock, because two processes may need it at once. Does not depend on any drafter.
"""

import contextlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import numpy as np
from tokenizers import Tokenizer

from foredraft.cache_folder import cache_folder, cache_path
from foredraft.corpus.documents import Document, ReadReport, read_documents
from foredraft.corpus.trigrams import count_trigrams
from foredraft.corpus.words import tokenize, tokenizer_hash, vocabulary_size
from foredraft.drafters import Resources
from foredraft.errors import StoreError
from foredraft.index.datastore import open_datastore
from foredraft.index.datastore_writer import DatastoreWriter
from foredraft.index.suffix_array import Symbols
from foredraft.index.trigram import open_table

Progress = Callable[[float, str], None]
_SHIPPED = Path(__file__).parent / "tables"
_NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "turtledemo"}
_READING_SHARE = 0.9  # share of a build's time spent reading (estimate); the rest is merging or sorting


def resources_for(vocabulary: int, tokenizer: Any | None, *, progress: Progress | None = None) -> Resources:
    """Return a drafter's resources for a model that scores `vocabulary` ids, without a draft model."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return Resources(vocabulary)
    tables = partial(default_table, backend, progress), partial(default_store, backend, progress)
    return Resources(vocabulary, tokenizer_hash(backend), *tables)


def default_table(tokenizer: Tokenizer, progress: Progress | None = None) -> Path:
    """Return the path of a tri-gram table for `tokenizer`: a shipped one, or the standard library's, built if missing.

    The shipped tables are counts of millions of tokens of chat, documents and stories (foredraft/tables/CARD.md). A
    damaged table is built again. StoreError if the cache folder cannot be written to, or the disk is full.
    """
    identity = tokenizer_hash(tokenizer)
    for path in sorted(_SHIPPED.glob("*.trigrams")):
        with contextlib.suppress(StoreError):
            open_table(path, identity)
            return path
    tell = _telling(progress, "building a tri-gram table from the standard library (once)")
    return _cached("trigrams", identity, partial(_build_table, tokenizer, tell), open_table)


def default_store(tokenizer: Tokenizer, progress: Progress | None = None) -> Path:
    """Return the folder of the standard library's datastore for `tokenizer`; as `default_table`."""
    tell = _telling(progress, "building a datastore from the standard library (once)")
    return _cached("store", tokenizer_hash(tokenizer), partial(_build_store, tokenizer, tell), open_datastore)


def _cached(suffix: str, identity: str, build: Callable[[Path], None], opened: Callable[[Path, str], object]) -> Path:
    """Return the cached file or folder, built if `opened` raises StoreError for it."""
    path = cache_path() / f"standard-library-{platform.python_version()}-{identity[:16]}.{suffix}"

    def is_sound() -> bool:
        with contextlib.suppress(StoreError):
            opened(path, identity)
            return True
        return False

    if not is_sound():
        cache_folder()  # creates the folder
        with filelock.FileLock(path.with_name(path.name + ".wait")):
            if not is_sound():
                build(path)
    return path


def _telling(progress: Progress | None, subject: str) -> Callable[[float], None]:
    return (lambda share: progress(min(share, 1.0), subject)) if progress is not None else (lambda _: None)


def sources() -> list[Path]:
    """Return the Python files of the interpreter's standard library without its tests, about 13 MB."""
    found = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return found


def _symbols(tokenizer: Tokenizer, tell: Callable[[float], None]) -> Iterator[Symbols]:
    """Yield the standard library's ids, and report the share read to `tell`."""
    files = sources()
    total = sum(path.stat().st_size for path in files)

    def documents() -> Iterator[Document]:
        for document in read_documents(files, report=ReadReport()):
            tell(_READING_SHARE * document.consumed / total)
            yield document

    return tokenize(documents(), tokenizer, vocabulary_size(tokenizer))


def _build_table(tokenizer: Tokenizer, tell: Callable[[float], None], path: Path) -> None:
    metadata = {"source": f"Python {platform.python_version()} standard library"}
    words = _symbols(tokenizer, tell), tokenizer_hash(tokenizer), vocabulary_size(tokenizer)
    count_trigrams(*words, path, overwrite=True, metadata=metadata)
    tell(1.0)


def _build_store(tokenizer: Tokenizer, tell: Callable[[float], None], path: Path) -> None:
    text = np.concatenate(list(_symbols(tokenizer, tell)))
    identity, vocabulary = tokenizer_hash(tokenizer), vocabulary_size(tokenizer)
    with DatastoreWriter(path, tokenizer_hash=identity, vocabulary=vocabulary, create=True, overwrite=True) as writer:
        writer.add([text])
        writer.commit()
    tell(1.0)
