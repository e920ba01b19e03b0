"""REST: drafts retrieved from a datastore, from the sequence itself, and from what other sequences have shared.

He et al., "REST: Retrieval-Based Speculative Decoding" (NAACL 2024), section 3. `weighting="longest"` is the paper's
rule; "backoff", which asks shorter contexts too, is this project's. Knows ids and arrays; no text, no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, TokenIds, Verdict
from foredraft.drafters import Resources
from foredraft.errors import UsageError
from foredraft.index.backoff import UNFORESEEN, learn_trust, prior_trust
from foredraft.index.library import NOTHING_TO_SAVE, Library, open_library
from foredraft.index.lookup import Lookup, Question
from foredraft.index.prefixes import best_nodes
from foredraft.index.published import MOST_OCCURRENCES, published_tree
from foredraft.index.retrieval import Levels, Rows, allot, levels_of
from foredraft.index.suffix_array import SuffixArrays


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
    source_names = ("rest",)

    def __init__(self, options: RestOptions, library: Library) -> None:
        self.options = options
        self.library = library
        self.needs = Needs(every_step=options.learn == "shared")  # what is shared is the whole text

    @classmethod
    def create(cls, options: RestOptions, resources: Resources) -> "RestDrafter":
        """Open the datastore, and the memory if one is named and exists.

        Raises:
            StoreError: a store that is damaged or belongs to another tokenizer.
        """
        own = (resources.default_store, resources.vocabulary, resources.tokenizer_hash)
        return cls(options, open_library(options.store, options.memory, *own))

    def open(self, context: DraftContext) -> "RestDrafting":
        """Begin drafting for one sequence, with the segments that the store has by now."""
        return RestDrafting(self, self.library.segments(), context.seed)

    @property
    def saves(self) -> bool:
        """Whether a memory was named."""
        return self.options.memory is not None

    def forget(self) -> None:
        """Forget texts that were shared and not saved."""
        self.library.forget()

    def save(self, path: str | None = None) -> None:
        """Move what was shared into a datastore: `path`, or the `memory` of the options; made if it does not exist.

        Raises:
            UsageError: nothing is shared, or no path is known.
            StoreError: the store cannot be written, or belongs to another tokenizer.
        """
        if self.options.learn != "shared":
            raise UsageError(NOTHING_TO_SAVE)
        self.library.save(path, self.options.memory)


class RestDrafting:
    """One sequence's drafting: where its last tokens occur, and how far each length of context is trusted."""

    def __init__(self, drafter: RestDrafter, segments: Sequence[SuffixArrays], seed: int) -> None:
        self._library = drafter.library
        self._options = options = drafter.options
        self._lookup = Lookup(segments, options.longest, own=options.learns)
        self._trust = prior_trust(options.longest, STRENGTH)
        self._asked: tuple[Levels, Rows] | None = None
        self._ids: TokenIds = np.empty(0, np.int64)
        self._seed = seed

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Look up the last tokens, and return the most probable continuations as a tree."""
        self._ids, self._asked = view.ids, None
        if budget.nodes <= 0 or budget.depth <= 0:
            return EMPTY_DRAFT  # and nothing is read: plain steps cost nothing here, and reading many tokens is quicker
        self._lookup.read(self._ids)
        depth = min(self._options.continuation, budget.depth)
        if self._options.weighting == "published":
            return self._published(depth, budget.nodes)
        levels, rows = self._retrieved(depth)
        self._asked = (levels, rows)
        return Draft(*best_nodes(rows, budget.nodes, self._options.doubt))

    def observe(self, verdict: Verdict) -> None:
        """Credit the lengths of context with the token that was written."""
        if self._asked is not None and self._options.weighting == "backoff":
            learn_trust(self._trust, *self._asked, verdict.tokens[0], UNFORESEEN)
        self._asked = None

    def close(self) -> None:
        """Forget the sequence, or share it."""
        if self._options.learn == "shared" and len(self._ids):
            self._library.share(self._ids)
        self._lookup = Lookup((), self._options.longest, own=False)
        self._asked = None
        self._ids = np.empty(0, np.int64)

    def _retrieved(self, depth: int) -> tuple[Levels, Rows]:
        """Return what follows the last tokens wherever they occur, `depth` tokens of it."""
        options = self._options
        shared = self._library.shared if options.learn == "shared" else None
        longest, backs_off = options.weighting == "longest", options.weighting == "backoff"
        asked = Question(options.shortest, longest, backs_off, options.samples, depth)
        return self._lookup.ask(shared, self._trust, asked)

    def _published(self, depth: int, nodes: int) -> Draft:
        levels = levels_of(self._lookup.stored_counts(), self._options.shortest, True)
        levels.occurrences[:] = np.minimum(levels.occurrences, MOST_OCCURRENCES)
        allot(levels, MOST_OCCURRENCES)  # as many rows as occurrences: the first ones in order
        tokens = self._lookup.stored_rows(levels, depth).tokens
        if not len(tokens):
            return EMPTY_DRAFT
        tokens = tokens[np.lexsort(tokens.T[::-1])]
        return Draft(*published_tree(tokens, nodes, (self._seed + len(self._ids)) % _SEEDS))


STRENGTH = 20.0
"""Observations that the prior trust counts for."""
_SEEDS = 1 << 62
