"""Auto: one draft from all that is cheap to ask: the text itself, a datastore, a tri-gram table, the target's words.

Long matches in the text and the datastore (as in REST) and low-order counts that learn as the text grows (as in
Adaptix) are blended at every node, each kind trusted as far as it has proved right in this sequence. Knows ids and
arrays, and a neural drafter's protocol where one is named; no text, no target.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from foredraft.contracts import (
    EMPTY_DRAFT,
    Budget,
    Draft,
    DraftContext,
    Drafter,
    Needs,
    SequenceView,
    TokenIds,
    Verdict,
)
from foredraft.control.evidence import guessed_scores
from foredraft.control.worth import Worth
from foredraft.drafters import Resources, make_drafter, parse_options
from foredraft.errors import ForedraftWarning, UsageError, told
from foredraft.graph.paths import paths_of
from foredraft.index.backoff import UNFORESEEN, prior_trust
from foredraft.index.blender import Blender, Foreseen
from foredraft.index.copied import copied
from foredraft.index.library import NOTHING_TO_SAVE, Library, open_library
from foredraft.index.retrieval import FORESEEN, OWN, SHARED, STORE
from foredraft.index.successors import BLENDED
from foredraft.index.suffix_array import SuffixArrays
from foredraft.index.trigram import TrigramTable, open_named_table
from foredraft.index.workspace import BlenderOptions
from foredraft.options import shown


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
        model: a draft model that is blended in while it is worth its time, as `draft_model` takes it; None for none.
        drafter: another drafter that is blended in likewise: a method's name, or a mapping of `method` and its options,
            such as "medusa" or {"method": "eesd", "out_degree": 3}; None for none.
        levels: tokens deep that either is asked at a step.
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
    drafter: Any = None
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
        if self.drafter is not None:
            self._check_drafter()

    def _check_drafter(self) -> None:
        if self.model is not None:
            raise UsageError("model and drafter both name what is to be blended in; give one of them.")
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
        """The method whose drafts are blended in, and its options; None for none."""
        if self.model is not None:
            return "draft_tree", {"model": self.model, "out_degree": 3, "levels": self.levels}
        if self.drafter is None:
            return None
        options = {"method": self.drafter} if isinstance(self.drafter, str) else dict(self.drafter)
        return options.pop("method"), options

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
    """The table, the texts that are searched, and a neural drafter if one was named.

    Args:
        options: how to blend.
        table: of tri-grams.
        library: the texts.
        neural: whose drafts are blended in; None for none.

    Raises:
        UsageError: a neural drafter that learns from what the target says of its own drafts, or must see every step.
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = (
        "Everything cheap in one draft: the text itself, a datastore, tri-grams, the target's words."
    )
    Options = MixtureOptions
    source_names: Sequence[str] = (
        "auto, datastore", "auto, own text", "auto, shared text", "auto, draft model", "auto, counts"
    )  # fmt: skip

    def __init__(
        self, options: MixtureOptions, table: TrigramTable, library: Library, neural: Drafter | None = None
    ) -> None:
        self.options = options
        self.table = table
        self.library = library
        self.neural = neural
        self.target = getattr(neural, "target", None)
        top_k = options.feedback_top_k if options.feeds_back else 0
        quick = options.learn != "off"  # copies are of the sequence itself
        self.needs = Needs(top_k=top_k, every_step=options.shares, quick=quick)  # what is shared is the whole text
        if neural is not None:
            self._take_in(neural)

    def _take_in(self, neural: Drafter) -> None:
        asked = neural.needs
        if asked.top_k:
            raise UsageError(
                f"Method {neural.name!r} learns from what the target says of its own drafts, and auto mixes them with "
                "others; blend in one that drafts with a model, such as eesd, medusa or layer_skip."
            )
        if asked.every_step:
            raise UsageError(
                f"Method {neural.name!r} must be shown every step, and auto shows it those in which it drafts; blend "
                "in one that reads what it missed, and says so with Needs(every_step=False)."
            )
        self.needs = dataclasses.replace(self.needs, hidden=asked.hidden)
        if self.options.model is None:
            names, asked_for = list(self.source_names), self.options.blends
            names[FORESEEN] = f"auto, {neural.name if asked_for is None else asked_for[0]}"
            self.source_names = tuple(names)

    @classmethod
    def create(cls, options: MixtureOptions, resources: Resources) -> "MixtureDrafter":
        """Open the table, the datastore, and the memory if one is named and exists.

        Raises:
            StoreError: one that is damaged or belongs to another tokenizer.
            UsageError: a neural drafter that cannot be had here, or not be blended in.
        """
        own = (resources.vocabulary, resources.tokenizer_hash)
        library = open_library(options.store, options.memory, resources.default_store, *own)
        table = open_named_table(options.table, resources.default_table, *own)
        neural = None if options.blends is None else make_drafter(*options.blends, resources)
        return cls(options, table, library, neural)

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
        self._options = drafter.options
        self._vocabulary = context.vocabulary
        self._blender: Blender | None = drafter.blender(segments)
        self._neural = None if drafter.neural is None else self._opened(drafter.neural, context)
        self._ids: TokenIds = np.empty(0, np.int64)
        self._asked = False  # in earnest, in this step; else a neural drafter is not told of it either

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Look up the last tokens, and return the most probable continuations as a tree."""
        self._ids, self._asked = view.ids, budget.nodes > 0 and not budget.quick
        if budget.quick:
            return copied(view.ids, _OWN_TEXT[: min(budget.nodes, budget.depth)])
        if budget.nodes <= 0 or budget.depth <= 0 or self._blender is None:
            return EMPTY_DRAFT  # and nothing is read: plain steps cost nothing here, and reading many tokens is quicker
        depth = min(self._options.depth, budget.depth)
        shared = self._drafter.library.shared if self._options.shares else None
        size = (budget.nodes, depth, self._vocabulary)
        if self._neural is None or not self._neural.worth.begins():
            return self._blender.propose(self._ids, shared, *size)
        foreseen = self._foreseen(self._neural, view, budget, self._blender.reach(depth))
        if foreseen is None:
            return self._blender.propose(self._ids, shared, *size)
        self._blender.ask(self._ids, shared, depth)
        otherwise = self._blender.draft(*size).score if self._neural.worth.compares else None
        self._blender.foresee(foreseen)
        draft = self._blender.draft(*size)
        if draft.score is not None and otherwise is not None:
            self._neural.worth.compare(draft.score, otherwise)
        return draft

    def observe(self, verdict: Verdict) -> None:
        """Credit what foresaw the written tokens, then learn the target's own distributions, if asked for."""
        if self._blender is None:
            return
        others = self._blender.learn(self._ids, verdict)
        if self._neural is not None and self._asked:
            try:
                self._neural.learn(verdict, others)
            except Exception as error:  # noqa: BLE001  # whatever it is, the other sources can draft
                self._leave_out(self._neural, error)

    def _opened(self, neural: Drafter, context: DraftContext) -> "_Neural | None":
        try:
            return _Neural(neural, self._options.levels, context)
        except Exception as error:  # noqa: BLE001  # as above
            self._warn(error)
            return None

    def _foreseen(self, neural: "_Neural", view: SequenceView, budget: Budget, depth: int) -> Foreseen | None:
        try:
            return neural.foresee(view, budget, depth)
        except Exception as error:  # noqa: BLE001  # as above
            self._leave_out(neural, error)
            return None

    def _leave_out(self, neural: "_Neural", error: Exception) -> None:
        """Go on without the neural drafter, the one source that runs code which can raise."""
        self._neural = None
        neural.close()
        self._warn(error)

    def _warn(self, error: Exception) -> None:
        warnings.warn(
            f"The source {self._drafter.source_names[FORESEEN]!r} failed ({told(error)}), so the rest of this text is "
            "drafted without it; it is the same text.",
            ForedraftWarning,
            stacklevel=3,
        )

    def close(self) -> None:
        """Forget the sequence, or share it."""
        if self._options.shares and len(self._ids):
            self._drafter.library.share(self._ids)
        self._blender = None  # and with it the memory
        self._ids = np.empty(0, np.int64)
        if self._neural is not None:
            self._neural.close()


