"""The table and the datastore used when none is given: a table that is shipped, or what the standard library gives.

Knows which tables come with the package; where those built from the running interpreter's standard library are cached;
and that two processes may want one at once. Does not know who drafts from them.
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
_NOT_LIBRARY = frozenset(
    ["test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "turtledemo"]
)
_READING_SHARE = 0.9  # of a build's time; the rest is merging or sorting


def resources_for(vocabulary: int, tokenizer: Any | None, *, progress: Progress | None = None) -> Resources:
    """Return what a drafter may build on for a model, draft models apart.

    Args:
        vocabulary: ids that the model scores.
        tokenizer: the model's, or None.
        progress: told about work that takes over a second.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return Resources(
        vocabulary=vocabulary,
        tokenizer_hash=tokenizer_hash(backend) if backend is not None else "",
        default_table=partial(default_table, backend, progress) if backend is not None else None,
        default_store=partial(default_store, backend, progress) if backend is not None else None,
    )


def default_table(tokenizer: Tokenizer, progress: Progress | None = None) -> Path:
    """Return the path of a tri-gram table for `tokenizer`: shipped, or of the standard library, built if need be.

    The shipped ones count millions of tokens of chat, documents and stories (foredraft/tables/CARD.md). A second
    process that wants one at the same time waits for the first. A damaged table is built again.

    Args:
        tokenizer: whose ids the table holds.
        progress: told the share done, 0 to 1, and what is being done.

    Raises:
        StoreError: the cache folder cannot be written to, or the disk is full.
    """
    identity = tokenizer_hash(tokenizer)
    for path in sorted(_SHIPPED.glob("*.trigrams")):
        with contextlib.suppress(StoreError):
            open_table(path, identity)
            return path
    tell = _telling(progress, "building a tri-gram table from the standard library (once)")
    return _made_once("trigrams", tokenizer, partial(_build_table, tokenizer, tell), open_table)


def default_store(tokenizer: Tokenizer, progress: Progress | None = None) -> Path:
    """Return the folder of the standard library's datastore for `tokenizer`; as `default_table`."""
    tell = _telling(progress, "building a datastore from the standard library (once)")
    return _made_once("store", tokenizer, partial(_build_store, tokenizer, tell), open_datastore)


def _made_once(
    suffix: str, tokenizer: Tokenizer, build: Callable[[Path], None], opened: Callable[[Path, str], object]
) -> Path:
    identity = tokenizer_hash(tokenizer)
    path = cache_path() / f"standard-library-{platform.python_version()}-{identity[:16]}.{suffix}"

    def is_sound() -> bool:
        try:
            opened(path, identity)
        except StoreError:
            return False
        return True

    if not is_sound():
        cache_folder()  # made, or refused with a sentence
        with filelock.FileLock(path.with_name(path.name + ".wait")):
            if not is_sound():
                build(path)
    return path


def _telling(progress: Progress | None, subject: str) -> Callable[[float], None]:
    return (lambda share: progress(min(share, 1.0), subject)) if progress is not None else (lambda _: None)


def sources() -> list[Path]:
    """Return the Python files of the running interpreter's standard library, without its tests: about 13 MB of text."""
    found = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return found


def _symbols(tokenizer: Tokenizer, tell: Callable[[float], None]) -> Iterator[Symbols]:
    """Yield the standard library's ids, telling of the share read."""
    files = sources()
    total = max(sum(path.stat().st_size for path in files), 1)

    def documents() -> Iterator[Document]:
        for document in read_documents(files, report=ReadReport()):
            tell(_READING_SHARE * document.consumed / total)
            yield document

    return tokenize(documents(), tokenizer, vocabulary_size(tokenizer))


def _build_table(tokenizer: Tokenizer, tell: Callable[[float], None], path: Path) -> None:
    metadata = {"source": f"Python {platform.python_version()} standard library"}
    symbols = _symbols(tokenizer, tell)
    count_trigrams(
        symbols, tokenizer_hash(tokenizer), vocabulary_size(tokenizer), path, overwrite=True, metadata=metadata
    )
    tell(1.0)


def _build_store(tokenizer: Tokenizer, tell: Callable[[float], None], path: Path) -> None:
    text = np.concatenate(list(_symbols(tokenizer, tell)))
    identity, vocabulary = tokenizer_hash(tokenizer), vocabulary_size(tokenizer)
    with DatastoreWriter(path, tokenizer_hash=identity, vocabulary=vocabulary, create=True, overwrite=True) as writer:
        writer.add([text])
        writer.commit()
    tell(1.0)
