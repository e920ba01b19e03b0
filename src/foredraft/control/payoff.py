"""What drafting pays: how likely nodes are accepted, what number of them writes most a second, and when to stop.

Knows scores, tokens and seconds; not what is drafted, nor by whom.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.contracts import Draft
from foredraft.graph.tree import FloatArray, IntArray, depths

F64 = npt.NDArray[np.float64]

PATIENCE = 4
"""Tries in a row that do not pay, before there is a rest: less, and chance makes drafting rest that pays."""
_LONGEST_REST = 64  # steps: a try for nothing takes less than half a step, so it costs less than 1 % of the time
_BINS = 12  # of scores, by powers of two: [1/2, 1], [1/4, 1/2), ...
_PRIOR_NODES = 18.0  # of each bin, accepted as often as those of all bins are, before the first was seen
_PRIOR_TOKENS = 3.0  # promised and accepted over all bins, before the first was seen
_MOST_NODES = 400.0  # of a bin; beyond, older ones count for half


@dataclass(slots=True)
class Rests:
    """The rule by which everything that costs time is stopped where it does not pay, and tried again.

    After 4 tries in a row that did not pay there is a rest of 1 step, after one more a rest of 2, then 4, up to 64.
    One that pays ends this.

    Attributes:
        unpaid: tries in a row that did not pay.
        left: steps that are left of a rest.
    """

    unpaid: int = 0
    left: int = 0

    @property
    def is_trial(self) -> bool:
        """Whether the next try comes after a rest; it is made whatever is expected of it, so that estimates renew."""
        return self.unpaid >= PATIENCE

    def tried(self, *, paid: bool) -> None:
        """Count a try."""
        self.unpaid = 0 if paid else min(self.unpaid + 1, PATIENCE + _LONGEST_REST.bit_length() - 1)
        self.left = 1 << (self.unpaid - PATIENCE) if self.is_trial else 0

    def passed(self) -> None:
        """Count a step of a rest."""
        self.left = max(self.left - 1, 0)


@njit(cache=True)
def best_number(tokens: F64, seconds: F64, cheap: int = 0, margin: float = 1.0) -> int:
    """Return the number, of nodes or levels or anything else, that writes the most tokens a second.

    Args:
        tokens: float64[N + 1], those expected of a step with each number; the first is a plain step.
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


class Evidence(NamedTuple):
    """What became of drafted nodes, by bins of their scores, float64[12] each.

    Attributes:
        accepted: nodes.
        promised: the sum of the scores of all nodes.
    """

    accepted: F64
    promised: F64


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
    found = np.empty(_BINS, np.float64)
    for number in range(_BINS):
        prior = _PRIOR_NODES * 0.5**number
        found[number] = (evidence.accepted[number] + prior * overall) / (evidence.promised[number] + prior)
    return found


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
