"""Stores of texts that clients fill and drafts are found in: by name, and apart for every API key.

Knows folders, names and texts; datastores do the rest, so that a killed server leaves every store as it was.
"""

import hashlib
import re
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foredraft.corpus.documents import Document
from foredraft.corpus.words import tokenize, tokenizer_hash, vocabulary_size
from foredraft.errors import UsageError
from foredraft.index.datastore import MANIFEST, read_manifest
from foredraft.index.datastore_writer import DatastoreWriter

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_MOST_SEGMENTS = 8  # each of which is searched at every step
_GONE = ".removed"


class Stores:
    """The stores in a folder, None where none can be made, for the model's tokenizer (of the tokenizers library)."""

    def __init__(self, folder: Path | None, tokenizer: Any) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._hash, self._vocabulary = tokenizer_hash(tokenizer), vocabulary_size(tokenizer)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"*/*{_GONE}"):
                shutil.rmtree(left, ignore_errors=True)

    def place(self, key: str, name: str) -> Path:
        """Return the folder of a store, which need not exist.

        Raises:
            UsageError: a name that cannot be one, or a server without stores.
        """
        if self._folder is None:
            raise UsageError("This server keeps no stores; start it with --stores FOLDER.")
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name[:80]!r} cannot be a store's name; use up to 64 small letters, digits, hyphens and underscores."
            )
        owner = hashlib.sha256(key.encode()).hexdigest()[:32] if key else "open"
        return self._folder / owner / name

    def existing(self, key: str, name: str) -> Path:
        """Return the folder of a store, or raise UsageError where there is none."""
        place = self.place(key, name)
        if not (place / MANIFEST).exists():
            raise UsageError(f"There is no store {name!r}; add texts to it with POST /v1/stores/{name}/texts.")
        return place

    def list(self, key: str) -> list[dict[str, Any]]:
        """Return what there is: names, and tokens of each."""
        if self._folder is None:
            return []
        names = [manifest.parent.name for manifest in sorted(self.place(key, "any").parent.glob(f"*/{MANIFEST}"))]
        return [self.describe(key, name) for name in names if _NAME.fullmatch(name)]

    def describe(self, key: str, name: str) -> dict[str, Any]:
        """Return a store's name and its tokens."""
        return {"id": name, "object": "store", "tokens": read_manifest(self.existing(key, name)).tokens}

    def add(self, key: str, name: str, texts: Sequence[str]) -> dict[str, Any]:
        """Add texts to a store, made if need be, and return what it is then, or raise StoreError."""
        place = self.place(key, name)
        place.parent.mkdir(parents=True, exist_ok=True)
        documents = (Document(text, len(text)) for text in texts)
        symbols = list(tokenize(documents, self._tokenizer, self._vocabulary))
        new = not (place / MANIFEST).exists()
        with DatastoreWriter(place, tokenizer_hash=self._hash, vocabulary=self._vocabulary, create=new) as writer:
            if symbols and not writer.holds(symbols):
                writer.add(symbols)
                if len(writer.manifest.segments) > _MOST_SEGMENTS:
                    writer.merge(writer.manifest.tokens)
            writer.commit()
        return self.describe(key, name)

    def remove(self, key: str, name: str) -> None:
        """Remove a store; drafts that are being made from it go on."""
        place = self.existing(key, name)
        gone = place.with_name(f"{name}-{uuid.uuid4().hex}{_GONE}")
        place.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
