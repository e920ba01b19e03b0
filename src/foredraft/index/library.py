"""The texts that are searched: datastores that may grow meanwhile, and what sequences have shared.

Knows stores and ids; not who searches them, nor for what.
"""

import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from foredraft.atomic_file import check_place
from foredraft.contracts import TokenIds
from foredraft.errors import ForedraftWarning, StoreError, UsageError
from foredraft.index.datastore import MANIFEST, Datastore, manifest_version, open_datastore
from foredraft.index.datastore_writer import DatastoreWriter
from foredraft.index.recent_text import END, RecentText, append, empty_text, with_room
from foredraft.index.suffix_array import SuffixArrays, symbol_dtype

MOST_SHARED = 1 << 22
"""Tokens of other sequences that are kept; beyond, the older half is forgotten."""
_MOST_SEGMENTS = 8  # about, of a bounded store: each is searched at every step
NOTHING_TO_SAVE = 'Only what is shared can be saved: give learn="shared", and a path or memory=PATH.'


class Library:
    """Datastores and shared text; safe to use from several threads.

    Attributes:
        identity: the tokenizer's hash and the vocabulary that its files are bound to.
        shared: what sequences have shared.
        lock: held while any of it changes.
    """

    def __init__(self, stores: Iterable[Datastore] = (), *, vocabulary: int = 0, tokenizer_hash: str = "") -> None:
        self._stores = tuple(stores)
        self.identity = tokenizer_hash, vocabulary
        self.shared = empty_text()
        self.lock = threading.Lock()

    def forget(self) -> None:
        """Forget what was shared and not saved."""
        with self.lock:
            self.shared = empty_text()

    def open(self, folder: str) -> None:
        """Add the datastore in `folder` to those that are searched; raises what `open_datastore` does."""
        self._stores = (*self._stores, open_datastore(folder, *self.identity))

    def segments(self) -> list[SuffixArrays]:
        """Return what the stores hold by now."""
        with self.lock:
            self._stores = tuple(map(_current, self._stores))
            return [text for store in self._stores for text in store.segments]

    def share(self, ids: TokenIds) -> None:
        """Let later sequences find `ids`, int64[n]."""
        with self.lock:
            if int(self.shared.length[0]) + len(ids) + 1 > MOST_SHARED:
                self.shared = _newer_half(self.shared)
            text = with_room(self.shared, len(ids) + 1)
            append(text, np.append(ids, END))
            self.shared = text

    def save(self, path: str | None, memory: str | None, most_tokens: int | None = None) -> None:
        """Move what was shared into a datastore, made if it does not exist.

        Args:
            path: its folder; None for `memory`.
            memory: the folder that is searched from now on if it is new.
            most_tokens: beyond, the oldest segments are forgotten, and small ones sorted together; None keeps all.

        Raises:
            UsageError: no folder is named.
            StoreError: the store cannot be written, or belongs to another tokenizer.
        """
        folder = path or memory
        if folder is None:
            raise UsageError(NOTHING_TO_SAVE)
        with self.lock:
            text = self.shared.symbols[: int(self.shared.length[0])]
            if not len(text):
                return
            new = not (Path(folder) / MANIFEST).exists()
            tokenizer_hash, vocabulary = self.identity
            with DatastoreWriter(folder, tokenizer_hash=tokenizer_hash, vocabulary=vocabulary, create=new) as writer:
                separator = writer.manifest.vocabulary
                symbols = np.where((text == END) | (text >= separator), separator, text).astype(symbol_dtype(separator))
                if not writer.holds([symbols]):  # the same requests may have been answered before
                    writer.add([symbols])
                    if most_tokens is not None:
                        _bound(writer, most_tokens)
                    writer.commit()
            self.shared = empty_text()
            if new and memory is not None and Path(folder) == Path(memory):
                self._stores = (*self._stores, open_datastore(folder))


def open_library(
    store: str, memory: str | None, default: Callable[[], Path] | None, vocabulary: int, tokenizer_hash: str
) -> Library:
    """Open the texts that a drafter's options name.

    Args:
        store: folder of a datastore, "default", or "none".
        memory: folder of another one, which need not exist yet; None for none.
        default: makes or finds the default datastore; None where there is none.
        vocabulary: as `Library` takes it.
        tokenizer_hash: likewise.

    Raises:
        StoreError: a store that is damaged or belongs to another tokenizer, or a memory that could not be written.
    """
    library = Library(vocabulary=vocabulary, tokenizer_hash=tokenizer_hash)
    if store == "default":
        store = str(default()) if default is not None else "none"
    if store != "none":
        library.open(store)
    if memory is not None:
        check_place(Path(memory))
        if (Path(memory) / MANIFEST).exists():
            library.open(memory)
    return library


def _bound(writer: DatastoreWriter, most_tokens: int) -> None:
    """Forget the oldest segments beyond `most_tokens`, but never the newest, and merge the small ones that are left."""
    while len(writer.manifest.segments) > 1 and sum(entry.tokens for entry in writer.manifest.segments) > most_tokens:
        writer.remove(writer.manifest.segments[0].name)
    writer.merge(most_tokens // _MOST_SEGMENTS)


def _current(store: Datastore) -> Datastore:
    """Return the store as it is by now; as it was, with a warning, where it cannot be opened any more."""
    if manifest_version(store.folder) == store.version:
        return store
    try:
        return open_datastore(store.folder, store.manifest.tokenizer_hash, store.manifest.vocabulary)
    except StoreError as error:  # what is mapped still serves, and no text should end for it
        warnings.warn(f"{error} Until then, drafts come from the store as it was.", ForedraftWarning, stacklevel=2)
        return store


def _newer_half(text: RecentText) -> RecentText:
    length = int(text.length[0])
    kept = text.symbols[length // 2 : length].astype(np.int64)
    half = empty_text(2 * len(kept))
    append(half, kept)
    return half
