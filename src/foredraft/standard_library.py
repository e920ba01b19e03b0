"""The default table and datastore: a table shipped with the package, or one built from Python's standard library.

What is built is cached, with a lock, because two processes may need it at once. Does not depend on any drafter.
"""

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
from foredraft.index.datastore import open_datastore, write_datastore
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
    identity = tokenizer_hash(backend)
    given = backend, identity, progress
    return Resources(vocabulary, identity, partial(default_table, *given), partial(default_store, *given))


def default_table(tokenizer: Tokenizer, identity: str, progress: Progress | None = None) -> Path:
    """Return the path of a tri-gram table for `tokenizer`: a shipped one, or the standard library's, built if missing.

    `identity` is its `tokenizer_hash`. The shipped tables are counts of millions of tokens of chat, documents and
    stories (foredraft/tables/CARD.md). A damaged table is built again. StoreError if the cache folder cannot be
    written to, or the disk is full.
    """
    for path in sorted(_SHIPPED.glob("*.trigrams")):
        if _is_sound(path, open_table, identity):
            return path
    return _cached("trigrams", "a tri-gram table", tokenizer, identity, _build_table, open_table, progress)


def default_store(tokenizer: Tokenizer, identity: str, progress: Progress | None = None) -> Path:
    """Return the folder of the standard library's datastore for `tokenizer`; as `default_table`."""
    return _cached("store", "a datastore", tokenizer, identity, _build_store, open_datastore, progress)


def _cached(
    suffix: str, what: str, tokenizer: Tokenizer, identity: str,
    build: Callable[[Path, Iterator[Symbols], str, int], None], opened: Callable[[Path, str], object],
    progress: Progress | None,
) -> Path:  # fmt: skip
    """Return the cached file or folder, built if `opened` raises StoreError for it."""
    path = cache_path() / f"standard-library-{platform.python_version()}-{identity[:16]}.{suffix}"
    if not _is_sound(path, opened, identity):
        cache_folder()  # creates the folder
        with filelock.FileLock(path.with_name(path.name + ".wait")):
            if not _is_sound(path, opened, identity):
                vocabulary = vocabulary_size(tokenizer)
                documents = _documents(progress, f"building {what} from the standard library (once)")
                build(path, tokenize(documents, tokenizer, vocabulary), identity, vocabulary)
    return path


def _is_sound(path: Path, opened: Callable[[Path, str], object], identity: str) -> bool:
    try:
        opened(path, identity)
    except StoreError:
        return False
    return True


def sources() -> list[Path]:
    """Return the Python files of the interpreter's standard library without its tests, about 13 MB."""
    found = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return found


def _documents(progress: Progress | None, subject: str) -> Iterator[Document]:
    """Yield the standard library's files, and report the share read to `progress`."""
    files = sources()
    total = sum(path.stat().st_size for path in files)
    for document in read_documents(files, report=ReadReport()):
        if progress is not None:
            progress(_READING_SHARE * document.consumed / total, subject)
        yield document


def _build_table(path: Path, text: Iterator[Symbols], identity: str, vocabulary: int) -> None:
    metadata = {"source": f"Python {platform.python_version()} standard library"}
    count_trigrams(text, identity, vocabulary, path, overwrite=True, metadata=metadata)


def _build_store(path: Path, text: Iterator[Symbols], identity: str, vocabulary: int) -> None:
    with write_datastore(path, tokenizer_hash=identity, vocabulary=vocabulary, create=True, overwrite=True) as writer:
        writer.add([np.concatenate(list(text))])
        writer.commit()
