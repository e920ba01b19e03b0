"""Draft statistics: verified and accepted nodes by depth, source and estimated acceptance, of one or more texts.

Counted from recorded verdicts, after the timing. Does not depend on any drafter.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import numpy as np

from foredraft.contracts import Verdict
from foredraft.graph.tree import depths

BINS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)  # bin edges of estimated acceptance (chosen; most are near 0)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Numbers of verified and accepted nodes of one or more texts, by depth (from 1) and by source.

    `estimated` has for each bin the number of verified nodes, the sum of their estimates, and the number accepted; it
    is zero, or empty, if the drafter gives no estimates.
    """

    drafted_by_depth: list[int]
    accepted_by_depth: list[int]
    drafted_by_source: dict[str, int]
    accepted_by_source: dict[str, int]
    estimated: list[list[float]]

    @property
    def reliability(self) -> list[dict[str, float]]:
        """The bins with nodes: edges, nodes, mean estimate, and share accepted, which equals it if calibrated."""
        return [
            {"low": low, "high": high, "nodes": int(nodes), "estimate": estimates / nodes, "accepted": accepted / nodes}
            for (low, high), (nodes, estimates, accepted) in zip(pairwise(BINS), self.estimated, strict=False)
            if nodes
        ]


def count_drafts(verdicts: Iterable[Verdict], names: Sequence[str]) -> DraftCounts:
    """Count the nodes of verdicts; `names` are the drafter's source names."""
    drafted, accepted, drafted_by, accepted_by = Counter[int](), Counter[int](), Counter[str](), Counter[str]()
    estimated = np.zeros((len(BINS) - 1, 3))
    for verdict in verdicts:
        draft, path = verdict.draft, list(verdict.path)
        drafted.update(depths(draft.parents).tolist())
        accepted.update(range(1, len(path) + 1))
        sources = [names[number] for number in ([0] * len(draft) if draft.source is None else draft.source.tolist())]
        drafted_by.update(sources)
        accepted_by.update(sources[node] for node in path)
        if draft.score is not None:
            bins = np.clip(np.searchsorted(BINS, draft.score, side="right") - 1, 0, len(BINS) - 2)
            np.add.at(estimated[:, 0], bins, 1.0)
            np.add.at(estimated[:, 1], bins, draft.score)
            np.add.at(estimated[:, 2], bins[path], 1.0)
    by_depth = range(1, max(drafted, default=0) + 1)
    counts = [drafted[depth] for depth in by_depth], [accepted[depth] for depth in by_depth]
    return DraftCounts(*counts, dict(drafted_by), dict(accepted_by), estimated.tolist())


def add_counts(parts: Sequence[DraftCounts]) -> DraftCounts:
    """Return the sum of several texts' counts."""

    def by_depth(name: str) -> list[int]:
        return list(map(sum, zip_longest(*(getattr(each, name) for each in parts), fillvalue=0)))

    def by_source(name: str) -> dict[str, int]:
        return dict(sum((Counter(getattr(each, name)) for each in parts), Counter()))

    estimated = sum((np.array(each.estimated) for each in parts if each.estimated), np.zeros((len(BINS) - 1, 3)))
    return DraftCounts(
        by_depth("drafted_by_depth"), by_depth("accepted_by_depth"), by_source("drafted_by_source"),
        by_source("accepted_by_source"), estimated.tolist(),
    )  # fmt: skip
