"""Auto: one draft from all that is cheap to ask: the text itself, a datastore, a tri-gram table, the target's words.

Long matches in the text and the datastore (as in REST) and low-order counts that learn as the text grows (as in
Adaptix) are blended at every node, each kind trusted as far as it has proved right in this sequence. Knows ids and
arrays; no text, no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, Verdict
from foredraft.drafters import Resources
from foredraft.errors import UsageError
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.backoff import learn_trust, prior_trust, weigh
from foredraft.index.blend import Blended, Counts, blend, foreseen, learn_inner, prior_inner_trust
from foredraft.index.datastore import MANIFEST
from foredraft.index.learned import NO_TOKEN, empty_learned, learn_distributions, read_text, row_contexts, with_room
from foredraft.index.library import Library
from foredraft.index.lookup import Lookup
from foredraft.index.retrieval import OWN, SHARED, STORE, Levels, Rows
from foredraft.index.successors import BLENDED
from foredraft.index.suffix_array import SuffixArrays
from foredraft.index.trigram import TrigramTable, empty_table, open_table


@dataclass(frozen=True, slots=True)
class MixtureOptions:
    """Options of auto. There is seldom a reason to change more than the first four.

    Attributes:
        store: folder of a datastore; "default" uses the one that comes with the model, if any; "none" uses none.
        table: path of a tri-gram table, likewise.
        learn: "request" learns from the sequence itself; "shared" also from what earlier sequences of this drafter have
            said; "off" from neither. None means "shared" where a memory is named, and "request" otherwise.
        memory: folder of a datastore that is searched too, and to which `save()` adds what was shared; made if need be.
        memory_tokens: size of the memory, beyond which its oldest part is forgotten; a token takes 6 bytes or 8.
        longest: the longest context that is looked up, in tokens.
        shortest: the shortest; what is shorter is left to the counts of pairs and single tokens.
        continuation: tokens taken of what follows an occurrence.
        samples: occurrences that are looked at in a step, about.
        depth: deepest node of a draft.
        keep: what older counts of a context are multiplied by when something is learned there.
        feedback_weight: observations that one distribution of the target's own counts for; 0 learns none.
        feedback_top_k: tokens of it that are learned.
    """

    store: str = "default"
    table: str = "default"
    learn: Literal["request", "shared", "off"] | None = None
    memory: str | None = None
    memory_tokens: int = 1 << 24
    longest: int = 16
    shortest: int = 2
    continuation: int = 10
    samples: int = 256
    depth: int = 12
    keep: float = 0.95
    feedback_weight: float = 2.0
    feedback_top_k: int = 6

    def __post_init__(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            UsageError: an unknown choice, or a number outside its range.
        """
        if self.learn not in ("request", "shared", "off", None):
            raise UsageError(f"learn is {self.learn!r}; choose one of request, shared, off.")
        for name, most in (("longest", 64), ("continuation", 64), ("samples", 1 << 16), ("depth", 64)):
            if not 1 <= getattr(self, name) <= most:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be 1 to {most}.")
        if self.memory_tokens < 1:
            raise UsageError(f"memory_tokens is {self.memory_tokens}; it must be at least 1.")
        if not 1 <= self.shortest <= self.longest:
            raise UsageError(f"shortest is {self.shortest}; it must be 1 to longest, which is {self.longest}.")
        if not 0 < self.keep <= 1:
            raise UsageError(f"keep is {self.keep}; it must be above 0 and at most 1.")
        if not 0 <= self.feedback_weight < float("inf"):
            raise UsageError(f"feedback_weight is {self.feedback_weight}; it must be a number from 0 on.")
        if not 1 <= self.feedback_top_k <= 64:
            raise UsageError(f"feedback_top_k is {self.feedback_top_k}; it must be 1 to 64.")
        if self.memory is not None and self.learn not in ("shared", None):
            raise UsageError('memory keeps what sequences share; leave learn out, or give learn="shared" with it.')

    @property
    def shares(self) -> bool:
        """Whether sequences learn from each other."""
        return self.learn == "shared" or (self.learn is None and self.memory is not None)

    @property
    def feeds_back(self) -> bool:
        """Whether the target's own distributions are learned."""
        return self.learn != "off" and self.feedback_weight > 0


