"""The tri-gram table used when none is given: built once from the running interpreter's standard library.

Knows where it is cached and that two processes may want it at once. Does not know who drafts from it.
"""

import platform
from collections.abc import Callable
from pathlib import Path

import filelock
from tokenizers import Tokenizer

from foredraft.cache_folder import cache_folder, cache_path
from foredraft.corpus.build import BuildProgress, build_trigram_table, standard_library_sources
from foredraft.corpus.fingerprint import tokenizer_hash, vocabulary_size
from foredraft.corpus.shards import ReadReport, read_documents, total_bytes
from foredraft.errors import StoreError
from foredraft.index.trigram import open_table

_SUBJECT = "building a tri-gram table from the standard library (once)"
_READING_SHARE = 0.9  # of the build's time; the rest is merging


def default_table(tokenizer: Tokenizer, progress: Callable[[float, str], None] | None = None) -> Path:
    """Return the path of the standard library's table for `tokenizer`, building it if the cache folder lacks it.

    A second process that wants it at the same time waits for the first. A damaged table is built again.

    Args:
        tokenizer: whose ids the table holds.
        progress: told the share done, 0 to 1, and what is being done.

    Raises:
        StoreError: the cache folder cannot be written to, or the disk is full.
    """
    identity = tokenizer_hash(tokenizer)
    path = cache_path() / f"standard-library-{platform.python_version()}-{identity[:16]}.trigrams"
    if _is_sound(path, identity):
        return path
    cache_folder()  # made, or refused with a sentence
    with filelock.FileLock(path.with_name(path.name + ".wait")):
        if not _is_sound(path, identity):
            _build(path, tokenizer, progress)
    return path


def _is_sound(path: Path, identity: str) -> bool:
    try:
        open_table(path, identity)
    except StoreError:
        return False
    return True


def _build(path: Path, tokenizer: Tokenizer, progress: Callable[[float, str], None] | None) -> None:
    files = standard_library_sources()
    total = total_bytes(files)

    def tell(state: BuildProgress) -> None:
        if progress is not None:
            reading = state.phase == "reading"
            done = _READING_SHARE * state.done / max(total, 1) if reading else _READING_SHARE
            progress(min(done, 1.0), _SUBJECT)

    documents = read_documents(files, report=ReadReport())
    build_trigram_table(
        documents, tokenizer, vocabulary_size(tokenizer), path,
        overwrite=True, metadata={"source": f"Python {platform.python_version()} standard library"}, progress=tell,
    )  # fmt: skip
    if progress is not None:
        progress(1.0, _SUBJECT)
