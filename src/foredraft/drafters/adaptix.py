"""Adaptix: drafts from a tri-gram table that learns while it decodes, searched best-first or by the paper's MCTS.

Liu et al., "Adaptive Draft-Verification for Efficient Large Language Model Decoding" (AAAI 2025; ADED). The paper's
rules are `search="mcts"` and `learn="paper"`; the defaults are this project's. Needs no model and no training; a table
of texts like yours helps (`foredraft table build`).

Does not depend on text or models.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, TokenIds, Verdict
from foredraft.drafters import Resources
from foredraft.graph.tree import top_nodes
from foredraft.index import learned
from foredraft.index.own_words import NO_TOKEN
from foredraft.index.trigram import TableArrays, open_named_table
from foredraft.index.trigram_search import BLENDED, SearchSettings, TrigramModel, best_first, mcts
from foredraft.options import check_range

# chosen, except `_PAPERS`, which are ADED's (appendix F, and its code)
_TOP = 6  # tokens that are learned of a distribution of the target
_TAUGHT = 2.0  # observations that such a distribution counts as
_PAPERS = SearchSettings()


@dataclass(frozen=True, slots=True)
class AdaptixOptions:
    """Options of Adaptix. The paper's settings are those of ADED's code."""

    # path of a tri-gram table; "default" uses the one of the model, or else one of Python's standard library; "none"
    # starts empty
    table: str = "default"
    # "best_first" expands the most probable paths; "mcts" is the paper's search
    search: Literal["best_first", "mcts"] = "best_first"
    # "tokens" learns each token of prompt and output once; "paper" raises the tri-grams of the last `window` tokens by
    # `increment` in every step, up to `max_probability`; "off" learns nothing
    learn: Literal["tokens", "paper", "off"] = "tokens"
    # "topk" also learns the target's distributions at verified nodes, "off" does not; None means "topk" with
    # `learn="tokens"`, else "off"
    feedback: Literal["topk", "off"] | None = None
    # keep what is learned across sequences, as the paper does; otherwise each sequence starts empty
    share: bool = False
    depth: int = 12  # depth of a best-first draft at most
    window: int = 16  # last tokens that are learned in every step ("paper")
    increment: float = 0.04  # added to a tri-gram's probability ("paper")
    max_probability: float = 3.0  # upper limit of the probability ("paper")

    def __post_init__(self) -> None:
        check_range(self, "depth", "window", least=1)
        check_range(self, "increment", "max_probability", above=0)


class AdaptixDrafter:
    """The table, and the counts shared between sequences."""

    name: ClassVar[str] = "adaptix"
    summary: ClassVar[str] = "Trees from a tri-gram table that learns as it decodes (Adaptix/ADED)."
    Options = AdaptixOptions
    source_names = ("adaptix",)

    def __init__(self, options: AdaptixOptions, table: TableArrays) -> None:
        self.options = options
        self.table = table
        every_step = options.share or options.learn == "paper"  # whole texts are shared; the paper learns in each step
        feeds_back = options.feedback == "topk" or (options.feedback is None and options.learn == "tokens")
        self.needs = Needs(top_k=_TOP if feeds_back else 0, every_step=every_step)
        self.shared = learned.empty_learned()

    @classmethod
    def create(cls, options: AdaptixOptions, resources: Resources) -> "AdaptixDrafter":
        """Open the table; raises StoreError if it is damaged or belongs to another tokenizer."""
        own = (resources.default_table, resources.vocabulary, resources.tokenizer_hash)
        return cls(options, open_named_table(options.table, *own))

    def open(self, context: DraftContext) -> "_Drafting":
        return _Drafting(self, context)

    def forget(self) -> None:
        self.shared = learned.empty_learned()


class _Drafting:
    """One sequence's drafting: its learned counts, and the tokens it has read."""

    def __init__(self, drafter: AdaptixDrafter, context: DraftContext) -> None:
        self._drafter, self._options, self._context = drafter, drafter.options, context
        self._learned = drafter.shared if drafter.options.share else learned.empty_learned()
        self._read = 0
        self._ids: TokenIds | None = None
        paper = drafter.options.learn == "paper"
        self._trust = BLENDED._replace(paper=int(paper), cap=float(drafter.options.max_probability))

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        self._ids = view.ids
        asked = budget.nodes > 0 and budget.depth > 0
        if not asked and self._options.learn != "paper":  # which learns in every step
            return EMPTY_DRAFT  # new tokens are read later: many at once are faster
        self._read_new(view.ids)
        return self._search(view.ids, budget) if asked else EMPTY_DRAFT

    def observe(self, verdict: Verdict) -> None:
        draft, ids = verdict.draft, self._ids
        top, chances = verdict.top_tokens, verdict.top_probabilities
        if ids is None or top is None or chances is None:
            return
        text = ids[: verdict.at + 1]
        learned.learn_distributions(self._learned, draft.tokens, draft.parents, text, top, chances, _TAUGHT)

    def close(self) -> None:
        if self._options.share and self._ids is not None:
            self._read_new(self._ids)
        self._ids = None
        self._learned = learned.empty_learned(8)

    def _search(self, ids: TokenIds, budget: Budget) -> Draft:
        options, before = self._options, int(ids[-2]) if len(ids) > 1 else NO_TOKEN
        model = TrigramModel(self._drafter.table, self._learned, self._trust)
        vocabulary, root = self._context.vocabulary, int(ids[-1])
        if options.search == "mcts":
            generator = np.random.default_rng(self._context.seed + len(ids))
            draws = generator.random((_PAPERS.iterations, _PAPERS.length), np.float32)
            tokens, parents, scores = mcts(model, before, root, _PAPERS, vocabulary, draws)
            return Draft(tokens, parents, scores).take(top_nodes(parents, scores, budget.nodes, budget.depth))
        return Draft(*best_first(model, before, root, budget.nodes, min(budget.depth, options.depth), vocabulary))

    def _read_new(self, ids: TokenIds) -> None:
        options = self._options
        if options.learn == "paper":
            recent = ids[-options.window :]
            for a, b, token in zip(recent, recent[1:], recent[2:], strict=False):
                learned.learn(self._learned, a, b, token, options.increment, options.max_probability)
        elif options.learn == "tokens":
            learned.learn_text(self._learned, ids, self._read)
        self._read = len(ids)
