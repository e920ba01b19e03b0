"""What one sequence's blending keeps between compiled calls: where it lies, and the calls that a step makes.

Between two passes every cache is cold, and to hand a compiled function its arrays takes longer than what it then does.
So all that a step needs lies at addresses that are told in one array (addresses.py), what one call leaves for the next
included. That array tells all of a sequence, so that one call can also go on with many. Knows arrays; not who made
them, nor when they grow.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.addresses import Addresses, matrix, vector
from foredraft.contracts import Draft, TokenIds
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.backoff import Trust
from foredraft.index.blend import Blended, Counts, InnerTrust, blend, learn_written, with_foresight
from foredraft.index.learned import NO_TOKEN, LearnedArrays, Told, learn_distributions, learn_text, row_contexts
from foredraft.index.lookup import Question, retrieve
from foredraft.index.recent_text import NO_TEXT, RecentText, append
from foredraft.index.retrieval import Levels, Rows, gather_from_store
from foredraft.index.successors import Trust as CountsTrust
from foredraft.index.suffix_array import SuffixArrays, follow
from foredraft.index.trigram import TableArrays, array_dtypes

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_OWN, _SHARED, _TABLE, _LEARNED, _TRUST, _INNER, _OPTIONS, _RANGES, _SIZES = 0, 5, 10, 22, 28, 30, 32, 33, 34
_NUMBERS, _LEVELS, _SHARE, _ROWS, _WEIGHTS, _NODES, _MEMBERS, _PATHS, _MASS = 35, 36, 40, 41, 42, 43, 47, 48, 49
_SEGMENTS = 50
"""Places of the arrays. The sequence's text, what others have said, the table, the counts, both trusts: in the order of
their tuples' fields. Options float64[13], in the order of theirs. Ranges int64[S * (longest + 1), 2]; bytes of a place
in each stored segment, int64[S]. What calls leave for each other: numbers int64[4]; levels (source, length,
occurrences, start) int64[M] each and their share float64[M]; rows' tokens int32[R * D] and weights float64[R]; a
draft's tokens, parents, low and high int32[N] each, and members int32[R]. What a neural drafter foresees: paths
int32[F * D] and mass float64[F]. Last, the stored segments, each as its tuple's fields."""
_LEVELS_MADE, _ROWS_MADE, _REACH, _NODES_MADE = 0, 1, 2, 3  # in the numbers
_I32, _I64, _F32, _F64 = np.int32(0), np.int64(0), np.float32(0), np.float64(0)
_LONG = 8  # bytes
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
        segments: stored texts that are searched.

    Attributes:
        words: int64[W], where all of it lies; changed in place.
        kinds: numbers of the types of the table's tokens and of the segments' symbols.
    """

    def __init__(
        self, options: BlenderOptions, own: RecentText, table: TableArrays, learned: LearnedArrays, trust: Trust,
        inner: InnerTrust, segments: Sequence[SuffixArrays],
    ) -> None:  # fmt: skip
        self._most_rows, levels = options.samples + 3 * options.longest, 3 * options.longest + 1
        self._most_nodes, self._foreseen, self._share = _MOST_NODES, 0, 0.0
        self.kinds = _kinds_of(table, segments)
        numbers = np.array([*options[:-1], *options.trust], np.float64)
        ranges = np.zeros((len(segments) * (options.longest + 1), 2), np.int64)
        sizes = np.array([text.suffixes.itemsize for text in segments], np.int64)
        scratch: list[npt.NDArray[Any]] = [
            np.zeros(4, np.int64), *(np.empty(levels, np.int64) for _ in range(4)), np.empty(levels),
            np.empty(self._most_rows * options.continuation, np.int32), np.empty(self._most_rows),
            *(np.empty(_MOST_NODES, np.int32) for _ in range(4)), np.empty(self._most_rows, np.int32),
            np.empty(0, np.int32), np.empty(0),
        ]  # fmt: skip
        trusts: list[I64 | F64] = [trust.hits.reshape(-1), trust.passes.reshape(-1), *inner, numbers]
        stored = [array for text in segments for array in text]
        self._at = Addresses([*own, *NO_TEXT, *table, *learned, *trusts, ranges, sizes, *scratch, *stored])
        self.words = self._at.words

    def hold(
        self, *, own: RecentText | None = None, shared: RecentText | None = None, learned: LearnedArrays | None = None
    ) -> None:
        """Take other arrays of the sequence's text, of what others have said, or of its counts."""
        for place, arrays in ((_OWN, own), (_SHARED, shared), (_LEARNED, learned)):
            if arrays is not None:
                self._at.put(place, arrays)

    def ask(self, ids: TokenIds, read: int, known: int, reach: int) -> None:
        """Go on to the end of `ids`, and find what followed the last tokens wherever they occur.

        Args:
            ids: int64[n], the sequence.
            read: how many of them were followed in the stored segments before.
            known: how many the sequence's text and counts have; there must be room for the others.
            reach: tokens taken of what followed, at most `continuation`.
        """
        self._foreseen = 0
        _ask(self.words, self.kinds[1], ids, read, known, reach)

    def foresee(self, paths: IntArray, mass: F64, share: float) -> None:
        """Put what a neural drafter foresees before what occurred, in this step; see `with_foresight`."""
        self._foreseen, self._share = len(mass), share
        members = np.empty(self._most_rows + len(mass), np.int32)
        self._at.put(_MEMBERS, [members, np.ascontiguousarray(paths).reshape(-1), mass])

    def draft(self, a: int, b: int, nodes: int, depth: int, vocabulary: int) -> Draft:
        """Blend what was asked for last; see `blend`."""
        self.make_room(nodes)
        made = _draft(self.words, self.kinds[0], a, b, nodes, depth, vocabulary, self._foreseen, self._share)
        return Draft(*made[:3], source=made[3])

    def propose(
        self, ids: TokenIds, read: int, known: int, reach: int, nodes: int, depth: int, vocabulary: int
    ) -> Draft:
        """Do what `ask` and `draft` do, in one call."""
        self._foreseen = 0
        self.make_room(nodes)
        made = propose_at(self.words, *self.kinds, ids, read, known, reach, nodes, depth, vocabulary)
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
            The probability that all but a neural drafter gave the first of the tokens.
        """
        top, foreseen = told or _NOTHING_TOLD, (self._foreseen, self._share)
        return float(_learn(self.words, self.kinds[0], a, b, tokens, draft, top, asked, *foreseen))

    def make_room(self, nodes: int) -> None:
        """Have room for drafts of so many nodes."""
        if nodes > self._most_nodes:
            self._most_nodes = nodes
            self._at.put(_NODES, [np.empty(nodes, np.int32) for _ in range(4)])


def _kinds_of(table: TableArrays, segments: Sequence[SuffixArrays]) -> tuple[Any, Any]:
    """Return numbers of the types of the table's tokens and of the segments' symbols.

    At their addresses, the table's arrays are taken for what they are said to be.
    """
    for name, dtype in array_dtypes(len(table.first) - 1).items():
        found = getattr(table, name).dtype
        assert found == dtype, f"the table's {name} are {found}, not {dtype}"
    symbols = {text.symbols.dtype for text in segments} or {np.dtype(np.uint16)}
    assert len(symbols) == 1, f"segments of one store have symbols of {symbols}"
    return table.tokens.dtype.type(0), symbols.pop().type(0)


@njit(cache=True)
def _options(words: I64) -> BlenderOptions:
    v = vector(words, _OPTIONS, _F64)
    trust = CountsTrust(float(v[7]), float(v[8]), float(v[9]), float(v[10]), int(v[11]), float(v[12]))
    return BlenderOptions(
        int(v[0]), int(v[1]), int(v[2]), int(v[3]), bool(v[4]), float(v[5]), float(v[6]), trust
    )  # fmt: skip


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
def _counts(words: I64, token: Any) -> Counts:
    u16, u32 = np.uint16(0), np.uint32(0)
    table = TableArrays(
        vector(words, _TABLE, u32), vector(words, _TABLE + 1, token), vector(words, _TABLE + 2, u32),
        vector(words, _TABLE + 3, u32), vector(words, _TABLE + 4, token), vector(words, _TABLE + 5, u16),
        vector(words, _TABLE + 6, u32), vector(words, _TABLE + 7, u32), vector(words, _TABLE + 8, token),
        vector(words, _TABLE + 9, u16), vector(words, _TABLE + 10, token), vector(words, _TABLE + 11, u16),
    )  # fmt: skip
    return Counts(table, _learned(words), _options(words).trust)


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
    """Return the same with a neural drafter's before them, where it foresees something."""
    levels, rows = _occurred(words)
    if not foreseen:
        return levels, rows
    paths = vector(words, _PATHS, _I32).reshape((foreseen, rows.tokens.shape[1]))
    return with_foresight(levels, rows, paths, vector(words, _MASS, _F64), share)