class _Neural:
    """A neural drafter behind one sequence: asked while that is worth its time, trusted as far as it proves right.

    Attributes:
        worth: whether it is.
    """

    def __init__(self, drafter: Drafter, levels: int, context: DraftContext) -> None:
        # what is blended with others' drafts is chosen and not drawn, whatever the verification
        settings = {**context.settings, "verification": "matched"}
        self._drafting = drafter.open(dataclasses.replace(context, settings=settings))
        self._levels = levels
        self.worth = Worth()
        self._hits, self._passes = _STRENGTH * _FORESIGHT, _STRENGTH * (1 - _FORESIGHT)
        self._foreseen: Foreseen | None = None
        self._listed = 0.0  # how probable it took all of that to be

    def foresee(self, view: SequenceView, budget: Budget, depth: int) -> Foreseen | None:
        """Return what it foresees, in rows of `depth` tokens; None where that is nothing.

        Raises:
            ValueError: its draft is no tree of tokens.
        """
        # the control is not asked how deep to go: it cuts what comes of all sources
        draft = self._drafting.propose(view, Budget(budget.nodes, min(budget.depth, self._levels), self.worth.goes_on))
        draft.check()
        score = draft.score if draft.score is not None else guessed_scores(draft.parents)
        paths, mass = paths_of(draft.tokens, draft.parents, score, depth)
        total = float(mass.sum())
        if total <= 0:
            return None
        self._listed = min(total, 1.0)  # the others have what it leaves open, besides what it is not trusted with
        share = self._hits / (self._hits + self._passes)
        self._foreseen = Foreseen(paths, mass / total, share * self._listed)
        self.worth.answered()
        return self._foreseen

    def learn(self, verdict: Verdict, others: float | None) -> None:
        """Show it what was written; credit it, or all else, which gave the first token the probability `others`.

        Where nobody was asked, as in a rest, `others` is None.
        """
        if self._foreseen is not None and others is not None:
            right = self._foreseen.paths[:, 0] == verdict.tokens[0]
            own = self._listed * float(self._foreseen.mass[right].sum()) + (1 - self._listed) * others
            part = self._hits * own / (self._hits * own + self._passes * max(others, UNFORESEEN))
            self._hits, self._passes = self._hits + part, self._passes + 1 - part
        self._foreseen = None
        made = verdict.draft
        unnamed = Draft(made.tokens, made.parents, made.score)  # the numbers of sources are auto's
        self._drafting.observe(Verdict(verdict.tokens, verdict.path, unnamed, verdict.at, hidden=verdict.hidden))
        self.worth.ends(len(verdict.tokens), len(verdict.draft), len(verdict.path))

    def close(self) -> None:
        """Have it forget the sequence."""
        self._drafting.close()


_STRENGTH = 20.0
"""Observations that the prior trust counts for."""
_PRIOR = {STORE: (-2.1, -0.13, 0.37, -0.08), OWN: (-0.33, 0.37, 0.72, 0.46), SHARED: (-2.1, -0.13, 0.37, -0.08)}
"""Log-odds of trust as in `foredraft.index.backoff.PRIOR`, where counts stand behind the rows. Fitted on every other
recorded answer; see docs/log.md."""
_OWN_TEXT = np.full(64, OWN, np.uint8)
"""The source of quick drafts, sliced: see `foredraft.index.copied`."""
_FORESIGHT = 0.7
"""How far a neural drafter is trusted at first."""
_BEHIND_ROWS = BLENDED._replace(table_pair=30.0)
"""What rows leave over, the table has often seen too, so it counts for less than alone."""
