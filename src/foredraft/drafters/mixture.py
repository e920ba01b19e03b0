"""Auto: one draft from all that is cheap to ask: the text itself, a datastore, a tri-gram table, the target's words.

Long matches in the text and the datastore (as in REST) and low-order counts that learn as the text grows (as in
Adaptix) are blended at every node, each kind trusted as far as it has proved right in this sequence. Knows ids and
arrays, and a draft model where one is named; no text, no target.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, TokenIds, Verdict
from foredraft.control.trial import Trial
from foredraft.drafters import Resources
from foredraft.errors import ForedraftWarning, UsageError, told
from foredraft.index.backoff import UNFORESEEN, prior_trust
from foredraft.index.blender import Blender, Foreseen
from foredraft.index.copied import copied
from foredraft.index.library import NOTHING_TO_SAVE, Library, open_library
from foredraft.index.retrieval import OWN, SHARED, STORE
from foredraft.index.successors import BLENDED
from foredraft.index.suffix_array import SuffixArrays
from foredraft.index.trigram import TrigramTable, open_named_table
from foredraft.index.workspace import BlenderOptions
from foredraft.model.candidates import Imitation
from foredraft.model.foresight import Foresight, paths_of
from foredraft.model.growth import GrowthRules


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
        model: a draft model whose foresight is blended in while it is worth its time, as `draft_model` takes it; None
            for none.
        levels: tokens deep that it is asked at a step, a pass each.
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
    model: Any = None
    levels: int = 4
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
        for name, most in (
            ("longest", 64), ("continuation", 64), ("samples", 1 << 16), ("depth", 64), ("levels", 64)
        ):  # fmt: skip
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

    def blended(self) -> BlenderOptions:
        """Return what of them the blending takes."""
        weight = self.feedback_weight if self.feeds_back else 0.0
        lookup = (self.longest, self.shortest, self.samples, self.continuation)
        return BlenderOptions(*lookup, self.learn != "off", self.keep, weight, _BEHIND_ROWS)


class MixtureDrafter:
    """The table, the texts that are searched, and a draft model if one was named."""

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = (
        "Everything cheap in one draft: the text itself, a datastore, tri-grams, the target's words."
    )
    Options = MixtureOptions
    source_names = ("auto, datastore", "auto, own text", "auto, shared text", "auto, draft model", "auto, counts")

    def __init__(self, options: MixtureOptions, table: TrigramTable, library: Library, model: Any = None) -> None:
        self.options = options
        self.table = table
        self.library = library
        self.model = model
        top_k = options.feedback_top_k if options.feeds_back else 0
        quick = options.learn != "off"  # copies are of the sequence itself
        self.needs = Needs(top_k=top_k, every_step=options.shares, quick=quick)  # what is shared is the whole text

    @classmethod
    def create(cls, options: MixtureOptions, resources: Resources) -> "MixtureDrafter":
        """Open the table, the datastore, and the memory if one is named and exists.

        Raises:
            StoreError: one that is damaged or belongs to another tokenizer.
        """
        own = (resources.vocabulary, resources.tokenizer_hash)
        library = open_library(options.store, options.memory, resources.default_store, *own)
        table = open_named_table(options.table, resources.default_table, *own)
        model = None
        if options.model is not None:
            if resources.draft_model is None:
                raise UsageError("There is no target here that a draft model could be loaded for; leave model out.")
            model = resources.draft_model(options.model)
        return cls(options, table, library, model)

    def open(self, context: DraftContext) -> "MixtureDrafting":
        """Begin drafting for one sequence, with what the stores hold by now."""
        return MixtureDrafting(self, self.library.segments(), context)

    def blender(self, segments: Sequence[SuffixArrays]) -> Blender:
        """Return the memory of one sequence, which searches these segments."""
        trust = prior_trust(self.options.longest, _STRENGTH, _PRIOR)
        return Blender(segments, self.table.arrays, trust, self.options.blended(), _STRENGTH)

    def save(self, path: str | None = None) -> None:
        """Move what was shared into a datastore: `path`, or the `memory` of the options; made if it does not exist.

        Raises:
            UsageError: nothing is shared, or no path is known.
            StoreError: the store cannot be written, or belongs to another tokenizer.
        """
        if not self.options.shares:
            raise UsageError(NOTHING_TO_SAVE)
        self.library.save(path, self.options.memory, self.options.memory_tokens)


class MixtureDrafting:
    """One sequence's drafting: where its last tokens occur, what it has taught, and what has proved right in it."""

    def __init__(self, drafter: MixtureDrafter, segments: Sequence[SuffixArrays], context: DraftContext) -> None:
        self._drafter = drafter
        self._options = options = drafter.options
        self._vocabulary = context.vocabulary
        self._model = None if drafter.model is None else _DraftModel(drafter.model, options.levels, context)
        self._blender: Blender | None = drafter.blender(segments)
        self._ids: TokenIds = np.empty(0, np.int64)

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Look up the last tokens, and return the most probable continuations as a tree."""
        self._ids = view.ids
        if budget.quick:
            return copied(view.ids, _OWN_TEXT[: min(budget.nodes, budget.depth)])
        if budget.nodes <= 0 or budget.depth <= 0 or self._blender is None:
            return EMPTY_DRAFT  # and nothing is read: plain steps cost nothing here, and reading many tokens is quicker
        depth = min(self._options.depth, budget.depth)
        shared = self._drafter.library.shared if self._options.shares else None
        if self._model is None:
            return self._blender.propose(self._ids, shared, budget.nodes, depth, self._vocabulary)
        self._blender.ask(self._ids, shared, depth)
        foreseen = self._foreseen(self._model, budget, self._blender.reach(depth))
        if foreseen is not None:
            self._blender.foresee(foreseen)
        return self._blender.draft(budget.nodes, depth, self._vocabulary)

    def observe(self, verdict: Verdict) -> None:
        """Credit what foresaw the written tokens, then learn the target's own distributions, if asked for."""
        if self._blender is None:
            return
        others = self._blender.learn(self._ids, verdict)
        if self._model is not None and others is not None:
            try:
                self._model.learn(verdict.tokens, others)
            except Exception as error:  # noqa: BLE001  # whatever it is, the other sources can draft
                self._leave_out(self._model, error)

    def _foreseen(self, model: "_DraftModel", budget: Budget, depth: int) -> Foreseen | None:
        try:
            return model.foresee(self._ids, budget, depth)
        except Exception as error:  # noqa: BLE001  # as above
            self._leave_out(model, error)
            return None

    def _leave_out(self, model: "_DraftModel", error: Exception) -> None:
        """Go on without the draft model, the one source that runs code which can raise."""
        self._model = None
        model.close()
        warnings.warn(
            f"The draft model failed ({told(error)}), so auto drafts the rest of this text without it; it is the same "
            "text.",
            ForedraftWarning,
            stacklevel=2,
        )

    def close(self) -> None:
        """Forget the sequence, or share it."""
        if self._options.shares and len(self._ids):
            self._drafter.library.share(self._ids)
        self._blender = None  # and with it the memory
        self._ids = np.empty(0, np.int64)
        if self._model is not None:
            self._model.close()


