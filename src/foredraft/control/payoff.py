"""What drafting pays: how likely nodes are accepted, what steps cost, what number writes most a second, when to stop.

Knows scores, tokens and seconds; not what is drafted, nor by whom. Its numbers are our choices, not a paper's.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.contracts import Draft
from foredraft.graph.tree import FloatArray, IntArray, depths

F64 = npt.NDArray[np.float64]

# --- when to stop, and when to try again

PATIENCE = 4
"""Tries in a row that do not pay, before there is a rest: with fewer, chance makes drafting rest that pays."""
_LONGEST_REST = 64  # steps: a try for nothing takes less than half a step, so it costs less than 1 % of the time


@dataclass(slots=True)
class Rests:
    """The rule by which everything that costs time is stopped where it does not pay, and tried again.

    After 4 tries in a row that did not pay there is a rest of 1 step, after one more a rest of 2, then 4, up to 64.
    One that pays ends this.
    """

    unpaid: int = 0  # tries in a row that did not pay
    left: int = 0  # steps of the rest

    @property
    def is_trial(self) -> bool:
        """Whether the next try comes after a rest."""
        return self.unpaid >= PATIENCE

    def tried(self, *, paid: bool) -> bool:
        """Count a try; say whether it is to be made: as it pays, or as the first after a rest, to renew estimates."""
        made = paid or self.is_trial
        self.unpaid = 0 if paid else min(self.unpaid + 1, PATIENCE + _LONGEST_REST.bit_length() - 1)
        self.left = 1 << (self.unpaid - PATIENCE) if self.is_trial else 0
        return made

    def passed(self) -> None:
        """Count a step of a rest."""
        self.left = max(self.left - 1, 0)


@njit(cache=True)
def best_number(tokens: F64, seconds: F64, cheap: int = 0, margin: float = 1.0) -> int:
    """Return the number, of nodes or levels or anything else, that writes the most tokens a second; 0 is a plain step.

    Args:
        tokens: float64[N + 1], those expected of a step with each number.
        seconds: float64[N + 1], of the step.
        cheap: numbers up to this one are not told apart: the largest of them stands for all but 0.
        margin: a larger number must give so many times the tokens a second.
    """
    rates = tokens / seconds
    few = min(cheap, len(rates) - 1)
    best, needed = few, margin * rates[few]
    for number in range(few + 1, len(rates)):
        if rates[number] > needed:
            best, needed = number, rates[number]
    return best if rates[best] > rates[0] else 0


# --- how likely nodes are accepted

_BINS = 12  # of scores, by powers of two: [1/2, 1], [1/4, 1/2), ...; the last takes all below
_PRIOR_NODES = 18.0  # of each bin, accepted as often as those of all bins are, before the first was seen
_PRIOR_TOKENS = 3.0  # promised and accepted over all bins, before the first was seen
_MOST_NODES = 400.0  # of a bin, beyond which older ones count for half


class Evidence(NamedTuple):
    """What became of drafted nodes, by bins of their scores, float64[12] each."""

    accepted: F64  # nodes
    promised: F64  # the sum of the scores of all nodes


def empty_evidence() -> Evidence:
    """Return evidence of nothing yet."""
    return Evidence(np.zeros(_BINS), np.zeros(_BINS))


def scores_of(draft: Draft) -> FloatArray:
    """Return the draft's scores, float32[N]; where it has none, a typical drafter's rate to the power of the depth."""
    return draft.score if draft.score is not None else (np.float32(0.6) ** depths(draft.parents)).astype(np.float32)


@njit(cache=True)
def bin_of(score: float) -> int:
    """Return the bin of a score."""
    return min(max(int(np.floor(-np.log2(max(score, 1e-6)))), 0), _BINS - 1)


@njit(cache=True)
def kept_promises(evidence: Evidence) -> F64:
    """Return accepted nodes / promised ones of each bin, float64[12]: what a score is to be multiplied by."""
    overall = (evidence.accepted.sum() + _PRIOR_TOKENS) / (evidence.promised.sum() + _PRIOR_TOKENS)
    prior = _PRIOR_NODES * 0.5 ** np.arange(_BINS)
    kept: F64 = (evidence.accepted + prior * overall) / (evidence.promised + prior)
    return kept


@njit(cache=True)
def expected_tokens(score: FloatArray, evidence: Evidence, most: int) -> F64:
    """Return how many of the best 0, 1, ... nodes are expected to be accepted, float64[min(N, most) + 1]."""
    kept, order = kept_promises(evidence), np.sort(score)[::-1]
    tokens = np.zeros(min(len(score), most) + 1, np.float64)
    for nodes in range(1, len(tokens)):
        each = order[nodes - 1]
        tokens[nodes] = tokens[nodes - 1] + min(kept[bin_of(each)] * each, 1.0)
    return tokens


@njit(cache=True)
def credit(evidence: Evidence, score: FloatArray, path: IntArray) -> None:
    """Count nodes, float32[N] scores, of which those of `path` were accepted; older ones count for less."""
    for each in score:
        evidence.promised[bin_of(each)] += each
    for node in path:
        evidence.accepted[bin_of(score[node])] += 1.0
    for number in range(_BINS):
        if evidence.promised[number] > _MOST_NODES * 0.5**number:
            evidence.promised[number] *= 0.5
            evidence.accepted[number] *= 0.5


# --- what steps cost

_SHARE = 0.1  # of the last step in what is expected of the next one
_STALL = 1.3  # times what was expected: a step that takes longer has stalled, or compiled something
_FIRST = 0.1  # of a pass: more than that beside it, in a first step, is compilation
_WIDTHS = np.log2(np.maximum(np.arange(65), 1)) / 4
"""Of a pass by its rows: 0 for one row, 1 for 16, by the logarithm, 1.5 for 64 and more."""


@dataclass(slots=True)
class StepCosts:
    """Smoothed seconds by kind of step, and what became of drafts; kept from text to text.

    Passes of one row and of 16 have a pace each, as they differ by how much of the memory's bandwidth other processes
    leave; other passes lie between or beyond, by the logarithm of their rows.
    """

    pace: float = 1.0  # seconds of a pass of one row / those of the cost curve
    wide_pace: float = 1.0  # the same of 16 rows
    drafted: float = 0.0  # seconds of a drafted step's overhead, beside its pass; 0 until there was one
    plain: float = 0.0  # the same of a plain step, without what asking for a draft takes
    rests: Rests = field(default_factory=Rests)
    evidence: Evidence = field(default_factory=empty_evidence)

    def begin_text(self) -> None:
        """Expect half of what wide passes cost beyond narrow ones of late: some of it was the last text's length.

        In a rest nothing is learned of wide passes, and a text too long to draft would keep others from it.
        """
        self.wide_pace = (self.pace + self.wide_pace) / 2

    def passes(self, curve: F64) -> F64:
        """Return what passes take now, float64[M], of what they took when `curve`, float64[M] by rows, was measured."""
        widths = _WIDTHS[np.minimum(np.arange(len(curve)), len(_WIDTHS) - 1)]
        return curve * (self.pace + (self.wide_pace - self.pace) * widths)

    def see(
        self, curve: F64, rows: int, forward_seconds: float, other_seconds: float, draft_seconds: float | None
    ) -> None:
        """Learn from a step; nothing from one whose clock jumped, or with more rows than the curve has.

        `curve`, float64[M], and `rows` are as above; `draft_seconds`, of drafting and learning, are part of
        `other_seconds`, and None where no draft was asked for.
        """
        if not (0 < forward_seconds < np.inf and 0 <= other_seconds < np.inf and rows < len(curve)):
            return
        width, usual = float(_WIDTHS[min(rows, len(_WIDTHS) - 1)]), float(curve[rows])
        known = self.pace + (self.wide_pace - self.pace) * width
        change = _SHARE * (min(forward_seconds / usual, _STALL * known) - known)
        change /= (1 - width) ** 2 + width**2  # a step of normalised least mean squares
        self.pace, self.wide_pace = self.pace + (1 - width) * change, self.wide_pace + width * change
        if draft_seconds is not None:
            self.drafted = _smoothed(self.drafted, other_seconds, _FIRST * usual)
            other_seconds = max(other_seconds - draft_seconds, 0.0)
        self.plain = _smoothed(self.plain, other_seconds, _FIRST * usual)


def _smoothed(known: float, now: float, first: float) -> float:
    """Return what to expect after `now` where `known` was expected; of the first, at most `first` is believed."""
    return known + _SHARE * (min(now, _STALL * known) - known) if known else min(now, first)
