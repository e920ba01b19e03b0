"""Lookahead decoding: each verification also runs a window of guesses, from whose results n-grams are collected.

Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (ICML 2024). Needs no datastore,
no training and no draft model.

Does not depend on text or models.

The window is a tree (docs/explanation/self-drafting.md), so the paper's two branches are one draft.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, TokenIds, Verdict
from foredraft.drafters import Resources
from foredraft.options import check_range

_STREAM = 0x100CA  # arbitrary: keeps its draws independent of a control's with the same seed
_GUESS, _WINDOW = 0, 1  # sources
_CUT = -2  # no row, and no node has it as parent


@dataclass(frozen=True, slots=True)
class LookaheadOptions:
    """Options of `lookahead`."""

    level: int = 4  # tokens of an n-gram, one more than the window has levels (the paper's N, LEVEL in its code)
    window: int = 5  # columns of the window: n-grams that each verification yields (W, WINDOW_SIZE)
    guess: int = 5  # n-grams after the last token verified per step at most (G, GUESS_SET_SIZE)

    def __post_init__(self) -> None:
        check_range(self, "level", least=2, most=16)
        check_range(self, "window", least=1, most=64)
        check_range(self, "guess", least=0, most=64)


class LookaheadDrafter:
    """Drafts n-grams that the target itself produced after guessed tokens."""

    name: ClassVar[str] = "lookahead"
    summary: ClassVar[str] = (
        "N-grams that the target itself generates in a window next to the text (lookahead decoding)."
    )
    Options = LookaheadOptions
    # the window pays off in later steps, so its rows cannot be weighed one by one
    needs = Needs(top_k=1, control="whole")
    source_names = ("lookahead", "lookahead, window")

    def __init__(self, options: LookaheadOptions) -> None:
        self.options = options

    @classmethod
    def create(cls, options: LookaheadOptions, resources: Resources) -> "LookaheadDrafter":  # noqa: ARG003  # the family's signature
        return cls(options)

    def open(self, context: DraftContext) -> "_Drafting":
        return _Drafting(self.options, context.seed)


class _Drafting:
    """One sequence's window and pool.

    The window starts as pieces of the prompt at random places. In every step its oldest level is dropped, and the
    target's most probable token after each column becomes the newest level; a column and that token are an n-gram of
    the pool. So the window advances by one token per step, even if more were emitted, as in the paper's code.
    """

    def __init__(self, options: LookaheadOptions, seed: int) -> None:
        self._options = options
        self._generator = np.random.default_rng([seed, _STREAM])
        self._pool: dict[int, dict[tuple[int, ...], None]] = {}  # by first token: the others, newest last
        self._window: TokenIds | None = None  # int64[level - 1, window]
        self._columns: list[list[int]] = []  # of the last draft: each column's tokens after the root

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Return the pool's n-grams after the last token, up to half the nodes, and the window, as one tree."""
        self._columns = []
        if budget.nodes <= 0 or budget.depth <= 0:
            return EMPTY_DRAFT
        if self._window is None:  # each column is a piece of the text, which wraps around at its end
            starts = self._generator.integers(len(view.ids), size=self._options.window)
            self._window = view.ids[(starts + np.arange(self._options.level - 1)[:, None]) % len(view.ids)]
        root = int(view.ids[-1])
        self._window[0, 0] = root
        child_of: dict[tuple[int, int], int] = {}  # the tree, in its nodes' order
        sources: list[int] = []
        for guess in reversed(self._pool.get(root, {})):
            if len(sources) + len(guess) > (budget.nodes + 1) // 2:
                break
            _add(child_of, sources, guess[: budget.depth], _GUESS)
        levels, columns = self._window.shape
        fitting = min(columns, (budget.nodes - len(sources) + 1) // levels, budget.depth - levels + 2)
        for column in range(fitting):  # the first one begins at the root
            self._columns.append([*self._window[0, 1 : column + 1].tolist(), *self._window[1:, column].tolist()])
            _add(child_of, sources, self._columns[-1], _WINDOW)
        parents, tokens = np.array(list(child_of), np.int32).reshape(-1, 2).T.copy()
        return Draft(tokens, parents, source=np.array(sources, np.uint8))

    def observe(self, verdict: Verdict) -> None:
        if self._window is None or verdict.top_tokens is None:
            return
        said = verdict.top_tokens[:, 0].tolist()
        child_of = verdict.draft.child_of()
        newest = self._window[-1].copy()
        for number, column in enumerate(self._columns):
            node = -1
            for token in column:
                node = child_of.get((node, token), _CUT)
            if node > _CUT:
                newest[number] = said[node + 1]
                self._collect([*self._window[:, number].tolist(), said[node + 1]])
        if self._columns:
            self._window = np.concatenate([self._window[1:], newest[None]])
        self._columns = []

    def close(self) -> None:
        self._pool = {}
        self._window = None

    def _collect(self, ngram: list[int]) -> None:
        """Add an n-gram to the pool as the newest, and drop the oldest with its first token if there are too many."""
        known, rest = self._pool.setdefault(ngram[0], {}), tuple(ngram[1:])
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self._options.guess:
            del known[next(iter(known))]


def _add(child_of: dict[tuple[int, int], int], sources: list[int], path: Iterable[int], source: int) -> None:
    """Add the missing nodes of a path to a tree; the others keep the source that added them."""
    node = -1
    for token in path:
        node = child_of.setdefault((node, token), len(sources))
        if node == len(sources):
            sources.append(source)
