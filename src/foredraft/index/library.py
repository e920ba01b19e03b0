"""The searched texts: datastores, which may grow meanwhile, and texts shared between sequences.

Does not depend on the searches.
"""

import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from foredraft.atomic_file import check_place
from foredraft.contracts import TokenIds
from foredraft.errors import ForedraftWarning, StoreError, UsageError
from foredraft.index.datastore import (
    MANIFEST,
    Datastore,
    check_folder,
    manifest_version,
    open_datastore,
    read_manifest,
    write_datastore,
)
from foredraft.index.recent_text import END, add, empty_text, with_room
from foredraft.index.suffix_array import SuffixArrays, symbol_dtype
from foredraft.options import user_path

MOST_SHARED = 1 << 22  # tokens of other sequences kept; then the older half is dropped; chosen
_MOST_SEGMENTS = 8  # approximate, of a bounded store, as each is searched in every step; chosen


class Library:
    """Datastores, and text shared by sequences; thread-safe. `identity` is tokenizer hash and vocabulary."""

    def __init__(self, stores: Iterable[Datastore] = (), *, vocabulary: int = 0, tokenizer_hash: str = "") -> None:
        self._stores = tuple(stores)
        self.identity = tokenizer_hash, vocabulary
        self.shared = empty_text()
        self.lock = threading.Lock()

    def forget(self) -> None:
        """Drop shared text that was not saved."""
        with self.lock:
            self.shared = empty_text()

    def open(self, folder: str | Path) -> None:
        """Search the datastore in `folder` too, unless it is searched already; raises what `open_datastore` does."""
        if all(each.folder.resolve() != Path(folder).resolve() for each in self._stores):
            self._stores = (*self._stores, open_datastore(folder, *self.identity))

    def segments(self) -> list[SuffixArrays]:
        """Return the current segments of all stores."""
        with self.lock:
            self._stores = tuple(map(_current, self._stores))
            return [text for store in self._stores for text in store.segments]

    def share(self, ids: TokenIds) -> None:
        """Add `ids`, int64[n], to the shared text."""
        with self.lock:
            text, length = self.shared, int(self.shared.length[0])
            if length + len(ids) + 1 > MOST_SHARED:
                newer = text.symbols[length // 2 : length].astype(np.int64)
                text = empty_text(2 * len(newer))
                add(text, newer)
            text = with_room(text, len(ids) + 1)
            add(text, np.append(ids, END))
            self.shared = text

    def save(self, folder: Path, most_tokens: int) -> None:
        """Move the shared text into the datastore `folder`, created if missing and searched from now on.

        The store then holds at most `most_tokens`: the oldest segments are dropped and small ones merged. Raises
        StoreError if the store cannot be written or belongs to another tokenizer.
        """
        with self.lock:
            text = self.shared.symbols[: int(self.shared.length[0])][-most_tokens - 1 :]  # END is no token
            if not len(text):
                return
            new = not (folder / MANIFEST).exists()
            tokenizer_hash, vocabulary = self.identity
            with write_datastore(folder, tokenizer_hash=tokenizer_hash, vocabulary=vocabulary, create=new) as writer:
                separator = writer.manifest.vocabulary
                symbols = np.where((text == END) | (text >= separator), separator, text).astype(symbol_dtype(separator))
                if not writer.holds([symbols]):  # the same texts may have been saved before
                    writer.add([symbols])
                    piece = most_tokens // _MOST_SEGMENTS
                    while writer.manifest.tokens > most_tokens:
                        writer.drop_oldest(piece)
                    writer.merge(piece)
                    writer.commit()
            self.shared = empty_text()
            self.open(folder)


def open_library(
    store: str, default: Callable[[], Path] | None, vocabulary: int, tokenizer_hash: str, *,
    memory: str | None = None, memory_tokens: int = 0,
) -> Library:  # fmt: skip
    """Open the datastore `store`, "default" or "none", and the one in `memory`, which need not exist yet.

    `default` builds or finds the default datastore. Raises StoreError for a store that is damaged or of another
    tokenizer, or a memory that is not writable, and UsageError for a memory of more than `memory_tokens`.
    """
    if store == "default":
        store = str(default()) if default is not None else "none"
    library = Library(vocabulary=vocabulary, tokenizer_hash=tokenizer_hash)
    if store != "none":
        library.open(user_path(store))
    if memory is None:
        return library
    folder = user_path(memory)
    check_place(folder, folder=True)  # texts are saved there later
    if not (folder / MANIFEST).exists():
        check_folder(folder)
    elif (tokens := read_manifest(folder).tokens) > memory_tokens:
        raise UsageError(
            f"The memory {folder} holds {tokens} tokens and memory_tokens is {memory_tokens}, so that the oldest texts "
            "would be deleted. Raise memory_tokens, or name another folder; a store that is only read is the option "
            "store."
        )
    else:
        library.open(folder)
    return library


def _current(store: Datastore) -> Datastore:
    """Return the store reopened if it changed; if that fails, warn and return it unchanged."""
    if manifest_version(store.folder) == store.version:
        return store
    try:
        return open_datastore(store.folder, store.manifest.tokenizer_hash, store.manifest.vocabulary)
    except StoreError as error:  # the mapped files can still be searched
        warnings.warn(f"Drafts come from the store as it was: {error}", ForedraftWarning, stacklevel=2)
        return store