@njit(cache=True)
def _follow(words: I64, symbol: Any, ranges: I64, context: TokenIds, new: int) -> None:
    """Go on to the end of a context in the stored segments, with the last `new` of its tokens."""
    sizes = vector(words, _SIZES, _I64)
    for number in range(len(sizes)):
        at = _SEGMENTS + 3 * number
        symbols, first = vector(words, at, symbol), vector(words, at + 2, _I64)
        if sizes[number] == _LONG:
            follow(SuffixArrays(symbols, vector(words, at + 1, _I64), first), ranges[number], context, new)
        else:
            follow(SuffixArrays(symbols, vector(words, at + 1, _I32), first), ranges[number], context, new)


@njit(cache=True)
def _gather(words: I64, symbol: Any, ranges: I64, levels: Levels, rows: Rows) -> None:
    """Fill in the rows of the stored segments."""
    sizes, before = vector(words, _SIZES, _I64), np.zeros(ranges.shape[1], np.int64)
    for number in range(len(sizes)):
        at = _SEGMENTS + 3 * number
        symbols, first = vector(words, at, symbol), vector(words, at + 2, _I64)
        if sizes[number] == _LONG:
            text = SuffixArrays(symbols, vector(words, at + 1, _I64), first)
            gather_from_store(text, ranges[number], before, levels, rows)
        else:
            smaller = SuffixArrays(symbols, vector(words, at + 1, _I32), first)
            gather_from_store(smaller, ranges[number], before, levels, rows)


