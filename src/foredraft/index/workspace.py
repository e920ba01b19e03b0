"""What one sequence's blending keeps between compiled calls: where it lies, and the calls that a step makes.

Between two passes every cache is cold, and to hand a compiled function its arrays takes longer than what it then does.
So all that a step needs lies at addresses that are told in one array (addresses.py), what one call leaves for the next
included. Knows arrays; not who made them, nor when they grow.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.addresses import Addresses, matrix, vector
from foredraft.contracts import Draft, TokenIds
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.backoff import Trust
from foredraft.index.blend import Blended, Counts, InnerTrust, blend, learn_written, with_foresight
from foredraft.index.learned import LearnedArrays, Told, learn_distributions, learn_text, row_contexts
from foredraft.index.lookup import Question, retrieve
from foredraft.index.recent_text import RecentText, append
from foredraft.index.retrieval import STORE, Levels, Rows, gather_from_store
from foredraft.index.successors import Trust as CountsTrust
from foredraft.index.suffix_array import Places, SuffixArrays, Symbols
from foredraft.index.trigram import TableArrays, array_dtypes

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_OWN, _SHARED, _TABLE, _LEARNED, _TRUST, _INNER, _RANGES = 0, 5, 10, 22, 28, 30, 32
_NUMBERS, _LEVELS, _SHARE, _ROWS, _WEIGHTS, _NODES, _MEMBERS, _PATHS, _MASS = 33, 34, 38, 39, 40, 41, 45, 46, 47
"""Places of the arrays. The sequence's text, what others have said, the table, the counts, both trusts: in the order of
their tuples' fields. Ranges int64[S * (longest + 1), 2]. Then what calls leave for each other: numbers int64[4]; levels
(source, length, occurrences, start) int64[M] each and their share float64[M]; rows' tokens int32[R * D] and weights
float64[R]; a draft's tokens, parents, low and high int32[N] each, and members int32[R]. Last, what a draft model
foresees: paths int32[F * D] and mass float64[F]."""
_LEVELS_MADE, _ROWS_MADE, _REACH, _NODES_MADE = 0, 1, 2, 3  # in the numbers
_I32, _I64, _F32, _F64 = np.int32(0), np.int64(0), np.float32(0), np.float64(0)
_MOST_NODES = 64  # that there is room for to begin with


class BlenderOptions(NamedTuple):
    """What is looked up and learned.

    Attributes:
        longest: the longest context that is looked up, in tokens.
        shortest: the shortest.
        samples: occurrences that are looked at, about.
        continuation: tokens taken of what follows an occurrence.
        learns: whether the sequence itself is searched and counted.
        keep: what older counts of a context are multiplied by when something is learned there.
        feedback_weight: observations that one distribution of the target's own counts for.
        trust: how far the counts are trusted.
    """

    longest: int
    shortest: int
    samples: int
    continuation: int
    learns: bool
    keep: float
    feedback_weight: float
    trust: CountsTrust


_NOTHING_TOLD: Told = (np.empty(0, np.int32), np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))


class Workspace:
    """Arrays of one sequence, and the calls that work on them.

    Args:
        options: what is looked up and learned.
        own: the sequence's text.
        table: of tri-grams.
        learned: the sequence's counts.
        trust: how far levels are trusted; changed in place.
        inner: how far rows are trusted behind drafted tokens; changed in place.
        ranges: int64[S, longest + 1, 2], where the last tokens occur in stored segments.
    """

    def __init__(
        self, options: BlenderOptions, own: RecentText, table: TableArrays, learned: LearnedArrays, trust: Trust,
        inner: InnerTrust, ranges: I64,
    ) -> None:  # fmt: skip
        self._options = options
        self._most_rows, levels = options.samples + 3 * options.longest, 3 * options.longest + 1
        self._most_nodes, self._foreseen, self._share = _MOST_NODES, 0, 0.0
        self._token = _token_of(table)
        scratch: list[npt.NDArray[Any]] = [
            np.zeros(4, np.int64), *(np.empty(levels, np.int64) for _ in range(4)), np.empty(levels),
            np.empty(self._most_rows * options.continuation, np.int32), np.empty(self._most_rows),
            *(np.empty(_MOST_NODES, np.int32) for _ in range(4)), np.empty(self._most_rows, np.int32),
            np.empty(0, np.int32), np.empty(0),
        ]  # fmt: skip
        trusts: list[I64 | F64] = [trust.hits.reshape(-1), trust.passes.reshape(-1), *inner]
        self._at = Addresses([*own, *own, *table, *learned, *trusts, ranges.reshape(-1, 2), *scratch])

    def hold_own(self, text: RecentText) -> None:
        """Take another array of the sequence's text, with more room."""
        self._at.put(_OWN, text)

    def hold_shared(self, text: RecentText) -> None:
        """Take what others have said."""
        self._at.put(_SHARED, text)

    def hold_table(self, table: TableArrays) -> None:
        """Take another table."""
        self._token = _token_of(table)
        self._at.put(_TABLE, table)

    def hold_learned(self, learned: LearnedArrays) -> None:
        """Take another array of the sequence's counts, with more room."""
        self._at.put(_LEARNED, learned)

    def hold_ranges(self, ranges: I64) -> None:
        """Take the ranges of fewer segments."""
        self._at.put(_RANGES, [ranges.reshape(-1, 2)])

    def ask(self, ids: TokenIds, known: int, reach: int, *, searches_own: bool) -> bool:
        """Read `ids[known:]`, for which there must be room, and find what followed the last tokens in recent texts.

        Args:
            ids: int64[n], the sequence.
            known: how many of them are read.
            reach: tokens taken of what followed, at most `continuation`.
            searches_own: whether the sequence itself is searched.

        Returns:
            Whether rows of stored segments are to be filled in, by `gather`.
        """
        options, self._foreseen = self._options, 0
        return bool(
            _ask(
                self._at.words, ids, known, searches_own, options.learns, options.keep, options.longest,
                options.shortest, options.samples, reach,
            )
        )  # fmt: skip

    def gather(self, text: SuffixArrays, ranges: I64, before: I64) -> None:
        """Fill in the rows of one stored segment; see `gather_from_store`."""
        _gather(self._at.words, *text, ranges, before)

    def foresee(self, paths: IntArray, mass: F64, share: float) -> None:
        """Put what a draft model foresees before what occurred, in this step; see `with_foresight`."""
        self._foreseen, self._share = len(mass), share
        members = np.empty(self._most_rows + len(mass), np.int32)
        self._at.put(_MEMBERS, [members, np.ascontiguousarray(paths).reshape(-1), mass])

    def draft(self, a: int, b: int, nodes: int, depth: int, vocabulary: int) -> Draft:
        """Blend what was asked for last; see `blend`."""
        if nodes > self._most_nodes:
            self._most_nodes = nodes
            self._at.put(_NODES, [np.empty(nodes, np.int32) for _ in range(4)])
        known = (self._foreseen, self._share, self._options.trust)
        made = _draft(self._at.words, self._token, a, b, nodes, depth, vocabulary, *known)
        return Draft(*made[:3], source=made[3])

    def learn(
        self, a: int, b: int, tokens: I64, draft: tuple[IntArray, IntArray], told: Told | None, *, asked: bool
    ) -> float:
        """Credit what foresaw `tokens`, int64[k], written behind (a, b), and learn what was told.

        Args:
            a: the token before the root, or -1.
            b: the root.
            tokens: that were written.
            draft: tokens and parents of what was verified, int32[N] each, whose rows `told` names.
            told: the target's own distributions, for whose contexts there must be room; None where none are.
            asked: whether anything was asked for; else only what was told is learned.

        Returns:
            The probability that all but a draft model gave the first of the tokens.
        """
        options, (rows, top_tokens, top_probabilities) = self._options, told or _NOTHING_TOLD
        return float(
            _learn(
                self._at.words, self._token, a, b, tokens, *draft, rows, top_tokens, top_probabilities, asked,
                options.longest, options.feedback_weight, options.keep, self._foreseen, self._share, options.trust,
            )
        )  # fmt: skip


