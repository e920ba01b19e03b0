"""Named stores of texts, which clients fill and drafts are retrieved from, separate for every API key.

A store is a datastore in a folder, so a killed server leaves it valid. Does not depend on HTTP or drafters.
"""

import hashlib
import re
import shutil
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from foredraft.atomic_file import check_place
from foredraft.corpus.documents import Document
from foredraft.corpus.words import tokenize, tokenizer_hash, vocabulary_size
from foredraft.errors import StoreError, UsageError
from foredraft.index.datastore import MANIFEST, read_manifest, write_datastore

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_MOST_SEGMENTS = 8  # more are merged, because every step searches each segment (chosen)
# of one API key; chosen
_MOST_TOKENS = 1 << 26  # in all its stores; at 6 bytes each 400 MB of disk
_MOST_STORES = 256  # as every request to add reads the manifests of all
_GONE = ".removed"


class Stores:
    """The stores in a folder; `tokenizer` is the model's, of the tokenizers library. No folder means no stores."""

    def __init__(self, folder: Path | None, tokenizer: Any) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._hash, self._vocabulary = tokenizer_hash(tokenizer), vocabulary_size(tokenizer)
        if folder is not None:
            check_place(folder, folder=True)
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"*/*{_GONE}"):
                shutil.rmtree(left, ignore_errors=True)

    def existing(self, key: str, name: str) -> Path:
        """Return the folder of a store; UsageError for an invalid name, or a store that does not exist."""
        place = self._place(key, name)
        if not (place / MANIFEST).exists():
            raise UsageError(f"There is no store {name!r}; add texts to it with POST /v1/stores/{name}/texts.")
        return place

    def list(self, key: str) -> list[dict[str, Any]]:
        return [] if self._folder is None else [self._described(key, name) for name in self._names(key)]

    def add(self, key: str, name: str, texts: Sequence[str]) -> dict[str, Any]:
        """Add texts to a store, created if missing, and return its description.

        UsageError if the key's stores would hold too much, StoreError if the store cannot be written.
        """
        place = self._place(key, name)
        documents = (Document(text, len(text)) for text in texts)
        symbols = list(tokenize(documents, self._tokenizer, self._vocabulary))
        new, present, held = not (place / MANIFEST).exists(), self._names(key), 0
        if new and len(present) >= _MOST_STORES:
            raise UsageError(f"There are {len(present)} stores, the most that a client may have; delete some first.")
        for each in present:
            with suppress(StoreError):  # a damaged one is told of when it is used
                held += read_manifest(self.existing(key, each)).tokens
        if held + sum(map(len, symbols)) > _MOST_TOKENS:
            raise UsageError(
                f"The stores would hold more than {_MOST_TOKENS:,} tokens, the most that a client may have; they hold "
                f"{held:,} now. Send fewer texts, or delete a store first."
            )
        with write_datastore(place, tokenizer_hash=self._hash, vocabulary=self._vocabulary, create=new) as writer:
            if symbols and not writer.holds(symbols):
                writer.add(symbols)
                if len(writer.manifest.segments) > _MOST_SEGMENTS:
                    writer.merge(writer.manifest.tokens)
            writer.commit()
        return self._described(key, name)

    def remove(self, key: str, name: str) -> None:
        """Remove a store; generators that have it open keep working."""
        place = self.existing(key, name)
        gone = place.with_name(f"{name}-{uuid.uuid4().hex}{_GONE}")
        place.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _names(self, key: str) -> Sequence[str]:
        names = [manifest.parent.name for manifest in sorted(self._place(key, "any").parent.glob(f"*/{MANIFEST}"))]
        return [name for name in names if _NAME.fullmatch(name)]

    def _place(self, key: str, name: str) -> Path:
        """Return the folder of a store, which need not exist; UsageError if there can be none."""
        if self._folder is None:
            raise UsageError("This server keeps no stores; start it with --stores FOLDER.")
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name[:80]!r} is not a valid store name; use up to 64 lower-case letters, digits, hyphens and "
                "underscores."
            )
        owner = hashlib.sha256(key.encode()).hexdigest()[:32] if key else "open"
        return self._folder / owner / name

    def _described(self, key: str, name: str) -> dict[str, Any]:
        return {"id": name, "object": "store", "tokens": read_manifest(self.existing(key, name)).tokens}