@njit(cache=True)
def _ask(words: I64, symbol: Any, ids: TokenIds, read: int, known: int, reach: int) -> None:
    """Do what `Workspace.ask` says, and leave levels and rows in their places."""
    options, own = _options(words), _text(words, _OWN)
    ranges, context = _ranges(words, options.longest), ids[max(len(ids) - options.longest, 0) :]
    _follow(words, symbol, ranges, context, len(ids) - read)
    if options.learns:
        append(own, ids[known:])
        learn_text(_learned(words), ids, known, 1.0, options.keep, np.inf)
    asked, trust = Question(options.shortest, False, True, options.samples, reach), _trust(words, options.longest)
    levels, rows = retrieve(ranges, own, _text(words, _SHARED), context, trust, asked)
    _gather(words, symbol, ranges, levels, rows)
    numbers = vector(words, _NUMBERS, _I64)
    numbers[_LEVELS_MADE], numbers[_ROWS_MADE] = len(levels.share), len(rows.weights)
    numbers[_REACH], numbers[_NODES_MADE] = reach, 0
    kept_levels, kept_rows = _occurred(words)
    kept_levels.source[:], kept_levels.length[:] = levels.source, levels.length
    kept_levels.occurrences[:], kept_levels.start[:] = levels.occurrences, levels.start
    kept_levels.share[:] = levels.share
    kept_rows.tokens[:], kept_rows.weights[:] = rows.tokens, rows.weights


