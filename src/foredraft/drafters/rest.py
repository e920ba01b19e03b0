"""REST: drafts retrieved from a datastore and from the sequence itself.

He et al., "REST: Retrieval-Based Speculative Decoding" (NAACL 2024), section 3. Needs no model and no training, but
a datastore of texts like yours (`foredraft index build`).

`auto` searches the same texts with shorter contexts too. Does not depend on text or models.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, Verdict
from foredraft.drafters import Resources
from foredraft.errors import UsageError
from foredraft.index.library import Library, open_library
from foredraft.index.recent_text import NO_TEXT, add, empty_text, with_room
from foredraft.index.retrieval import best_nodes, followers
from foredraft.index.suffix_array import follow
from foredraft.options import check_range


@dataclass(frozen=True, slots=True)
class RestOptions:
    """Options of REST. The paper's settings (section 4.1): learn="off", shortest=2, doubt=0."""

    store: str = "default"  # folder of a datastore; "default" uses the standard library's; "none" uses none
    # "request" also searches the sequence itself; "off" only the datastore, as the paper does
    learn: Literal["request", "off"] = "request"
    longest: int = 16  # tokens of the longest context searched
    shortest: int = 1  # tokens of the shortest context; in the text itself, at least two
    continuation: int = 10  # tokens taken after an occurrence; the depth of a draft
    samples: int = 256  # occurrences read per step, spread evenly over all occurrences of the context
    doubt: float = 3.0  # pseudo-count of other continuations at every drafted token but the first

    def __post_init__(self) -> None:
        check_range(self, "longest", "continuation", least=1, most=64)
        check_range(self, "samples", least=1, most=1 << 16)
        if not 1 <= self.shortest <= self.longest:
            raise UsageError(f"shortest is {self.shortest}; it must be 1 to longest, which is {self.longest}.")
        if not 0 <= self.doubt < float("inf"):
            raise UsageError(f"doubt is {self.doubt}; it must be a number from 0 on.")


class RestDrafter:
    """The datastore, which all sequences search."""

    name: ClassVar[str] = "rest"
    summary: ClassVar[str] = (
        "Trees of the continuations of the same context in a datastore and in the text itself (REST)."
    )
    Options = RestOptions
    needs = Needs(every_step=False)
    source_names = ("rest",)

    def __init__(self, options: RestOptions, library: Library) -> None:
        self.options = options
        self.library = library

    @classmethod
    def create(cls, options: RestOptions, resources: Resources) -> "RestDrafter":
        """Open the datastore; raises what `open_library` does."""
        own = (resources.vocabulary, resources.tokenizer_hash)
        return cls(options, open_library(options.store, resources.default_store, *own))

    def open(self, _context: DraftContext) -> "_Drafting":
        return _Drafting(self)


class _Drafting:
    """One sequence's drafting: its text so far, and the occurrences of its last tokens in the store."""

    def __init__(self, drafter: RestDrafter) -> None:
        self._options = drafter.options
        self._segments = drafter.library.segments()
        self._ranges = np.zeros((len(self._segments), self._options.longest + 1, 2), np.int64)
        self._own = empty_text() if self._options.learn == "request" else NO_TEXT
        self._read = 0

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        options = self._options
        if budget.nodes <= 0 or budget.depth <= 0:
            return EMPTY_DRAFT  # new tokens are read later: many at once are faster
        new, context = view.ids[self._read :], view.ids[-options.longest :]
        for text, ranges in zip(self._segments, self._ranges, strict=True):
            follow(text, ranges, context, len(new))
        if options.learn == "request":
            self._own = with_room(self._own, len(new))
            add(self._own, new)
        self._read = len(view.ids)
        depth = min(options.continuation, budget.depth)
        rows = followers(self._segments, self._ranges, self._own, context, options.shortest, options.samples, depth)
        return Draft(*best_nodes(rows, budget.nodes, options.doubt)) if len(rows) else EMPTY_DRAFT

    def observe(self, verdict: Verdict) -> None:
        """Learn nothing; `propose` reads the text."""

    def close(self) -> None:
        self._segments, self._ranges, self._own = [], self._ranges[:0], NO_TEXT
