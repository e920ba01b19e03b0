"""How far a drafter's estimates were right: nodes of about the same estimate, and the share of them that was accepted.

Knows verdicts; not who drafted, nor what wrote the text.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from foredraft.contracts import Verdict

BINS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Edges of the bins of estimated acceptance."""


@dataclass(frozen=True, slots=True)
class Reliability:
    """Nodes of about the same estimate: a drafter is calibrated where `believed` is `happened`.

    Attributes:
        low: least estimate that the path down to a node is accepted.
        high: the greatest.
        nodes: how many were verified.
        believed: their mean estimate; NaN without nodes.
        happened: share that was accepted; NaN without nodes.
    """

    low: float
    high: float
    nodes: int
    believed: float
    happened: float


class ReliabilityTally:
    """Counts nodes by bins of their estimates, verdict after verdict, so that none need be kept."""

    def __init__(self) -> None:
        self._nodes = np.zeros(len(BINS) - 1, np.int64)
        self._believed, self._accepted = np.zeros(len(BINS) - 1), np.zeros(len(BINS) - 1)

    def add(self, verdict: Verdict) -> None:
        """Count a draft's nodes; one without estimates has none to count."""
        score = verdict.draft.score
        if score is None:
            return
        bins = np.clip(np.searchsorted(BINS, score, side="right") - 1, 0, len(BINS) - 2)
        np.add.at(self._nodes, bins, 1)
        np.add.at(self._believed, bins, score)
        np.add.at(self._accepted, bins[list(verdict.path)], 1.0)

    def curve(self) -> tuple[Reliability, ...]:
        """Return every bin, from the lowest estimates to the highest."""
        found = []
        for number, (low, high) in enumerate(itertools.pairwise(BINS)):
            nodes = int(self._nodes[number])
            believed, accepted = float(self._believed[number]), float(self._accepted[number])
            shares = (believed / nodes, accepted / nodes) if nodes else (float("nan"), float("nan"))
            found.append(Reliability(low, high, nodes, *shares))
        return tuple(found)


def reliability(verdicts: Iterable[Verdict]) -> tuple[Reliability, ...]:
    """Return the curve of some verdicts."""
    tally = ReliabilityTally()
    for verdict in verdicts:
        tally.add(verdict)
    return tally.curve()
