"""Lookahead decoding: each verification also runs a window of guesses, from whose results n-grams are collected.

Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (ICML 2024). Needs no datastore,
no training and no draft model.

Does not depend on text or models.

The window is a tree. Its level 0 is a chain after the root. In later levels, the row of column `j` is the child of the
row of column `j` in the level before. The rows that the paper's attention mask lets a row see are exactly its
ancestors. So the paper's two branches are one draft, which is verified like any other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, TokenIds, Verdict
from foredraft.drafters import Resources
from foredraft.errors import UsageError

_STREAM = 0x100CA  # arbitrary: keeps its draws independent of a control's with the same seed
_EVERY_ROW = 1 << 20  # more rows than any pass has
_GUESS, _WINDOW = 0, 1  # sources
_PRIOR_RATES, _PRIOR_NODES = (0.5, 0.1), 8.0  # prior acceptance rate by source, and its weight in nodes; chosen


@dataclass(frozen=True, slots=True)
class LookaheadOptions:
    """Options of `lookahead`.

    Attributes:
        level: tokens of an n-gram, one more than the window has levels (the paper's N, LEVEL in its code).
        window: columns of the window: n-grams that each verification yields (W, WINDOW_SIZE).
        guess: n-grams after the last token verified per step at most (G, GUESS_SET_SIZE).
        learn: "window" collects only the window's n-grams; "text" also those of prompt and output (POOL_FROM_PROMPT).
    """

    level: int = 4
    window: int = 5
    guess: int = 5
    learn: Literal["window", "text"] = "window"

    def __post_init__(self) -> None:
        """Raise UsageError for a value out of range."""
        for name, least, most in (("level", 2, 16), ("window", 1, 64), ("guess", 0, 64)):
            if not least <= getattr(self, name) <= most:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be {least} to {most}.")
        if self.learn not in ("window", "text"):
            raise UsageError(f"learn is {self.learn!r}; choose one of window, text.")


class LookaheadDrafter:
    """Drafts n-grams that the target itself produced after guessed tokens."""

    name: ClassVar[str] = "lookahead"
    summary: ClassVar[str] = (
        "N-grams that the target itself generates in a window next to the text (lookahead decoding)."
    )
    Options = LookaheadOptions
    # the window pays off in later steps, so its rows cannot be weighed one by one
    needs = Needs(top_k=1, top_rows=_EVERY_ROW, control="whole")
    source_names = ("lookahead", "lookahead, window")

    def __init__(self, options: LookaheadOptions) -> None:
        self.options = options

    @classmethod
    def create(cls, options: LookaheadOptions, resources: Resources) -> "LookaheadDrafter":  # noqa: ARG003  # the family's signature
        """Return the drafter."""
        return cls(options)

    def open(self, context: DraftContext) -> "LookaheadDrafting":
        """Begin with an empty pool."""
        return LookaheadDrafting(self.options, context.seed)


class LookaheadDrafting:
    """One sequence's window and pool.

    The window starts as pieces of the prompt at random places. In every step its oldest level is dropped, and the
    target's most probable token after each column becomes the newest level; a column and that token are an n-gram of
    the pool. So the window advances by one token per step, even if more were emitted, as in the paper's code.

    A node's score is the product, along its path, of its source's acceptance rate given an accepted parent. It is low
    for the window's rows, which are verified for the target's next tokens: a control that cuts by scores would empty
    the window, so the default control is `whole`.
    """

    def __init__(self, options: LookaheadOptions, seed: int) -> None:
        self._options = options
        self._generator = np.random.default_rng([seed, _STREAM])
        self._pool = _Pool(options.level, options.guess)
        self._window: TokenIds | None = None
        self._columns: list[tuple[int, ...]] = []  # of the last draft: each column's tokens after the root
        self._read = 0  # tokens of the text already in the pool
        self._accepted = [_PRIOR_NODES * rate for rate in _PRIOR_RATES]
        self._tried = [_PRIOR_NODES] * len(_PRIOR_RATES)

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Return the pool's n-grams after the last token, up to half the nodes, and the window, as one tree."""
        self._columns = []
        if budget.nodes <= 0 or budget.depth <= 0:
            return EMPTY_DRAFT
        if self._window is None:
            self._window = self._begin(view.ids)
        if self._options.learn == "text":
            self._read = self._pool.read(view.ids, self._read)
        root = int(view.ids[-1])
        self._window[0, 0] = root
        tree = _Tree([accepted / tried for accepted, tried in zip(self._accepted, self._tried, strict=True)])
        for guess in self._pool.after(root):
            if len(tree.tokens) + len(guess) > (budget.nodes + 1) // 2:
                break
            tree.add(guess[: budget.depth], _GUESS)
        self._columns = self._fitting(budget.nodes - len(tree.tokens), budget.depth)
        for column in self._columns:
            tree.add(column, _WINDOW)
        return tree.draft()

    def observe(self, verdict: Verdict) -> None:
        """Collect the window's n-grams and advance it, if it was verified."""
        self._count(verdict)
        if self._window is None or verdict.top_rows is None or verdict.top_tokens is None:
            return
        said = dict(zip(verdict.top_rows.tolist(), verdict.top_tokens[:, 0].tolist(), strict=True))
        child_of = verdict.draft.child_of()
        newest = self._window[-1].copy()
        for number, column in enumerate(self._columns):
            token = said.get(_row_after(column, child_of))
            if token is not None:
                newest[number] = token
                self._pool.add((*self._window[:, number].tolist(), token))
        if self._columns:
            self._window = np.concatenate([self._window[1:], newest[None]])
        self._columns = []

    def close(self) -> None:
        """Drop the sequence."""
        self._pool = _Pool(self._options.level, self._options.guess)
        self._window = None

    def _begin(self, ids: TokenIds) -> TokenIds:
        """Return int64[level - 1, window]: each column a piece of the text, which wraps around at its end."""
        starts = self._generator.integers(len(ids), size=self._options.window)
        places = (starts[None, :] + np.arange(self._options.level - 1)[:, None]) % len(ids)
        columns: TokenIds = ids[places]
        return columns

    def _fitting(self, nodes: int, depth: int) -> list[tuple[int, ...]]:
        """Return the tokens after the root of the window's first columns, as many as fit into `nodes` and `depth`."""
        assert self._window is not None
        levels, columns = self._window.shape
        deep = depth - levels + 1  # column 0 begins at the root
        columns = max(0, min(columns, (nodes + 1) // levels, deep + 1))
        chain = self._window[0].tolist()
        return [(*chain[1 : column + 1], *self._window[1:, column].tolist()) for column in range(columns)]

    def _count(self, verdict: Verdict) -> None:
        """Count, by source, the nodes with accepted parents and those accepted."""
        draft, path = verdict.draft, set(verdict.path)
        if draft.source is None:
            return
        reached = {-1, *verdict.path}
        if len(verdict.tokens) == len(verdict.path) and path:  # the text ended, so its children were not tried
            reached.discard(verdict.path[-1])
        for node, (parent, source) in enumerate(zip(draft.parents.tolist(), draft.source.tolist(), strict=True)):
            if parent in reached:
                self._tried[source] += 1
                self._accepted[source] += node in path


def _row_after(path: Iterable[int], child_of: dict[tuple[int, int], int]) -> int:
    """Return the row at the end of a path of tokens from the root, row 0; -1 if it was cut."""
    node = -1
    for token in path:
        found = child_of.get((node, token))
        if found is None:
            return -1
        node = found
    return node + 1


class _Pool:
    """N-grams by their first token, at most `most` of each."""

    def __init__(self, length: int, most: int) -> None:
        self._length = length
        self._most = most
        self._after: dict[int, dict[tuple[int, ...], None]] = {}

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Return the continuations of `token`, `length - 1` tokens each, newest first."""
        return list(self._after.get(token, ()))[::-1]

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram as the newest, and drop the oldest with its first token if there are too many."""
        known = self._after.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self._most:
            del known[next(iter(known))]

    def read(self, ids: TokenIds, read: int) -> int:
        """Add the n-grams of a text that end after its first `read` tokens; return the text's length."""
        text = ids[max(0, read - self._length + 1) :].tolist()
        for start in range(len(text) - self._length + 1):
            self.add(text[start : start + self._length])
        return len(ids)


class _Tree:
    """A tree that grows by paths from the root; equal paths share nodes, which keep the source that added them.

    `rates` are the acceptance rates of both sources given an accepted parent.
    """

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = rates
        self._child_of: dict[tuple[int, int], int] = {}
        self.tokens: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._sources: list[int] = []

    def add(self, path: Iterable[int], source: int) -> None:
        """Add the missing nodes of a path."""
        node, score = -1, 1.0
        for token in path:
            above, node = node, self._child_of.setdefault((node, token), len(self.tokens))
            if node == len(self.tokens):
                self.tokens.append(token)
                self._parents.append(above)
                self._scores.append(score * self._rates[source])
                self._sources.append(source)
            score = self._scores[node]

    def draft(self) -> Draft:
        """Return the tree."""
        tokens, parents = np.array(self.tokens, np.int32), np.array(self._parents, np.int32)
        return Draft(tokens, parents, np.array(self._scores, np.float32), source=np.array(self._sources, np.uint8))