def _token_of(table: TableArrays) -> Any:
    """Return a number of the type of the table's tokens; at their addresses, its arrays are taken for what they are."""
    for name, dtype in array_dtypes(len(table.first) - 1).items():
        found = getattr(table, name).dtype
        assert found == dtype, f"the table's {name} are {found}, not {dtype}"
    return table.tokens.dtype.type(0)


@njit(cache=True)
def _text(words: I64, place: int) -> RecentText:
    return RecentText(
        vector(words, place, _I32), vector(words, place + 1, _I32), vector(words, place + 2, _I64),
        vector(words, place + 3, _I32), vector(words, place + 4, _I64),
    )  # fmt: skip


@njit(cache=True)
def _learned(words: I64) -> LearnedArrays:
    return LearnedArrays(
        vector(words, _LEARNED, _I64), matrix(words, _LEARNED + 1, _I32), matrix(words, _LEARNED + 2, _F32),
        vector(words, _LEARNED + 3, _F32), vector(words, _LEARNED + 4, _I64), vector(words, _LEARNED + 5, _I64),
    )  # fmt: skip


@njit(cache=True)
def _counts(words: I64, token: Any, trust: CountsTrust) -> Counts:
    u16, u32 = np.uint16(0), np.uint32(0)
    table = TableArrays(
        vector(words, _TABLE, u32), vector(words, _TABLE + 1, token), vector(words, _TABLE + 2, u32),
        vector(words, _TABLE + 3, u32), vector(words, _TABLE + 4, token), vector(words, _TABLE + 5, u16),
        vector(words, _TABLE + 6, u32), vector(words, _TABLE + 7, u32), vector(words, _TABLE + 8, token),
        vector(words, _TABLE + 9, u16), vector(words, _TABLE + 10, token), vector(words, _TABLE + 11, u16),
    )  # fmt: skip
    return Counts(table, _learned(words), trust)


