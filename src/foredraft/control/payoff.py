"""When drafting pays: the probability that nodes are accepted, the cost of steps, the best nodes, and pauses.

Does not depend on what drafts. All numbers were chosen for this project; none is from a paper.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numba import njit

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft
from foredraft.graph.tree import F64, FloatArray, IntArray, depths, top_nodes

# --- when to stop, and when to try again

PATIENCE = 4  # tries that must fail before a pause: with fewer, chance stops drafting that pays
# bounds of `Rests.debt`, in tries that do not pay; chosen
_MOST_SAVED = 16.0  # without a bound, what was saved long ago would excuse any number of tries
_MOST_OWED = 2.0  # with 4, tries that save half of what one costs would end the longest pauses after 8 of them
_LONGEST_REST = 64  # steps: a failed try takes less than half a step, so it costs less than 1 % of the time
# share of the time that longer tries take, those of drafters that have to read the text first. Chosen, as no method is
# to be slower than 0.98 of plain decoding; without it EESD was at 0.87 on SmolLM2 (docs/results/log.md)
_MOST_SPENT = 0.02
# steps, after such a try. With 64, `auto` with a trained drafter that does not pay was 3 to 6 % slower on SmolLM2 than
# alone (15 prompts), with 512 at most 3 % (24 prompts)
LONGEST_PAUSE = 512


@dataclass(slots=True)
class Rests:
    """Pauses of drafting, or of anything else that costs time and may not pay.

    After 4 tries that did not pay there is a pause of 1 step; after each further one of 2, 4, ... `longest` steps. A
    try that pays ends this if the tries that paid saved more time lately than the others took; else the next pause is
    as long.
    """

    unpaid: int = 0  # tries that did not pay, since one that ended pauses
    # time that tries took, less what those that paid saved, in units of a try that does not pay
    debt: float = 0.0
    left: int = 0  # steps left of the pause
    longest: int = _LONGEST_REST  # steps of a pause at most, a power of two

    def tried(self, *, paid: bool, gain: float = np.inf) -> bool:
        """Count a try. Return whether to make it: it pays, or it is the first after a pause and renews estimates.

        `gain` is the time that a try saves which pays, over the time that one takes which does not. By default, any try
        that pays ends pauses.
        """
        made = paid or self.unpaid >= PATIENCE
        self.debt = max(self.debt - gain, -_MOST_SAVED) if paid else min(self.debt + 1, _MOST_OWED)
        if paid and self.debt < 0:
            self.unpaid = 0
        elif not paid:
            self.unpaid = min(self.unpaid + 1, PATIENCE + self.longest.bit_length() - 1)
        self.left = 1 << (self.unpaid - PATIENCE) if self.unpaid >= PATIENCE else 0
        return made

    def took(self, steps: float) -> None:
        """Lengthen the pause after a try that took as long as so many steps, such as one that read a prompt first."""
        if steps < np.inf:  # else the clock jumped
            self.left = max(self.left, round(min(steps / _MOST_SPENT, LONGEST_PAUSE)))

    def passed(self) -> None:
        """Count a step of a pause."""
        self.left = max(self.left - 1, 0)


@njit(cache=True)
def best_number(tokens: F64, seconds: F64, cheap: int = 0, margin: float = 1.0) -> int:
    """Return the number of nodes or answers with the most tokens per second; 0 is a plain step.

    Expected `tokens` and `seconds` of a step are float64[N + 1] by number. The numbers from 1 to `cheap` count as one
    choice, the largest; a larger number must give `margin` times the tokens per second.
    """
    rates = tokens / seconds
    few = min(cheap, len(rates) - 1)
    best, needed = few, margin * rates[few]
    for number in range(few + 1, len(rates)):
        if rates[number] > needed:
            best, needed = number, rates[number]
    return best if rates[best] > rates[0] else 0


# --- the nodes of a draft by their scores


TYPICAL_RATE = 0.6  # acceptance rate of drafts without scores; chosen


def scores_of(draft: Draft) -> FloatArray:
    """Return the draft's scores, float32[N]; without them `TYPICAL_RATE` ** depth."""
    if draft.score is not None:
        return draft.score
    return (np.float32(TYPICAL_RATE) ** depths(draft.parents)).astype(np.float32)


def cut(draft: Draft, budget: Budget, score: FloatArray | None = None) -> Draft:
    """Return the best prefix-closed part of `draft` within `budget`, by `score`, the draft's scores, or the order."""
    if budget.nodes <= 0 or budget.depth <= 0 or len(draft) == 0:
        return EMPTY_DRAFT
    fits = len(draft) <= budget.depth or int(depths(draft.parents).max()) <= budget.depth
    if len(draft) <= budget.nodes and fits:
        return draft
    score = score if score is not None else draft.score
    if score is None:
        score = -np.arange(len(draft), dtype=np.float32)
    return draft.take(top_nodes(draft.parents, score, budget.nodes, budget.depth))


