"""Changes to a datastore: one writer at a time; new files are written first and the manifest last.

Does not depend on the format of segments (index/datastore.py).
"""

import contextlib
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from foredraft.atomic_file import TEMPORARY_SUFFIX, store_file, unwritable
from foredraft.errors import StoreError, UsageError
from foredraft.index import datastore
from foredraft.index.datastore import MANIFEST, SEGMENT_SUFFIX, Manifest, Progress, SegmentEntry, read_manifest
from foredraft.index.storage import BUILDING_SUFFIX, write_lock
from foredraft.index.suffix_array import Symbols, grouped

LOCK = "datastore.lock"


class DatastoreWriter:
    """Holds a store's lock while segments are added, merged or removed; `manifest` is the store after `commit`.

    Changes take effect at `commit`, which writes the manifest and then removes the files that it does not list. A
    killed process leaves the store unchanged, and files that the next `commit` removes.

    Tokenizer hash and vocabulary are the store's if None. With `create` an empty store is begun, and with `overwrite`
    an existing one replaced; without `create` the store must exist.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        tokenizer_hash: str | None = None,
        vocabulary: int | None = None,
        create: bool = False,
        overwrite: bool = False,
    ) -> None:
        if create and (tokenizer_hash is None or vocabulary is None):
            raise UsageError("A new store needs a tokenizer's hash and a vocabulary.")
        self.folder = Path(folder)
        self.manifest = Manifest(tokenizer_hash or "", vocabulary or 0, ())
        self._create, self._overwrite = create, overwrite
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Take the lock and read the manifest; raises StoreError if either fails."""
        if self._create:
            self._make_folder()
        else:
            read_manifest(self.folder)  # refuses a folder that is not a store, before a lock file is created there
        with contextlib.ExitStack() as held:
            held.enter_context(write_lock(self.folder / LOCK, self.folder))
            if not self._create:
                self.manifest = datastore.open_datastore(self.folder, self.manifest.tokenizer_hash).manifest
            elif (self.folder / MANIFEST).exists() and not self._overwrite:
                raise StoreError(
                    f"The store {self.folder} exists already. Add to it (foredraft index add), replace it with "
                    "overwrite=True (--overwrite), or give another name."
                )
            self._held = held.pop_all()
        return self

    def _make_folder(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise StoreError(f"{self.folder} is a file. Give the name of a folder.")
        foreign = sorted(path.name for path in self.folder.glob("*") if not _is_store_file(path.name))
        if foreign:
            raise StoreError(f"{self.folder} holds other things ({foreign[0]}). Give an empty folder, or a new name.")
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def __exit__(self, *_: object) -> None:
        """Release the lock, and remove the files of a new store that was not committed."""
        with self._held:
            if not (self.folder / MANIFEST).exists():
                _remove(path for path in self.folder.glob("*") if path.name != LOCK and _is_store_file(path.name))

    def add(self, texts: Sequence[Symbols], progress: Progress | None = None) -> SegmentEntry:
        """Sort texts into a new segment; raises what `write_segment` and `adopt` do."""
        return self.adopt(self._write(texts, progress))

    def _write(self, texts: Sequence[Symbols], progress: Progress | None) -> SegmentEntry:
        hash_, vocabulary = self.manifest.tokenizer_hash, self.manifest.vocabulary
        return datastore.write_segment(
            self.folder, texts, tokenizer_hash=hash_, vocabulary=vocabulary, progress=progress
        )

    def holds(self, texts: Sequence[Symbols]) -> bool:
        """Return whether the store has a segment of exactly these texts."""
        return datastore.segment_name(texts) in self._names()

    def _names(self) -> list[str]:
        return [entry.name for entry in self.manifest.segments]

    def adopt(self, entry: SegmentEntry) -> SegmentEntry:
        """Add a segment whose file is in the folder; raises UsageError if the store holds its text already."""
        if entry.name in self._names():
            raise UsageError(f"The store {self.folder} holds this text already, as segment {entry.name}.")
        self.manifest = replace(self.manifest, segments=(*self.manifest.segments, entry))
        return entry

    def remove(self, name: str) -> SegmentEntry:
        """Remove a segment; raises UsageError for an unknown name."""
        names = self._names()
        if name not in names:
            raise UsageError(
                f"The store {self.folder} has no segment {name!r}. Its segments are: {', '.join(names) or 'none'}."
            )
        kept = list(self.manifest.segments)
        removed = kept.pop(names.index(name))
        self.manifest = replace(self.manifest, segments=tuple(kept))
        return removed

    def merge(self, most_tokens: int, progress: Progress | None = None) -> int:
        """Merge neighbouring segments up to `most_tokens` each; return by how many segments the store shrank."""
        before = self.manifest.segments
        merged: list[SegmentEntry] = []
        for group in grouped(before, lambda entry: entry.tokens, most_tokens):
            texts = [datastore.open_segment(self.folder, self.manifest, entry).symbols for entry in group]
            merged.append(self._write(texts, progress) if len(group) > 1 else group[0])
        self.manifest = replace(self.manifest, segments=tuple(merged))
        return len(before) - len(merged)

    def commit(self) -> Manifest:
        """Apply the changes and remove unlisted files; a StoreError leaves the store unchanged."""
        store_file(self.folder / MANIFEST, datastore.manifest_bytes(self.manifest))
        _remove(leftovers(self.folder))
        return self.manifest


def leftovers(folder: Path) -> list[Path]:
    """Return the files that a killed writer left and the manifest does not list. Raises what `read_manifest` does."""
    listed = [datastore.segment_path(folder, entry.name).name for entry in read_manifest(folder).segments]
    kept = {MANIFEST, LOCK, *listed}
    return sorted(path for path in folder.iterdir() if _is_store_file(path.name) and path.name not in kept)


def _is_store_file(name: str) -> bool:
    """Return whether foredraft creates files or folders of this name in a store."""
    endings = (SEGMENT_SUFFIX, SEGMENT_SUFFIX + BUILDING_SUFFIX, TEMPORARY_SUFFIX)
    return name in (MANIFEST, LOCK) or name.endswith(endings)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # Windows keeps mapped files; the next commit tries again
                path.unlink(missing_ok=True)