@njit(cache=True)
def _trust(words: I64, longest: int) -> Trust:
    shape = (3, longest + 1, len(vector(words, _TRUST, _F64)) // (3 * (longest + 1)))
    return Trust(vector(words, _TRUST, _F64).reshape(shape), vector(words, _TRUST + 1, _F64).reshape(shape))


@njit(cache=True)
def _inner(words: I64) -> InnerTrust:
    return InnerTrust(vector(words, _INNER, _F64), vector(words, _INNER + 1, _F64))


@njit(cache=True)
def _ranges(words: I64, longest: int) -> I64:
    flat = matrix(words, _RANGES, _I64)
    ranges: I64 = flat.reshape((len(flat) // (longest + 1), longest + 1, 2))
    return ranges


@njit(cache=True)
def _occurred(words: I64) -> tuple[Levels, Rows]:
    """Return the levels and rows of the last question."""
    numbers = vector(words, _NUMBERS, _I64)
    levels, rows, reach = numbers[_LEVELS_MADE], numbers[_ROWS_MADE], numbers[_REACH]
    return (
        Levels(
            vector(words, _LEVELS, _I64)[:levels], vector(words, _LEVELS + 1, _I64)[:levels],
            vector(words, _LEVELS + 2, _I64)[:levels], vector(words, _LEVELS + 3, _I64)[: levels + 1],
            vector(words, _SHARE, _F64)[:levels],
        ),
        Rows(
            vector(words, _ROWS, _I32)[: rows * reach].reshape((rows, reach)), vector(words, _WEIGHTS, _F64)[:rows]
        ),
    )  # fmt: skip


@njit(cache=True)
def _known(words: I64, foreseen: int, share: float) -> tuple[Levels, Rows]:
    """Return the same with a draft model's before them, where it foresees something."""
    levels, rows = _occurred(words)
    if not foreseen:
        return levels, rows
    paths = vector(words, _PATHS, _I32).reshape((foreseen, rows.tokens.shape[1]))
    return with_foresight(levels, rows, paths, vector(words, _MASS, _F64), share)


@njit(cache=True)
def _ask(
    words: I64, ids: TokenIds, known: int, searches_own: bool, learns: bool, keep: float, longest: int, shortest: int,
    samples: int, reach: int,
) -> bool:  # fmt: skip
    """Read `ids[known:]`, leave levels and rows in their places, and say whether stored rows are to be filled in."""
    own = _text(words, _OWN)
    if learns and searches_own:
        append(own, ids[known:])
    if learns:
        learn_text(_learned(words), ids, known, 1.0, keep, np.inf)
    asked = Question(shortest, False, True, samples, reach)
    shared, trust, ranges = _text(words, _SHARED), _trust(words, longest), _ranges(words, longest)
    levels, rows = retrieve(ranges, own, shared, ids[max(len(ids) - longest, 0) :], trust, asked)
    numbers, stored = vector(words, _NUMBERS, _I64), False
    numbers[_LEVELS_MADE], numbers[_ROWS_MADE] = len(levels.share), len(rows.weights)
    numbers[_REACH], numbers[_NODES_MADE] = reach, 0
    kept_levels, kept_rows = _occurred(words)
    kept_levels.source[:], kept_levels.length[:] = levels.source, levels.length
    kept_levels.occurrences[:], kept_levels.start[:] = levels.occurrences, levels.start
    kept_levels.share[:] = levels.share
    kept_rows.tokens[:], kept_rows.weights[:] = rows.tokens, rows.weights
    for level in range(len(levels.share)):
        stored |= levels.source[level] == STORE and levels.start[level + 1] > levels.start[level]
    return stored


@njit(cache=True)
def _gather(
    words: I64, symbols: Symbols, suffixes: Places, first: I64, ranges: I64, before: I64
) -> None:  # fmt: skip
    """Fill in the rows of one stored segment."""
    levels, rows = _occurred(words)
    gather_from_store(SuffixArrays(symbols, suffixes, first), ranges, before, levels, rows)


@njit(cache=True)
def _draft(
    words: I64, token: Any, a: int, b: int, nodes: int, depth: int, vocabulary: int, foreseen: int, share: float,
    trust: CountsTrust,
) -> tuple[IntArray, IntArray, FloatArray, npt.NDArray[np.uint8]]:  # fmt: skip
    """Blend what was asked for, and leave in its place what `_learn` needs of the draft."""
    levels, rows = _known(words, foreseen, share)
    made = blend(rows, levels, _inner(words), _counts(words, token, trust), a, b, nodes, depth, vocabulary)
    count = len(made.tokens)
    vector(words, _NUMBERS, _I64)[_NODES_MADE] = count
    vector(words, _NODES, _I32)[:count], vector(words, _NODES + 1, _I32)[:count] = made.tokens, made.parents
    vector(words, _NODES + 2, _I32)[:count], vector(words, _NODES + 3, _I32)[:count] = made.low, made.high
    vector(words, _MEMBERS, _I32)[: len(made.members)] = made.members
    return made.tokens, made.parents, made.score, made.source


@njit(cache=True)
def _learn(
    words: I64, token: Any, a: int, b: int, tokens: I64, drafted: IntArray, parents: IntArray, top_rows: IntArray,
    top_tokens: IntArray, top_probabilities: FloatArray, asked: bool, longest: int, weight: float, keep: float,
    foreseen: int, share: float, trust: CountsTrust,
) -> float:  # fmt: skip
    """Do what `Workspace.learn` says."""
    counts, others = _counts(words, token, trust), 0.0
    if asked:
        occurred = _occurred(words)
        count = vector(words, _NUMBERS, _I64)[_NODES_MADE]
        no_score, no_source = np.empty(0, np.float32), np.empty(0, np.uint8)
        made = Blended(
            vector(words, _NODES, _I32)[:count], vector(words, _NODES + 1, _I32)[:count], no_score, no_source,
            vector(words, _NODES + 2, _I32)[:count], vector(words, _NODES + 3, _I32)[:count],
            vector(words, _MEMBERS, _I32),
        )  # fmt: skip
        otherwise = learn_written(
            _trust(words, longest), _inner(words), made, occurred, _known(words, foreseen, share), counts, a, b, tokens
        )
        rows, left = occurred[1], 1.0
        for row in range(len(rows.weights)):
            left -= rows.weights[row]
            others += rows.weights[row] if rows.tokens[row, 0] == tokens[0] else 0.0
        others += left * otherwise
    if len(top_rows):
        contexts = row_contexts(drafted, parents, top_rows, a, b)
        learn_distributions(counts.learned, contexts, top_tokens, top_probabilities, weight, keep)
    return others
