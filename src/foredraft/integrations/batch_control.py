"""How many tokens of each chain a server gets: the number with the most tokens per second, by what its steps take.

The rule of `foredraft.control.measured`, for many texts at once: a server tells no costs, so the time between its calls
has to. Knows chains and their scores, what texts went on with, and the clock. Does not know drafters.
"""

from collections import deque
from collections.abc import Callable
from statistics import fmean, median
from time import perf_counter

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.control.evidence import Evidence, chances, credit, empty_evidence, halvings
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.integrations.batches import I64, Batch, Chains

F64 = npt.NDArray[np.float64]

_KEEP = 0.98  # what a step's evidence is worth one drafted step later
_PRIOR, _LEAST_PRIOR = 2.0, 0.1  # steps that the flat curve counts for, at no token and at all there may be; it fades
_PLAIN_KEPT = 5  # plain steps, by whose times the next ones are believed to go
_PLAIN_ASKED = 3  # plain steps in a row that are asked what they take now, before drafting rests for what they took
_USUAL = 1.5  # times that are further than so many times from what is believed count as if they were so far
_MOST_STRANGE = 4  # drafted steps in a row that may: what goes on is believed
_REFERENCE_EVERY, _FIRST_REFERENCE = 64, 4  # drafted steps between plain ones taken for reference, and before the first
_ENOUGH_STEPS = 16.0  # recent drafted steps, before they are compared with plain ones
_MOST_WORTHLESS = 8  # steps in a row in which no drafted token was worth verifying, before drafting rests
_MOST_WORTHLESS_AGAIN = 2  # the same after a rest, until drafting has paid
_SHORTEST_REST, _LONGEST_REST = 8, 128  # plain steps before drafting is tried again
_NOISE = 1.02  # drafted steps may be worse by this before drafting rests
_FADE, _FADE_COST = 0.8, 0.5  # what is left of the evidence against drafting and of what it costs after a rest


