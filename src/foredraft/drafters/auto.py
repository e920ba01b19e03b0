"""Auto: one draft from all cheap sources: the target's earlier distributions, the text itself, a table, a datastore.

Each candidate's probability is the rate at which similar candidates were accepted, learned across texts. Needs nothing;
a datastore of texts like yours helps (`foredraft index build`).

Does not depend on text or the target, nor on which neural drafter is blended in.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from foredraft.contracts import (
    EMPTY_DRAFT,
    NO_BUDGET,
    TOP,
    Budget,
    Draft,
    DraftContext,
    Drafter,
    Drafting,
    Learner,
    Needs,
    SequenceView,
    TokenIds,
    Verdict,
)
from foredraft.control.payoff import scores_of
from foredraft.control.worth import Worth
from foredraft.drafters import Resources, make_drafter, parse_options
from foredraft.errors import ForedraftWarning, UsageError, is_interrupt, told
from foredraft.index.blend import NO_TOP_TOKENS, Noise, Rates, TopTokens, advance, prior_rates
from foredraft.index.datastore import MANIFEST, WORDS_FILE
from foredraft.index.library import Library, open_library
from foredraft.index.own_words import (
    NO_WORDS,
    OwnWords,
    empty_words,
    enlarged,
    load_words,
    save_words,
    words_of_table,
)
from foredraft.index.recent_text import NO_TEXT, empty_text, with_room
from foredraft.index.retrieval import StoredRows
from foredraft.index.sources import NEURAL, NO_NEURAL_DRAFT, NO_ROWS, NeuralDraft, Rows, Sources, room_to_draft
from foredraft.index.trigram import open_named_table
from foredraft.model.mtp import mtp_tensors
from foredraft.model.target import loaded_target
from foredraft.options import check_range, shown, user_path

T = TypeVar("T")

_DEFAULT = "default"  # as the option `drafter`
# tokens of a text after which own words may get more room; at 7 nodes they take a tenth of it meanwhile; chosen
_ENLARGED_EVERY = 512


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """Options of auto."""

    # path of a tri-gram table; "default" uses the one of the model, or else one of Python's standard library; "none"
    # uses none
    table: str = "default"
    store: str = "none"  # folder of a datastore whose texts are searched too; "default" uses the standard library's
    # what is kept across requests. None: the target's next-token distributions by its last tokens ("own words"), but no
    # text; "request": nothing; "shared": own words and texts; "off": nothing is learned at all
    learn: Literal["request", "shared", "off"] | None = None
    # folder of own words and texts, created if missing. `save()` writes it; it implies "shared"
    memory: str | None = None
    # tokens of its texts, above which the oldest are dropped; a token takes 6 or 8 bytes
    memory_tokens: int = 16_777_216
    model: Any = None  # a draft model, as in `draft_model`, blended in while it is worth its time; None for none
    # another drafter blended in the same way: a method's name, or a mapping of `method` and its options, such as
    # "medusa" or {"method": "eesd", "out_degree": 3}; "default" for what comes with the target; None for none
    drafter: Any = None
    levels: int = 4  # levels that the model or drafter drafts per step at most
    depth: int = 16  # depth of a draft at most

    def __post_init__(self) -> None:
        check_range(self, "depth", "levels", least=1, most=64)
        check_range(self, "memory_tokens", least=1)
        if self.memory is not None and self.learn not in ("shared", None):
            raise UsageError('memory keeps shared texts; leave learn out, or give learn="shared" with it.')
        if None not in (self.model, self.drafter):
            raise UsageError("model and drafter both name a drafter to blend in; give one of them.")
        if self.drafter in (None, _DEFAULT):
            return
        method = self.drafter.get("method") if isinstance(self.drafter, Mapping) else self.drafter
        if not isinstance(method, str) or method in ("auto", "none"):
            raise UsageError(
                f'drafter is {shown(self.drafter)}; give the name of a method to blend in, such as "medusa", or a '
                'mapping such as {"method": "eesd", "out_degree": 3}.'
            )
        assert self.blends is not None
        parse_options(*self.blends)

    @property
    def blends(self) -> tuple[str, dict[str, Any]] | None:
        """The blended method and its options; None for none, and for what comes with the target."""
        if self.model is not None:
            return "draft_tree", {"model": self.model, "out_degree": 3, "levels": self.levels}
        if self.drafter in (None, _DEFAULT):
            return None
        options = {"method": self.drafter} if isinstance(self.drafter, str) else dict(self.drafter)
        return options.pop("method"), options

    @property
    def shares(self) -> bool:
        """Whether texts are shared between requests."""
        return self.learn == "shared" or (self.learn is None and self.memory is not None)


@dataclass(slots=True)
class _Kept:
    """Own words that one sequence uses, or several at once; replaced by larger ones."""

    words: OwnWords


class AutoDrafter:
    """The sources, and what sequences taught.

    Raises UsageError for a neural drafter that needs the target's top tokens or must see every step.
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = (
        "All cheap sources in one draft: the target's own words, the text itself, a table, a datastore."
    )
    Options = AutoOptions
    source_names: Sequence[str] = (
        "auto, three tokens", "auto, two tokens", "auto, one token", "auto, own text", "auto, shared text",
        "auto, datastore", "auto, draft model",
    )  # fmt: skip

    def __init__(
        self, options: AutoOptions, table: OwnWords, library: Library, neural: Drafter | None = None
    ) -> None:  # fmt: skip
        self.options, self.table, self.library, self.neural = options, table, library, neural
        self.kept = _Kept(self._saved_words())
        self.rates: Mapping[bool, Rates] = {sampled: prior_rates(sampled=sampled) for sampled in (False, True)}
        self.worth = {sampled: Worth() for sampled in (False, True)}  # of the neural drafter in the last text
        self.needs = Needs(top_k=0 if options.learn == "off" else TOP, every_step=options.shares)
        if neural is not None:
            asked = neural.needs
            if asked.top_k:
                raise UsageError(
                    f"Method {neural.name!r} learns from the target's tokens after its own drafts, and auto mixes them "
                    "with others; blend in a method that drafts with a model, such as eesd, medusa or layer_skip."
                )
            if asked.every_step:
                raise UsageError(
                    f"Method {neural.name!r} must see every step, and auto shows it only those in which it drafts; "
                    "blend in a method that catches up by itself and declares Needs(every_step=False)."
                )
            self.needs = replace(self.needs, hidden=asked.hidden, keys=asked.keys, models=asked.models)
            if options.model is None:
                self.source_names = (*self.source_names[:NEURAL], f"auto, {neural.name}")

    @classmethod
    def create(cls, options: AutoOptions, resources: Resources) -> "AutoDrafter":
        """Open the table, the datastore and, if it exists, the memory; make the neural drafter.

        Raises StoreError for a file that is damaged or of another tokenizer, and UsageError if the neural drafter
        cannot be made or blended in.
        """
        own = (resources.vocabulary, resources.tokenizer_hash)
        library = open_library(
            options.store, resources.default_store, *own, memory=options.memory, memory_tokens=options.memory_tokens
        )
        # checked, as compiled code reads it without checking bounds
        table = words_of_table(open_named_table(options.table, resources.default_table, *own, check=True))
        blends = options.blends
        if options.drafter == _DEFAULT and resources.target is not None:
            target = loaded_target(resources.target, cls.name, "with what comes with the target")
            blends = ("mtp", {}) if mtp_tensors(target.outline.config) else None
        neural = None if blends is None else make_drafter(*blends, resources)
        return cls(options, table, library, neural)

    def open(self, context: DraftContext) -> "_Drafting":
        self.kept.words = enlarged(self.kept.words)
        return _Drafting(self, context)

    def forget(self) -> None:
        """Drop what sequences taught and was not saved: own words, rates, the neural drafter's worth, shared texts.

        Raises StoreError if the own words in the memory cannot be read again.
        """
        self.kept = _Kept(self._saved_words())  # open sequences keep the old ones
        self.rates = {sampled: prior_rates(sampled=sampled) for sampled in (False, True)}
        self.worth = {sampled: Worth() for sampled in (False, True)}
        self.library.forget()
        if self.neural is not None and isinstance(self.neural, Learner):
            self.neural.forget()

    def _saved_words(self) -> OwnWords:
        """Return the own words in the memory, or none."""
        path = None if self.options.memory is None else user_path(self.options.memory) / WORDS_FILE
        return load_words(path, self.library.identity[0]) if path is not None and path.exists() else empty_words()

    def save(self) -> None:
        """Write own words and move shared texts to the `memory` of the options; raises what `Library.save` does."""
        if self.options.memory is None:
            return
        folder = user_path(self.options.memory)
        self.library.save(folder, self.options.memory_tokens)
        if (folder / MANIFEST).is_file() and self.kept.words.clock[0]:
            save_words(folder / WORDS_FILE, self.kept.words, *self.library.identity)


