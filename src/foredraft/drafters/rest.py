"""REST: drafts retrieved from a datastore, from the sequence itself, and from what other sequences have shared.

He et al., "REST: Retrieval-Based Speculative Decoding" (NAACL 2024), section 3. `weighting="longest"` is the paper's
rule; "backoff", which asks shorter contexts too, is this project's. Knows ids and arrays; no text, no model.
"""

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, TokenIds, Verdict
from foredraft.drafters import Resources
from foredraft.errors import ForedraftWarning, StoreError, UsageError
from foredraft.index.backoff import learn_trust, prior_trust, weigh
from foredraft.index.datastore import MANIFEST, Datastore, manifest_version, open_datastore
from foredraft.index.datastore_writer import DatastoreWriter
from foredraft.index.published import MOST_OCCURRENCES, published_tree
from foredraft.index.recent_text import END, RecentText, append, empty_text, occurrences, with_room
from foredraft.index.retrieval import (
    OWN,
    SHARED,
    STORE,
    Levels,
    Rows,
    allot,
    best_nodes,
    count_lengths,
    gather_from_store,
    gather_from_text,
    levels_of,
    rows_for,
)
from foredraft.index.suffix_array import SuffixArrays, follow, symbol_dtype

MOST_SHARED = 1 << 22
"""Tokens of other sequences that are kept; beyond, the older half is forgotten."""