# --- the probability that nodes are accepted

_BINS = 12  # of scores, by powers of two: [1/2, 1], [1/4, 1/2), ...; the last one holds all lower scores
_PRIOR_NODES = 18.0  # weight, in nodes, of the rate of all bins in the rate of each bin
_PRIOR_TOKENS = 3.0  # weight, in tokens, of "scores are right" in the rate of all bins
_MOST_NODES = 400.0  # nodes of a bin, after which its counts are halved


class Evidence(NamedTuple):
    """Accepted nodes, and the sum of the scores of all drafted nodes, by bins of the scores, float64[12] each."""

    accepted: F64
    promised: F64


@njit(cache=True)
def bin_of(score: float) -> int:
    """Return the bin of a score."""
    return min(max(int(np.floor(-np.log2(max(score, 1e-6)))), 0), _BINS - 1)


@njit(cache=True)
def corrections(evidence: Evidence) -> F64:
    """Return the factor that corrects the scores of each bin, float64[12]: accepted / promised, smoothed."""
    accepted, promised = _PRIOR_TOKENS + evidence.accepted.sum(), _PRIOR_TOKENS + evidence.promised.sum()
    factors, prior = np.empty(_BINS, np.float64), _PRIOR_NODES
    for number in range(_BINS):
        likely = evidence.accepted[number] + prior * accepted / promised
        factors[number] = likely / (evidence.promised[number] + prior)
        prior *= 0.5
    return factors


@njit(cache=True)
def expected_tokens(score: FloatArray, evidence: Evidence, most: int) -> F64:
    """Return how many of the first 0, 1, ... of N nodes are expected to be accepted, float64[min(N, most) + 1]."""
    factors = corrections(evidence)
    tokens = np.zeros(min(len(score), most) + 1, np.float64)
    for nodes in range(1, len(tokens)):
        each = score[nodes - 1]
        tokens[nodes] = tokens[nodes - 1] + min(factors[bin_of(each)] * each, 1.0)
    return tokens


@njit(cache=True)
def best_of_nodes(
    best_first: FloatArray, evidence: Evidence, passes: F64, texts: int, most_accepted: int, drafted: float, least: int,
    margin: float,
) -> tuple[int, float, float]:  # fmt: skip
    """Return how many nodes of `texts` drafts to verify, as `best_number` does, and the tokens and seconds of the step.

    `passes`, float64[M + 1], are seconds by nodes, and `drafted` those of drafting, spent also without nodes. The nodes
    have the scores `best_first`, float32[N], and `most_accepted` is how many of them can be accepted. It is one call
    because each one takes some 10 microseconds after a pass, which evicts the caches.
    """
    tokens = expected_tokens(best_first, evidence, len(passes) - 1)
    seconds = np.empty(len(tokens), np.float64)
    for number in range(len(tokens)):
        tokens[number] = texts + min(tokens[number], most_accepted)
        seconds[number] = passes[number] + drafted
    best = best_number(tokens, seconds, least, margin)
    return best, tokens[best], seconds[best]


@njit(cache=True)
def credit(evidence: Evidence, score: FloatArray, path: IntArray) -> None:
    """Count nodes with scores float32[N], of which those in `path` were accepted; halve the counts of full bins."""
    for each in score:
        evidence.promised[bin_of(each)] += each
    for node in path:
        evidence.accepted[bin_of(score[node])] += 1.0
    for number in range(_BINS):
        if evidence.promised[number] > _MOST_NODES * 0.5**number:
            evidence.promised[number] *= 0.5
            evidence.accepted[number] *= 0.5


# --- the cost of steps

_SHARE = 0.1  # weight of the last step in smoothed values
_STALL = 1.3  # a step counts for at most this many times its expected seconds: more is a stall or compilation
_FIRST = 0.1  # a first overhead counts for at most this part of a pass: more is compilation
# of the difference of the paces, in a step without a draft: wide passes may have been slow beside other processes,
# which nothing measures while drafting rests; a tenfold pace is forgotten after 700 steps (chosen)
_FORGOTTEN = 0.005
# a level's seconds rise quickly and fade slowly: one that takes twice what it is worth is tried in 1 of 130 drafts
# (0.998 ** 131 = 1 / 1.3), and one that was slow once is soon drafted again
_LEVEL_SHARE = 0.3  # weight of the last level in the smoothed seconds
_LEVEL_STALL = 2.0  # a level counts for at most this many times its smoothed seconds
_FADING = 0.998  # of the smoothed seconds are left after a draft whose second level was refused
# the weight of `wide_pace` in the pace of a pass, by its rows: 0 for 1 row, 1 for 16 and more. Extrapolated to more
# rows, slow wide passes made the pace of a single row negative
_WIDTHS = np.minimum(np.log2(np.maximum(np.arange(17), 1)) / 4, 1)


