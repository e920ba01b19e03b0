"""How likely the nodes of a draft are accepted: their scores, against what became of nodes with a like score so far.

Knows scores and accepted paths, and what passes cost; not drafters, nor when to draft.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.tree import FloatArray, IntArray, depths

F64 = npt.NDArray[np.float64]

_SCORE_BINS = 12  # by powers of two: [1/2, 1], [1/4, 1/2), ...
_BIN_NODES = 24.0  # nodes of each bin seen before the first step, as it were, accepted as those of all bins are
USUAL_SCORE = 0.7  # of the first bin while it has not been seen; of each further one, half as much
_PRIOR_RATIO, _PRIOR_PROMISED = 1.0, 3.0  # accepted nodes / the sum of scores, and the sum that this is worth
_MOST_NODES_SEEN = 400.0


class Evidence(NamedTuple):
    """What became of nodes, by bins of their scores, float64[12] each.

    Attributes:
        seen: nodes verified.
        accepted: of them.
        promised: the sum of their scores.
    """

    seen: F64
    accepted: F64
    promised: F64


def empty_evidence() -> Evidence:
    """Return evidence of nothing yet."""
    return Evidence(*(np.zeros(_SCORE_BINS) for _ in range(3)))


def guessed_scores(parents: IntArray) -> FloatArray:
    """Return scores for a draft whose drafter gave none: a typical guess's rate, to the power of the depth."""
    return np.power(np.float32(0.6), depths(parents)).astype(np.float32)


@njit(cache=True)
def halvings(score: float) -> int:
    """Return the bin of a score: how often it halves."""
    return min(max(int(np.floor(-np.log2(max(score, 1e-6)))), 0), _SCORE_BINS - 1)


@njit(cache=True)
def chances(evidence: Evidence) -> F64:
    """Return how likely a node of each bin is accepted, float64[12].

    With few nodes seen, it is their scores times the ratio of accepted to promised over all bins.
    """
    ratio = (evidence.accepted.sum() + _PRIOR_PROMISED * _PRIOR_RATIO) / (evidence.promised.sum() + _PRIOR_PROMISED)
    found = np.empty(_SCORE_BINS, np.float64)
    for number in range(_SCORE_BINS):
        seen = evidence.seen[number]
        score = evidence.promised[number] / seen if seen > 0 else USUAL_SCORE * 0.5**number
        found[number] = (evidence.accepted[number] + _BIN_NODES * min(ratio * score, 1.0)) / (seen + _BIN_NODES)
    return found


@njit(cache=True)
def best_count(
    score: FloatArray, evidence: Evidence, passes: F64, seconds: tuple[float, float], depth: int,
    cheap: tuple[int, float],
) -> int:  # fmt: skip
    """Return how many of the best nodes are worth verifying: the number with the most expected tokens per second.

    Args:
        score: float32[N].
        evidence: what became of nodes.
        passes: float64[M + 2], seconds of a pass by rows; at most M nodes are worth a thought.
        seconds: of a plain step, and of a drafted step beside its pass.
        depth: no more tokens than that can be accepted.
        cheap: nodes that are verified wherever one is worth it; more must promise so many times their tokens a second.
    """
    chance = chances(evidence)
    order = np.sort(score)
    plain, overhead = seconds
    least, margin = cheap
    best, needed, highest, expected = 0, 0.0, 0.0, 0.0
    for nodes in range(1, min(len(score), len(passes) - 2) + 1):
        expected += chance[halvings(order[len(score) - nodes])]
        rate = (1.0 + min(expected, depth)) / (passes[nodes + 1] + overhead)
        if nodes <= least:
            best, highest, needed = nodes, rate, margin * rate
        elif rate > needed:
            best, highest, needed = nodes, rate, rate
    return best if highest * plain > 1.0 else 0


@njit(cache=True)
def credit(evidence: Evidence, score: FloatArray, path: IntArray) -> None:
    """Count the nodes of a draft, float32[N] scores, of which `path` was accepted; older evidence counts for less."""
    for each in score:
        number = halvings(each)
        evidence.seen[number] += 1.0
        evidence.promised[number] += each
    for node in path:
        evidence.accepted[halvings(score[node])] += 1.0
    for number in range(_SCORE_BINS):
        if evidence.seen[number] > _MOST_NODES_SEEN:
            evidence.seen[number] *= 0.5
            evidence.promised[number] *= 0.5
            evidence.accepted[number] *= 0.5