class MixtureDrafter:
    """The table, the texts that are searched, and how far each kind of source is trusted."""

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = (
        "Everything cheap in one draft: the text itself, a datastore, tri-grams, the target's words."
    )
    Options = MixtureOptions
    source_names = ("auto, datastore", "auto, own text", "auto, shared text", "auto, counts")

    def __init__(self, options: MixtureOptions, table: TrigramTable, library: Library) -> None:
        self.options = options
        self.table = table
        self.library = library
        self.needs = Needs(top_k=options.feedback_top_k if options.feeds_back else 0)
        self.trust = prior_trust(options.longest, _STRENGTH, _PRIOR)
        self.inner = prior_inner_trust(_STRENGTH)

    @classmethod
    def create(cls, options: MixtureOptions, resources: Resources) -> "MixtureDrafter":
        """Open the table, the datastore, and the memory if one is named and exists.

        Raises:
            StoreError: one that is damaged or belongs to another tokenizer.
        """
        library = Library(vocabulary=resources.vocabulary, tokenizer_hash=resources.tokenizer_hash)
        store, table = options.store, options.table
        if store == "default":
            store = str(resources.default_store()) if resources.default_store is not None else "none"
        if table == "default":
            table = str(resources.default_table()) if resources.default_table is not None else "none"
        if store != "none":
            library.open(store)
        if options.memory is not None and (Path(options.memory) / MANIFEST).exists():
            library.open(options.memory)
        if table == "none":
            opened = empty_table(resources.vocabulary)
        else:
            opened = open_table(table, resources.tokenizer_hash or None, resources.vocabulary)
        return cls(options, opened, library)

    def open(self, context: DraftContext) -> "MixtureDrafting":
        """Begin drafting for one sequence, with what the stores hold by now."""
        return MixtureDrafting(self, self.library.segments(), context.vocabulary)

    def save(self, path: str | None = None) -> None:
        """Move what was shared into a datastore: `path`, or the `memory` of the options; made if it does not exist.

        Raises:
            UsageError: nothing is shared, or no path is known.
            StoreError: the store cannot be written, or belongs to another tokenizer.
        """
        path = path or self.options.memory
        if not self.options.shares or path is None:
            raise UsageError('Only what is shared can be saved: give learn="shared", and a path or memory=PATH.')
        memory = self.options.memory
        adopt = memory is not None and Path(path) == Path(memory)
        self.library.save(path, adopt=adopt, most_tokens=self.options.memory_tokens)


class MixtureDrafting:
    """One sequence's drafting: where its last tokens occur, what it has taught, and what has proved right in it."""

    def __init__(self, drafter: MixtureDrafter, segments: Sequence[SuffixArrays], vocabulary: int) -> None:
        self._drafter = drafter
        self._options = options = drafter.options
        self._vocabulary = vocabulary
        self._lookup = Lookup(segments, options.longest, own=options.learn != "off")
        self._trust = type(drafter.trust)(*(each.copy() for each in drafter.trust))
        self._inner = type(drafter.inner)(*(each.copy() for each in drafter.inner))
        self._learned = empty_learned()
        self._asked: tuple[Levels, Rows, Blended] | None = None

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Look up the last tokens, and return the most probable continuations as a tree."""
        options, ids = self._options, view.ids
        if options.learn != "off":
            self._learned = read_text(self._learned, ids, len(self._lookup.ids), options.keep)
        self._lookup.read(ids)
        self._asked = None
        if budget.nodes <= 0 or budget.depth <= 0:
            return EMPTY_DRAFT
        depth = min(options.depth, budget.depth)
        shared = self._drafter.library.shared if options.shares else None
        levels = self._lookup.levels(shared, options.samples, options.shortest)
        weigh(levels, self._trust)
        rows = self._lookup.rows(levels, options.samples, min(options.continuation, depth))
        made = blend(rows, levels, self._inner, self._counts(), *self._last(), budget.nodes, depth, self._vocabulary)
        self._asked = (levels, rows, made)
        return Draft(made.tokens, made.parents, made.score, source=made.source)

    def observe(self, verdict: Verdict) -> None:
        """Credit what foresaw the written tokens, then learn the target's own distributions, if asked for."""
        if self._asked is not None:
            levels, rows, made = self._asked
            counts, (before, root), tokens = self._counts(), self._last(), np.array(verdict.tokens, np.int64)
            learn_trust(self._trust, levels, rows, verdict.tokens[0], foreseen(counts, before, root, verdict.tokens[0]))
            learn_inner(self._inner, made, rows, counts, root, tokens)
        self._asked = None
        if self._options.feeds_back and verdict.top_tokens is not None and verdict.top_probabilities is not None:
            self._learn_distributions(verdict, verdict.top_tokens, verdict.top_probabilities)

    def close(self) -> None:
        """Forget the sequence, or share it."""
        if self._options.shares and len(self._lookup.ids):
            self._drafter.library.share(self._lookup.ids)
        self._lookup = Lookup((), self._options.longest, own=False)
        self._learned = empty_learned(2)
        self._asked = None

    def _counts(self) -> Counts:
        return Counts(self._drafter.table.arrays, self._learned, _BEHIND_ROWS)

    def _last(self) -> tuple[int, int]:
        """Return the last two tokens."""
        ids = self._lookup.ids
        return (int(ids[-2]) if len(ids) > 1 else NO_TOKEN), int(ids[-1])

    def _learn_distributions(self, verdict: Verdict, tokens: IntArray, probabilities: FloatArray) -> None:
        ids, draft, rows = self._lookup.ids, verdict.draft, verdict.top_rows
        if not len(ids):
            return
        rows = np.arange(len(draft) + 1, dtype=np.int32) if rows is None else rows
        contexts = row_contexts(draft.tokens, draft.parents, rows, *self._last())
        self._learned = with_room(self._learned, len(contexts))
        learn_distributions(
            self._learned, contexts, tokens, probabilities, self._options.feedback_weight, self._options.keep
        )


_STRENGTH = 20.0
"""Observations that the prior trust counts for."""
_PRIOR = {STORE: (-2.1, -0.13, 0.37, -0.08), OWN: (-0.33, 0.37, 0.72, 0.46), SHARED: (-2.1, -0.13, 0.37, -0.08)}
"""Log-odds of trust as in `foredraft.index.backoff.PRIOR`, where counts stand behind the rows. Fitted on every other
recorded answer; see docs/log.md."""
_BEHIND_ROWS = BLENDED._replace(table_pair=30.0)
"""What rows leave over, the table has often seen too, so it counts for less than alone."""