@dataclass(frozen=True, slots=True)
class RestOptions:
    """Options of REST. The paper's settings (section 4.1): weighting="longest", learn="off", shortest=2, doubt=0.

    Attributes:
        store: folder of a datastore; "default" uses the one that comes with the model, if any; "none" uses none.
        weighting: "longest" asks the longest context that occurs anywhere, as the paper does; "backoff" also asks
            shorter ones, each trusted as far as its kind has proved right; "published" is the paper's rule as its
            released code carries it out, for comparison.
        learn: "request" also searches the sequence itself; "shared" also what earlier sequences of this drafter have
            said; "off" searches the datastore only, as the paper does. None means "off" with `weighting="published"`,
            which knows nothing else, and "request" otherwise.
        memory: folder of a datastore that is searched too, and to which `save()` adds what was shared; made if need be.
        longest: the longest context that is looked up, in tokens.
        shortest: the shortest; the text itself is searched for contexts of two tokens or more.
        continuation: tokens taken of what follows an occurrence; the depth of a draft.
        samples: occurrences that are looked at in a step, about; spread evenly over all of a context's occurrences.
        doubt: occurrences that are imagined to go on in some other way, at every drafted token but the first.
    """

    store: str = "default"
    weighting: Literal["longest", "backoff", "published"] = "backoff"
    learn: Literal["request", "shared", "off"] | None = None
    memory: str | None = None
    longest: int = 16
    shortest: int = 1
    continuation: int = 10
    samples: int = 256
    doubt: float = 3.0

    def __post_init__(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            UsageError: an unknown choice, or a number outside its range.
        """
        for name, choices in (
            ("weighting", ("longest", "backoff", "published")),
            ("learn", ("request", "shared", "off", None)),
        ):
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(map(str, choices))}.")
        for name, most in (("longest", 64), ("continuation", 64), ("samples", 1 << 16)):
            if not 1 <= getattr(self, name) <= most:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be 1 to {most}.")
        if not 1 <= self.shortest <= self.longest:
            raise UsageError(f"shortest is {self.shortest}; it must be 1 to longest, which is {self.longest}.")
        if not 0 <= self.doubt < float("inf"):
            raise UsageError(f"doubt is {self.doubt}; it must be a number from 0 on.")
        if self.weighting == "published" and self.learn not in ("off", None):
            raise UsageError("weighting='published' searches the datastore only; leave learn out, or give learn='off'.")
        if self.memory is not None and self.learn != "shared":
            raise UsageError('memory keeps what sequences share; give learn="shared" with it.')

    @property
    def learns(self) -> bool:
        """Whether the sequence itself is searched."""
        return self.learn not in ("off", None) or (self.learn is None and self.weighting != "published")


class RestDrafter:
    """The datastore, and what is shared between sequences."""

    name: ClassVar[str] = "rest"
    summary: ClassVar[str] = "Trees of what followed the same context in a datastore and in the text itself (REST)."
    Options = RestOptions
    needs = Needs()
    source_names = ("rest",)

    def __init__(
        self, options: RestOptions, store: Datastore | None, memory: Datastore | None = None, *,
        vocabulary: int = 0, tokenizer_hash: str = "",
    ) -> None:  # fmt: skip
        self.options = options
        self._stores = tuple(each for each in (store, memory) if each is not None)
        self._vocabulary, self._tokenizer_hash = vocabulary, tokenizer_hash
        self.shared = empty_text()
        self.lock = threading.Lock()

    @classmethod
    def create(cls, options: RestOptions, resources: Resources) -> "RestDrafter":
        """Open the datastore, and the memory if one is named and exists.

        Raises:
            StoreError: a store that is damaged or belongs to another tokenizer.
        """
        folder = options.store
        if folder == "default":
            folder = str(resources.default_store()) if resources.default_store is not None else "none"

        def opened(path: str) -> Datastore:
            return open_datastore(path, resources.tokenizer_hash or None, resources.vocabulary)

        memory = options.memory
        return cls(
            options,
            None if folder == "none" else opened(folder),
            opened(memory) if memory is not None and (Path(memory) / MANIFEST).exists() else None,
            vocabulary=resources.vocabulary,
            tokenizer_hash=resources.tokenizer_hash,
        )

    def open(self, context: DraftContext) -> "RestDrafting":
        """Begin drafting for one sequence, with the segments that the store has by now."""
        return RestDrafting(self, self.segments(), context.seed)

    def segments(self) -> list[SuffixArrays]:
        """Return the segments that the stores have by now."""
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

    def save(self, path: str | None = None) -> None:
        """Move what was shared into a datastore: `path`, or the `memory` of the options; made if it does not exist.

        Raises:
            UsageError: nothing is shared, or no path is known.
            StoreError: the store cannot be written, or belongs to another tokenizer.
        """
        path = path or self.options.memory
        if self.options.learn != "shared" or path is None:
            raise UsageError('Only what is shared can be saved: give learn="shared", and a path or memory=PATH.')
        with self.lock:
            text = self.shared.symbols[: int(self.shared.length[0])]
            if not len(text):
                return
            new = not (Path(path) / MANIFEST).exists()
            with DatastoreWriter(
                path, tokenizer_hash=self._tokenizer_hash, vocabulary=self._vocabulary, create=new
            ) as writer:
                separator = writer.manifest.vocabulary
                symbols = np.where((text == END) | (text >= separator), separator, text).astype(symbol_dtype(separator))
                if not writer.holds([symbols]):  # the same requests may have been answered before
                    writer.add([symbols])
                    writer.commit()
            self.shared = empty_text()
            if new and self.options.memory is not None and Path(path) == Path(self.options.memory):
                self._stores = (*self._stores, open_datastore(path))


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


class RestDrafting:
    """One sequence's drafting: where its last tokens occur, and how far each length of context is trusted."""

    def __init__(self, drafter: RestDrafter, segments: Sequence[SuffixArrays], seed: int) -> None:
        self._drafter = drafter
        self._options = options = drafter.options
        self._segments = segments
        self._ranges = np.zeros((len(self._segments), options.longest + 1, 2), np.int64)
        self._own = empty_text()
        self._trust = prior_trust(options.longest, STRENGTH)
        self._asked: tuple[Levels, Rows] | None = None
        self._ids: TokenIds = np.empty(0, np.int64)
        self._seed = seed

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Look up the last tokens, and return the most probable continuations as a tree."""
        self._read_new(view.ids)
        self._asked = None
        if budget.nodes <= 0 or budget.depth <= 0:
            return EMPTY_DRAFT
        depth = min(self._options.continuation, budget.depth)
        if self._options.weighting == "published":
            return self._published(depth, budget.nodes)
        levels, rows = self._retrieved(depth)
        self._asked = (levels, rows)
        return Draft(*best_nodes(rows, budget.nodes, self._options.doubt))

    def observe(self, verdict: Verdict) -> None:
        """Credit the lengths of context with the token that was written."""
        if self._asked is not None and self._options.weighting == "backoff":
            learn_trust(self._trust, *self._asked, verdict.tokens[0])
        self._asked = None

    def close(self) -> None:
        """Forget the sequence, or share it."""
        if self._options.learn == "shared" and len(self._ids):
            self._drafter.share(self._ids)
        self._ids = np.empty(0, np.int64)
        self._own = empty_text(2)
        self._asked = None

    def _read_new(self, ids: TokenIds) -> None:
        new = ids[len(self._ids) :]
        for text, ranges in zip(self._segments, self._ranges, strict=True):
            follow(text, ranges, new[-self._options.longest :])
        if self._options.learns:
            self._own = with_room(self._own, len(new))
            append(self._own, new)
        self._ids = ids

    def _retrieved(self, depth: int) -> tuple[Levels, Rows]:
        """Return what follows the last tokens wherever they occur, `depth` tokens of it."""
        options = self._options
        counts = self._stored_counts()
        context, found = self._ids[-options.longest :], []
        for source, text in self._texts():
            places, lengths = occurrences(text, context, options.longest, options.samples)
            count_lengths(lengths, counts[source])
            found.append((source, text, places, lengths))
        levels = levels_of(counts, options.shortest, options.weighting == "longest")
        if options.weighting == "backoff":
            weigh(levels, self._trust)
        allot(levels, options.samples)
        rows = self._stored(levels, depth)
        for source, text, places, lengths in found:
            gather_from_text(text, source, places, lengths, levels, rows)
        return levels, rows

    def _stored_counts(self) -> npt.NDArray[np.int64]:
        """Return how often each length of context occurs in the datastore, as `levels_of` takes it."""
        counts = np.zeros((3, self._options.longest + 1), np.int64)
        counts[STORE] = (self._ranges[:, :, 1] - self._ranges[:, :, 0]).sum(axis=0)
        return counts

    def _stored(self, levels: Levels, depth: int) -> Rows:
        """Return rows for the levels, those of the datastore filled in."""
        rows = rows_for(levels, depth)
        before = np.zeros(self._options.longest + 1, np.int64)
        for text, ranges in zip(self._segments, self._ranges, strict=True):
            gather_from_store(text, ranges, before, levels, rows)
        return rows

    def _texts(self) -> list[tuple[int, RecentText]]:
        """Return the recent texts that are searched, by source."""
        if not self._options.learns:
            return []
        own = [(OWN, self._own)]
        return own if self._options.learn != "shared" else [*own, (SHARED, self._drafter.shared)]

    def _published(self, depth: int, nodes: int) -> Draft:
        levels = levels_of(self._stored_counts(), self._options.shortest, True)
        levels.occurrences[:] = np.minimum(levels.occurrences, MOST_OCCURRENCES)
        allot(levels, MOST_OCCURRENCES)  # as many rows as occurrences: the first ones in order
        tokens = self._stored(levels, depth).tokens
        if not len(tokens):
            return EMPTY_DRAFT
        tokens = tokens[np.lexsort(tokens.T[::-1])]
        return Draft(*published_tree(tokens, nodes, (self._seed + len(self._ids)) % _SEEDS))


STRENGTH = 20.0
"""Observations that the prior trust counts for."""
_SEEDS = 1 << 62