@njit(cache=True)
def _draft(
    words: I64, token: Any, a: int, b: int, nodes: int, depth: int, vocabulary: int, foreseen: int, share: float
) -> tuple[IntArray, IntArray, FloatArray, npt.NDArray[np.uint8]]:  # fmt: skip
    """Blend what was asked for, and leave in its place what `credit_at` needs of the draft."""
    levels, rows = _known(words, foreseen, share)
    made = blend(rows, levels, _inner(words), _counts(words, token), a, b, nodes, depth, vocabulary)
    count = len(made.tokens)
    vector(words, _NUMBERS, _I64)[_NODES_MADE] = count
    vector(words, _NODES, _I32)[:count], vector(words, _NODES + 1, _I32)[:count] = made.tokens, made.parents
    vector(words, _NODES + 2, _I32)[:count], vector(words, _NODES + 3, _I32)[:count] = made.low, made.high
    vector(words, _MEMBERS, _I32)[: len(made.members)] = made.members
    return made.tokens, made.parents, made.score, made.source


@njit(cache=True)
def propose_at(
    words: I64, token: Any, symbol: Any, ids: TokenIds, read: int, known: int, reach: int, nodes: int, depth: int,
    vocabulary: int,
) -> tuple[IntArray, IntArray, FloatArray, npt.NDArray[np.uint8]]:  # fmt: skip
    """Do what `Workspace.propose` says with the workspace whose words these are; return what makes a draft.

    The workspace must have room for so many nodes.
    """
    _ask(words, symbol, ids, read, known, reach)
    before = int(ids[-2]) if len(ids) > 1 else NO_TOKEN
    return _draft(words, token, before, int(ids[-1]), nodes, depth, vocabulary, 0, 0.0)


@njit(cache=True)
def credit_at(words: I64, token: Any, a: int, b: int, tokens: I64, foreseen: int, share: float) -> float:
    """Credit what foresaw the written tokens, behind the last draft, in the workspace whose words these are.

    Args:
        words: the workspace's.
        token: the first of its kinds.
        a: the token before the root, or -1.
        b: the root.
        tokens: int64[k], what was written behind it.
        foreseen: paths that a neural drafter foresaw.
        share: the part of the weight that they got.

    Returns:
        The probability that all but a neural drafter gave the first of the tokens.
    """
    counts, occurred = _counts(words, token), _occurred(words)
    count, others, left = vector(words, _NUMBERS, _I64)[_NODES_MADE], 0.0, 1.0
    no_score, no_source = np.empty(0, np.float32), np.empty(0, np.uint8)
    made = Blended(
        vector(words, _NODES, _I32)[:count], vector(words, _NODES + 1, _I32)[:count], no_score, no_source,
        vector(words, _NODES + 2, _I32)[:count], vector(words, _NODES + 3, _I32)[:count],
        vector(words, _MEMBERS, _I32),
    )  # fmt: skip
    trust = _trust(words, _options(words).longest)
    otherwise = learn_written(
        trust, _inner(words), made, occurred, _known(words, foreseen, share), counts, a, b, tokens
    )
    rows = occurred[1]
    for row in range(len(rows.weights)):
        left -= rows.weights[row]
        others += rows.weights[row] if rows.tokens[row, 0] == tokens[0] else 0.0
    return others + left * otherwise


@njit(cache=True)
def _learn(
    words: I64, token: Any, a: int, b: int, tokens: I64, draft: tuple[IntArray, IntArray], told: Told, asked: bool,
    foreseen: int, share: float,
) -> float:  # fmt: skip
    """Do what `Workspace.learn` says."""
    others = credit_at(words, token, a, b, tokens, foreseen, share) if asked else 0.0
    rows, top_tokens, top_probabilities = told
    if len(rows):
        contexts, options = row_contexts(*draft, rows, a, b), _options(words)
        weight, keep = options.feedback_weight, options.keep
        learn_distributions(_learned(words), contexts, top_tokens, top_probabilities, weight, keep)
    return others