class _DraftModel:
    """A draft model behind one sequence: asked while that is worth its time, and trusted as far as it proves right."""

    def __init__(self, model: Any, levels: int, context: DraftContext) -> None:
        imitation = dataclasses.replace(Imitation.of(context.settings, context.seed, context.vocabulary), draws=False)
        rules = GrowthRules(out_degree=3, most_levels=levels)
        self._foresight = Foresight(model, rules, imitation, context.max_nodes)
        self._trial = Trial()
        self._hits, self._passes = _STRENGTH * _FORESIGHT, _STRENGTH * (1 - _FORESIGHT)
        self._foreseen: Foreseen | None = None

    def foresee(self, ids: TokenIds, budget: Budget, depth: int) -> Foreseen | None:
        """Return what the model foresees, `depth` tokens deep; None where it is not asked."""
        self._foreseen = None
        whole = Budget(budget.nodes, budget.depth)  # the control is not asked: it cuts what comes of all sources
        grown = self._foresight.grow(ids, whole) if self._trial.begins() else None
        if grown is not None:
            self._foreseen = Foreseen(*paths_of(grown, depth), self._hits / (self._hits + self._passes))
        return self._foreseen

    def learn(self, tokens: tuple[int, ...], others: float) -> None:
        """Credit the model, or all else, which gave the first of the written tokens the probability `others`."""
        if self._foreseen is not None:
            own = self._foreseen.mass[self._foreseen.paths[:, 0] == tokens[0]].sum()
            part = self._hits * own / (self._hits * own + self._passes * max(others, UNFORESEEN))
            self._hits, self._passes = self._hits + part, self._passes + 1 - part
        self._foresight.keep(tokens[:-1])
        self._trial.ends(len(tokens))

    def close(self) -> None:
        """Give the cache's memory back."""
        self._foresight.close()


_STRENGTH = 20.0
"""Observations that the prior trust counts for."""
_PRIOR = {STORE: (-2.1, -0.13, 0.37, -0.08), OWN: (-0.33, 0.37, 0.72, 0.46), SHARED: (-2.1, -0.13, 0.37, -0.08)}
"""Log-odds of trust as in `foredraft.index.backoff.PRIOR`, where counts stand behind the rows. Fitted on every other
recorded answer; see docs/log.md."""
_OWN_TEXT = np.full(64, OWN, np.uint8)
"""The source of quick drafts, sliced: see `foredraft.index.copied`."""
_FORESIGHT = 0.7
"""How far a draft model is trusted at first."""
_BEHIND_ROWS = BLENDED._replace(table_pair=30.0)
"""What rows leave over, the table has often seen too, so it counts for less than alone."""