class _Drafting:
    """One sequence's drafting: its text so far, and the occurrences of its last tokens."""

    def __init__(self, drafter: AutoDrafter, context: DraftContext) -> None:
        self._drafter, self._options, self._vocabulary = drafter, drafter.options, context.vocabulary
        sampled = bool(context.settings.get("do_sample", False))
        self._kept, self._rates = drafter.kept, drafter.rates[sampled]
        self._learns_on = self._options.learn not in ("request", "off")  # from text to text
        if not self._learns_on:
            self._kept = _Kept(NO_WORDS if self._options.learn == "off" else empty_words())
            self._rates = Rates(*(each.copy() for each in self._rates))
        self._began = int(self._kept.words.clock[0])
        self._learns = self._options.learn != "off"
        self._own = empty_text() if self._learns else NO_TEXT
        self._stored = StoredRows(drafter.library.segments())
        self._room = room_to_draft(max(context.max_nodes, 1))
        self._noise = Noise(known=sampled, seed=np.uint64(context.seed))
        self._neural: Drafting | None = None
        # the neural drafter drafts while it is worth its time
        self._worths = drafter.worth  # `forget` makes another, which this sequence does not fill
        self._sampled, self._worth = sampled, drafter.worth[sampled].following() if self._learns_on else Worth()
        if (neural := drafter.neural) is not None:
            self._neural = self._guarded(lambda: neural.open(context))
        self._ids: TokenIds = np.empty(0, np.int64)
        self._emitted: tuple[int, ...] = ()  # tokens behind these, of the last step
        self._read = 0  # length of the text at the last draft
        self._top = NO_TOP_TOKENS

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        self._ids, self._emitted = view.ids, ()
        if budget.nodes <= 0 or budget.depth <= 0:
            return EMPTY_DRAFT  # new tokens are read later: many at once are faster
        rows = self._stored.read(view.ids, len(view.ids) - self._read)
        neural, proposed = self._neural, NO_NEURAL_DRAFT
        if neural is not None and self._worth.begins():
            proposed = self._guarded(lambda: self._proposed(neural, view, budget)) or NO_NEURAL_DRAFT
        if not len(proposed.tokens):
            return self._advance(rows, proposed, budget)
        otherwise = self._advance(rows, NO_NEURAL_DRAFT, budget)
        draft = self._advance(rows, proposed, budget)
        if draft.score is not None and otherwise.score is not None:
            self._worth.compare(draft.score, otherwise.score)
        return draft

    def _proposed(self, neural: Drafting, view: SequenceView, budget: Budget) -> NeuralDraft:
        """Return the neural drafter's draft; raises ValueError if it is not a tree of tokens."""
        # `levels` limits its depth: the control cuts the blended draft
        draft = neural.propose(view, Budget(budget.nodes, min(budget.depth, self._options.levels)))
        draft.check()
        self._worth.answered()
        return NeuralDraft(draft.tokens, draft.parents, scores_of(draft))

    def _advance(self, rows: Rows, proposed: NeuralDraft, budget: Budget) -> Draft:
        drafter, ids = self._drafter, self._ids
        if self._learns:
            self._own = with_room(self._own, len(ids) - self._read)
            if len(ids) // _ENLARGED_EVERY > self._read // _ENLARGED_EVERY:
                self._kept.words = enlarged(self._kept.words)
        shared = drafter.library.shared if self._options.shares else NO_TEXT
        sources = Sources(self._kept.words, self._began, drafter.table, self._own, shared, rows, proposed)
        nodes = min(budget.nodes, len(self._room.drafted))
        size = (nodes, min(self._options.depth, budget.depth), self._vocabulary)
        tokens, parents, score, source = advance(
            sources, self._rates, self._room, ids, self._read, self._top, size, self._noise, self._learns
        )
        self._read, self._top = len(ids), NO_TOP_TOKENS
        return Draft(tokens, parents, score, source=source) if len(tokens) else EMPTY_DRAFT

    def observe(self, verdict: Verdict) -> None:
        """Keep the target's top tokens after each row, to learn them with the next draft."""
        self._emitted = verdict.tokens
        if len(self._ids) != self._read:
            return
        top, chances = verdict.top_tokens, verdict.top_probabilities
        if top is not None and chances is not None:
            self._top = TopTokens(verdict.draft.tokens, verdict.draft.parents, top, chances)
        if (neural := self._neural) is not None:
            unnamed = replace(verdict.draft, source=None)  # the source numbers are those of auto
            shown = Verdict(verdict.tokens, verdict.path, unnamed, verdict.at)
            self._guarded(lambda: neural.observe(shown))
            self._worth.ends(len(verdict.tokens), len(verdict.draft))

    def _guarded(self, ask: Callable[[], T]) -> T | None:
        """Call the neural drafter, the only source whose code may raise; if it does, warn and continue without it."""
        try:
            return ask()
        except Exception as error:  # whatever it is, the other sources can draft
            if is_interrupt(error):
                raise KeyboardInterrupt from error
            neural, self._neural = self._neural, None
            if neural is not None:
                neural.close()
            warnings.warn(
                f"The source {self._drafter.source_names[NEURAL]!r} failed ({told(error)}), so the rest of this text "
                "is drafted without it; the text is the same.",
                ForedraftWarning,
                stacklevel=3,
            )
            return None

    def close(self) -> None:
        if self._options.shares and len(self._ids):
            self._drafter.library.share(np.append(self._ids, np.array(self._emitted, np.int64)))
        if len(self._top.best):
            self._advance(NO_ROWS, NO_NEURAL_DRAFT, NO_BUDGET)
        self._own, self._stored, self._learns = NO_TEXT, StoredRows(()), False
        self._ids, self._read = np.empty(0, np.int64), 0
        if self._neural is not None:
            self._neural.close()
            if self._learns_on:
                self._worths[self._sampled] = self._worth