@dataclass(slots=True)
class StepCosts:
    """Smoothed seconds by kind of step, and counts of drafted nodes; kept across texts.

    Passes of 1 row and of 16 rows have separate paces, as other processes slow them down differently. Passes of fewer
    rows are interpolated by the logarithm of their rows; wider ones have the pace of 16.
    """

    pace: float = 1.0  # seconds of a pass of 1 row / seconds by the cost curve
    wide_pace: float = 1.0  # the same for 16 rows and more
    drafted: float = 0.0  # overhead of a drafted step in seconds, without its pass; 0 before the first one
    plain: float = 0.0  # the same for a plain step, without the time to ask for a draft
    asking: float = 0.0  # seconds of asking for a draft and learning from it; 0 before the first one
    level: float = 0.0  # seconds of drafting a level after the first; 0 before one was drafted
    right: float = 0.5  # share of drafts whose first level held an accepted token; the first value is chosen
    rests: Rests = field(default_factory=Rests)
    evidence: Evidence = field(default_factory=lambda: Evidence(np.zeros(_BINS), np.zeros(_BINS)))

    def passes(self, curve: F64) -> F64:
        """Return the current seconds of passes by rows, float64[M], given the measured `curve`, float64[M]."""
        return _at_pace(curve, self.pace, self.wide_pace)

    def observe(self, curve: F64, rows: int, forward: float, other: float, drafting: float | None) -> None:
        """Learn from a step's seconds, as in `Control`, unless its clock jumped or `curve`, float64[M], is too short.

        Those of `drafting` include learning; None if no draft was requested.
        """
        if not (0 < forward < np.inf and 0 <= other < np.inf and rows < len(curve)):
            return
        width, usual = float(_WIDTHS[min(rows, len(_WIDTHS) - 1)]), float(curve[rows])
        known = self.pace + (self.wide_pace - self.pace) * width
        seen = min(forward / usual, _STALL * known)
        change = _SHARE * (seen - known) / ((1 - width) ** 2 + width**2)  # normalised least mean squares
        # passes between these widths may push one of the two paces down, but not below half of what was seen (chosen):
        # from zero it would never recover
        least = seen / 2
        self.pace = max(self.pace + (1 - width) * change, min(self.pace, least))
        self.wide_pace = max(self.wide_pace + width * change, min(self.wide_pace, least))
        if drafting is not None:
            self.drafted = _smoothed(self.drafted, other, _FIRST * usual)
            self.asking = _smoothed(self.asking, drafting, _FIRST * usual)
            other = max(other - drafting, 0.0)
        else:
            self.wide_pace += _FORGOTTEN * (self.pace - self.wide_pace)
        self.plain = _smoothed(self.plain, other, _FIRST * usual)

    def tried_whole(self, curve: F64, lanes: int, rows: int, tokens: float) -> None:
        """Count a try that drafted for `lanes` sequences and verified `rows` rows, whose nodes are not weighed.

        `tokens` is how many such steps write for each sequence.
        """
        passes = self.passes(curve)
        seconds = np.array([passes[lanes] / lanes + self.plain, passes[rows] / lanes + self.drafted])
        self.rests.tried(paid=best_number(np.array([1.0, tokens]), seconds) > 0)

    def observe_level(self, curve: F64, seconds: float) -> None:
        """Learn from the seconds of a level after the first, unless its clock jumped."""
        if 0 < seconds < np.inf:
            known = self.level or min(seconds, _FIRST * float(curve[1]))
            self.level = known + _LEVEL_SHARE * (min(seconds, _LEVEL_STALL * known) - known)

    def refused_level(self) -> None:
        """Forget a little of a level's seconds, so that levels that are refused are tried again."""
        self.level *= _FADING

    def observe_first_level(self, *, right: bool) -> None:
        """Learn whether a draft's first level held an accepted token."""
        self.right += _SHARE * (right - self.right)


@njit(cache=True)
def _at_pace(curve: F64, pace: float, wide_pace: float) -> F64:
    seconds = np.empty(len(curve), np.float64)
    for rows in range(len(curve)):
        seconds[rows] = curve[rows] * (pace + (wide_pace - pace) * _WIDTHS[min(rows, len(_WIDTHS) - 1)])
    return seconds


def _smoothed(known: float, now: float, first: float) -> float:
    """Return `known` updated by `now`; the first value, if `known` is 0, is limited to `first`."""
    return known + _SHARE * (min(now, _STALL * known) - known) if known else min(now, first)