class StepCost:
    """Seconds of a server's steps by drafted tokens, for batches of about one size, and whether drafting pays there.

    A plain step takes `plain` seconds; one with n drafted tokens `base + slope * n`, by least squares over the recent
    ones. Before there are any, the curve is flat: any number of tokens is believed to cost nothing.

    Args:
        most: drafted tokens in a step at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.plain: float | None = None
        self._plain_seconds: deque[float] = deque(maxlen=_PLAIN_KEPT)
        self._sums = np.zeros(5)  # of 1, n, n^2, seconds, n * seconds
        self._prior = _PRIOR
        self._plain_steps = 0
        self._since_plain = 0
        self._strange = 0  # drafted steps in a row of unusual times
        self._doubt = 0  # plain steps that are still to be asked, before drafting is judged
        self._paid = np.zeros(3)  # recent drafted steps, their tokens over a plain step's, their seconds
        self._worthless = 0
        self._rest, self._next_rest = 0, _SHORTEST_REST

    def drafts(self) -> bool:
        """Say whether the next step should draft: not while drafting rests, nor where a plain step is due."""
        due = min(_REFERENCE_EVERY, _FIRST_REFERENCE * (1 + self._plain_steps))
        return self._rest == 0 and self._doubt == 0 and self._since_plain < due

    def line(self) -> tuple[float, float]:
        """Return the seconds of a drafted step without its tokens, at least those of a plain one, and of a token."""
        ones, n, squares, seconds, products = self._sums
        if ones == 0:
            return (0.0, 0.0) if self.plain is None else (self.plain, 0.0)
        flat = self.plain if self.plain is not None else seconds / ones
        prior, most = self._prior, self._most
        ones, n, squares = ones + 2 * prior, n + prior * most, squares + prior * most**2
        seconds, products = seconds + 2 * prior * flat, products + prior * most * flat
        slope = max((ones * products - n * seconds) / (ones * squares - n * n), 0.0)
        return max((seconds - slope * n) / ones, self.plain or 0.0), float(slope)

    def observe(self, drafted: int, gain: float, seconds: float) -> bool:
        """Take up a step, and say whether drafting begins to rest because it has not been paying.

        Args:
            drafted: tokens that were verified.
            gain: tokens that the step gave / those of a plain step.
            seconds: what it took; of a step that drafted nothing, without looking for drafts.
        """
        if drafted == 0:
            self._plain_seconds.append(seconds)
            middle = median(self._plain_seconds)
            self.plain = fmean(min(max(each, middle / _USUAL), middle * _USUAL) for each in self._plain_seconds)
            self._plain_steps += 1
            self._since_plain = 0
            self._rest = max(self._rest - 1, 0)
            if self._doubt == 0:
                return False
            self._doubt -= 1
            return self._doubt == 0 and self._pays() is False and self._begin_rest()
        seconds = self._usual(drafted, seconds)
        self._prior = max(_KEEP * self._prior, _LEAST_PRIOR)
        self._sums = _KEEP * self._sums + (1, drafted, drafted**2, seconds, drafted * seconds)
        self._paid = _KEEP * self._paid + (1, gain, seconds)
        self._since_plain += 1
        pays = self._pays()
        if pays:
            self._next_rest = _SHORTEST_REST
        elif pays is False:
            self._doubt = _PLAIN_ASKED
        return False

    def _usual(self, drafted: int, seconds: float) -> float:
        """Return the seconds of a drafted step, brought nearer to what is believed where they are unusual."""
        base, slope = self.line()
        believed = base + slope * drafted if base else seconds
        usual = min(max(seconds, believed / _USUAL), believed * _USUAL)
        self._strange = self._strange + 1 if usual != seconds else 0
        return usual if self._strange <= _MOST_STRANGE else seconds

    def _pays(self) -> bool | None:
        """Say whether recent drafted steps gave tokens as quickly as plain ones; None while that is not known."""
        steps, gained, taken = self._paid
        if steps < _ENOUGH_STEPS or self.plain is None:
            return None
        return bool(taken <= _NOISE * gained * self.plain)

    def judged(self, worth: int) -> bool:
        """Take up how many drafted tokens were worth verifying; say whether drafting begins to rest for want of any."""
        self._worthless = 0 if worth else self._worthless + 1
        if self._worthless < (_MOST_WORTHLESS if self._next_rest == _SHORTEST_REST else _MOST_WORTHLESS_AGAIN):
            return False
        return self._begin_rest()

    def _begin_rest(self) -> bool:
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
        self._sums, self._prior = _FADE_COST * self._sums, max(self._prior, 1.0)  # it may have become cheaper
        self._paid[:] = 0.0
        self._worthless = 0
        return True


class BatchControl:
    """Says in which steps a server's requests are drafted, and how many tokens of their chains it gets.

    The expected tokens of a step are one a request plus the chances of the drafted ones, where a token's chance is the
    share of tokens with a like score that texts went on with so far. They are weighed against the seconds of a step,
    learned from the time between the calls by the size of the batch (in powers of two). Steps in which a prompt is read
    are not timed. What is handed over follows the clock; the texts do not, as the server verifies them.

    Args:
        slots: texts at most, as the batches number them.
        most: tokens of a chain at most.
        clock: seconds.
    """

    def __init__(self, slots: int, most: int, clock: Callable[[], float] = perf_counter) -> None:
        self._most, self._clock = most, clock
        self._evidence = empty_evidence()
        self._costs: dict[int, StepCost] = {}
        room = (slots, most)
        self._given = Chains(np.zeros(room, np.int32), np.zeros(room, np.float32), np.zeros(slots, np.int32))
        self._was_in = np.zeros(slots, np.bool_)  # the last step
        self._cost = StepCost(1)  # for batches like the last one
        self._began = self._ended = 0.0
        self._drafted_seconds: float | None = None  # of looking for drafts in the last step; None while texts are new

    def begin(self, batch: Batch, whole: bool) -> bool:
        """Take up what the last step gave and took; say whether to draft now.

        Args:
            batch: the rows that want a draft.
            whole: whether these are all rows of the server, and none still reads its prompt.
        """
        self._began = self._clock()
        slots, known = batch.slots, batch.known
        accepted = self._observe_chains(batch)
        steady = whole and bool(self._was_in[slots].all()) and bool((known > 0).all())
        if steady and self._drafted_seconds is not None:
            drafted = int(self._given.counts.sum())
            seconds = self._began - self._ended + (self._drafted_seconds if drafted else 0.0)
            # requests that ended meanwhile are taken to have done as the others
            if self._cost.observe(drafted, 1.0 + accepted / len(slots), seconds):
                self._fade()
        self._was_in[:] = False
        self._was_in[slots] = True
        self._cost = self._costs.setdefault(len(slots).bit_length(), StepCost(len(slots) * self._most))
        return self._cost.drafts()

    def trim(self, batch: Batch, chains: Chains) -> IntArray:
        """Return how many tokens of each chain are worth verifying, int32[R]."""
        plain = self._cost.plain
        base, slope = self._cost.line()
        if plain is None and not base:
            kept = chains.counts.copy()  # nothing is known yet: all of it, and so something is learned
        else:
            kept = worth_verifying(chains.scores, chains.counts, self._evidence, plain or base, base, slope)
        if chains.counts.any() and self._cost.judged(int(kept.sum())):
            self._fade()
        given = self._given
        given.counts[:] = 0
        given.tokens[batch.slots], given.scores[batch.slots] = chains.tokens, chains.scores
        given.counts[batch.slots] = kept
        self._ended = self._clock()
        self._drafted_seconds = self._ended - self._began if bool((batch.known > 0).all()) else None
        return kept

    def _observe_chains(self, batch: Batch) -> int:
        """Credit the tokens that were handed over; return how many of them the texts went on with."""
        scores, path = verified(batch.token_ids, batch.rows, batch.lengths, batch.known, batch.slots, *self._given)
        if len(scores):
            credit(self._evidence, scores, path)
        return len(path)

    def _fade(self) -> None:
        """Let what spoke against drafting fade: without drafts it would be believed for ever."""
        for each in self._evidence:
            np.multiply(each, _FADE, out=each)


@njit(cache=True)
def verified(
    token_ids: IntArray, rows: I64, lengths: I64, known: I64, slots: I64, tokens: IntArray, scores: FloatArray,
    counts: IntArray,
) -> tuple[FloatArray, IntArray]:  # fmt: skip
    """Return the scores of the tokens that the last step verified, float32[N], and which of them were accepted.

    Args:
        token_ids: int32[B, L].
        rows: int64[R].
        lengths: int64[R], tokens of each row now.
        known: int64[R], when its chain was drafted; 0 for a new text, which had none.
        slots: int64[R].
        tokens: int32[S, K], the chains by slot.
        scores: float32[S, K].
        counts: int32[S], how many tokens of each were handed over.
    """
    room = 0
    for i in range(len(rows)):
        room += counts[slots[i]] if known[i] > 0 else 0
    found, path, seen, accepted = np.empty(room, np.float32), np.empty(room, np.int32), 0, 0
    for i in range(len(rows)):
        slot, goes_on = slots[i], known[i] > 0
        for k in range(counts[slot] if known[i] > 0 else 0):
            # the last token of a step is the target's own
            goes_on = goes_on and known[i] + k < lengths[i] - 1 and token_ids[rows[i], known[i] + k] == tokens[slot, k]
            found[seen] = scores[slot, k]
            if goes_on:
                path[accepted] = seen
                accepted += 1
            seen += 1
    return found, path[:accepted]


@njit(cache=True)
def worth_verifying(
    scores: FloatArray, counts: IntArray, evidence: Evidence, plain: float, base: float, slope: float
) -> IntArray:
    """Return how many tokens of each chain give the batch the most expected tokens per second, int32[R].

    Args:
        scores: float32[R, K], not rising along a chain.
        counts: int32[R].
        evidence: what became of tokens by their scores.
        plain: seconds of a step without drafts.
        base: seconds of one with drafts, apart from them.
        slope: seconds of a drafted token.
    """
    chance = chances(evidence)
    total = counts.sum()
    falling, row_of, count = np.empty(total, np.float32), np.empty(total, np.int64), 0
    for row in range(len(counts)):
        for k in range(counts[row]):
            falling[count], row_of[count] = -scores[row, k], row
            count += 1
    order = np.argsort(falling, kind="mergesort")  # stable: no token comes before the one above it
    best, best_rate, expected = 0, len(counts) / plain, float(len(counts))
    for n in range(total):
        expected += chance[halvings(-falling[order[n]])]
        rate = expected / (base + slope * (n + 1))
        if rate > best_rate:
            best, best_rate = n + 1, rate
    kept = np.zeros(len(counts), np.int32)
    for n in range(best):
        kept[row_of[order[n]]] += 1
    return kept
