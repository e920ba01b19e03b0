"""What becomes of drafts: how many nodes were verified and accepted, by depth, by source and by estimate.

Knows verdicts and the drafter's protocol. A recorded step costs a reference to its verdict, well under a microsecond;
the counting is done after the clock has stopped.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any, ClassVar

import numpy as np

from foredraft.contracts import Budget, Draft, DraftContext, Drafter, Drafting, SequenceView, Verdict
from foredraft.graph.tree import depths

BINS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Edges of the bins of estimated acceptance."""


@dataclass(frozen=True, slots=True)
class Reliability:
    """Nodes of about the same estimate: a drafter is calibrated where `estimate` equals `accepted`.

    Attributes:
        low: least estimate of the bin.
        high: its greatest.
        nodes: how many were verified, at least one.
        estimate: the mean estimate that the path down to a node is accepted.
        accepted: the share of the nodes that was accepted.
    """

    low: float
    high: float
    nodes: int
    estimate: float
    accepted: float


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What became of the drafts of one text, or of several.

    Attributes:
        drafted_by_depth: nodes verified at depth 1, 2, ...
        accepted_by_depth: of them, accepted.
        drafted_by_source: nodes verified, by the name of the source that drafted them.
        accepted_by_source: of them, accepted.
        estimated: of each bin: nodes verified, the sum of their estimates, and how many were accepted; empty where the
            drafter gives no estimates.
    """

    drafted_by_depth: tuple[int, ...]
    accepted_by_depth: tuple[int, ...]
    drafted_by_source: dict[str, int]
    accepted_by_source: dict[str, int]
    estimated: tuple[tuple[float, ...], ...] = ()

    @property
    def reliability(self) -> tuple[Reliability, ...]:
        """The bins that have nodes, from the lowest estimates to the highest."""
        pairs = zip(pairwise(BINS), self.estimated, strict=False)
        return tuple(
            Reliability(low, high, int(nodes), estimates / nodes, accepted / nodes)
            for (low, high), (nodes, estimates, accepted) in pairs
            if nodes
        )

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "DraftCounts":
        """Return the counts that `dataclasses.asdict` and JSON made lists of."""
        names = ("drafted_by_depth", "accepted_by_depth")
        estimated = tuple(map(tuple, body["estimated"]))
        return cls(**{**body, **{name: tuple(body[name]) for name in names}, "estimated": estimated})


def count_drafts(verdicts: Iterable[Verdict], names: Sequence[str]) -> DraftCounts:
    """Count what became of drafts; an iterator's verdicts need not be kept.

    Args:
        verdicts: of the steps of a text, or of several; steps without a draft count for nothing.
        names: of the drafter's sources.
    """
    drafted, accepted, drafted_by, accepted_by = Counter[int](), Counter[int](), Counter[str](), Counter[str]()
    estimated = np.zeros((len(BINS) - 1, 3))
    for verdict in verdicts:
        draft, path = verdict.draft, list(verdict.path)
        drafted.update(depths(draft.parents).tolist())
        accepted.update(range(1, len(path) + 1))
        numbers = [0] * len(draft) if draft.source is None else draft.source.tolist()
        drafted_by.update(names[number] for number in numbers)
        accepted_by.update(names[numbers[node]] for node in path)
        if draft.score is not None:
            bins = np.clip(np.searchsorted(BINS, draft.score, side="right") - 1, 0, len(BINS) - 2)
            np.add.at(estimated[:, 0], bins, 1.0)
            np.add.at(estimated[:, 1], bins, draft.score)
            np.add.at(estimated[:, 2], bins[path], 1.0)
    by_depth = range(1, max(drafted, default=0) + 1)
    return DraftCounts(
        tuple(drafted[depth] for depth in by_depth), tuple(accepted[depth] for depth in by_depth), dict(drafted_by),
        dict(accepted_by), tuple(map(tuple, estimated.tolist())) if estimated.any() else (),
    )  # fmt: skip


def add_counts(parts: Sequence[DraftCounts]) -> DraftCounts:
    """Return the sum of several texts' counts."""

    def by_depth(name: str) -> tuple[int, ...]:
        return tuple(map(sum, zip_longest(*(getattr(each, name) for each in parts), fillvalue=0)))

    def by_source(name: str) -> dict[str, int]:
        return dict(sum((Counter(getattr(each, name)) for each in parts), Counter()))

    estimated = np.array([each.estimated for each in parts if each.estimated], np.float64).sum(0)
    return DraftCounts(
        by_depth("drafted_by_depth"), by_depth("accepted_by_depth"), by_source("drafted_by_source"),
        by_source("accepted_by_source"), tuple(map(tuple, estimated.tolist())) if estimated.ndim else (),
    )  # fmt: skip


class RecordedDrafter:
    """A drafter that keeps the verdicts of the text that was opened last, as far as it is told them.

    Args:
        drafter: the one to record.
    """

    name: ClassVar[str] = "recorded"

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name = drafter.name  # type: ignore[misc]  # a failure is reported under the name of the drafter that failed
        self.needs = drafter.needs
        self.source_names = drafter.source_names
        self.verdicts: list[Verdict] = []

    def open(self, context: DraftContext) -> Drafting:
        """Forget the last text's verdicts and begin another one."""
        self.verdicts = []
        return _RecordedDrafting(self._drafter.open(context), self.verdicts)

    def counts(self) -> DraftCounts:
        """Return what became of the drafts."""
        return count_drafts(self.verdicts, self.source_names)


class _RecordedDrafting:
    def __init__(self, drafting: Drafting, verdicts: list[Verdict]) -> None:
        self._drafting = drafting
        self._verdicts = verdicts

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        return self._drafting.propose(view, budget)

    def observe(self, verdict: Verdict) -> None:
        self._drafting.observe(verdict)
        self._verdicts.append(verdict if verdict.hidden is None else dataclasses.replace(verdict, hidden=None))

    def close(self) -> None:
        self._drafting.close()
