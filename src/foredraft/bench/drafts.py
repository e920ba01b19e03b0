"""What becomes of drafts: which tokens were verified, how deep, by whom, and how far their estimates were right.

Knows verdicts and the drafter's protocol. A note is a reference to the verdict, so noting costs a step well under a
microsecond; what the notes add up to is worked out after the clock has stopped.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from foredraft.contracts import Budget, Draft, DraftContext, Drafter, Drafting, SequenceView, Verdict
from foredraft.generation import Generation
from foredraft.graph.tree import depths

BINS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Edges of the bins of estimated acceptance."""


@dataclass(frozen=True, slots=True)
class Reliability:
    """Nodes of about the same estimate: a drafter is calibrated where `believed` is `happened`.

    Attributes:
        low: least estimate that the path down to a node is accepted.
        high: the greatest.
        nodes: how many were verified, at least one.
        believed: their mean estimate.
        happened: share that was accepted.
    """

    low: float
    high: float
    nodes: int
    believed: float
    happened: float


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What became of the drafts of one text, or of several.

    Attributes:
        drafted_by_depth: nodes verified at depth 1, 2, ...
        accepted_by_depth: of them, accepted.
        drafted_by_source: nodes verified, by who drafted them.
        accepted_by_source: of them, accepted.
        estimated: by bin of estimates: nodes verified, the sum of their estimates, and of them accepted; empty where
            the drafter gives no estimates.
    """

    drafted_by_depth: tuple[int, ...]
    accepted_by_depth: tuple[int, ...]
    drafted_by_source: dict[str, int]
    accepted_by_source: dict[str, int]
    estimated: tuple[tuple[float, float, float], ...] = ()

    @property
    def reliability(self) -> tuple[Reliability, ...]:
        """The bins that have nodes, from the lowest estimates to the highest."""
        pairs = zip(pairwise(BINS), self.estimated, strict=False)
        return tuple(
            Reliability(low, high, int(nodes), believed / nodes, accepted / nodes)
            for (low, high), (nodes, believed, accepted) in pairs
            if nodes
        )


@dataclass(frozen=True, slots=True)
class Guesses:
    """One step of an example.

    Attributes:
        emitted: the tokens it added to the text, each as text.
        sources: for each of them, who drafted it, or None for the target's own.
        wasted: the drafted tokens that were not accepted, each as text.
    """

    emitted: tuple[str, ...]
    sources: tuple[str | None, ...]
    wasted: tuple[str, ...]


class DraftTally:
    """Counts what becomes of drafts, verdict after verdict, so that none need be kept.

    Args:
        names: of the drafter's sources.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._drafted: Counter[int] = Counter()
        self._accepted: Counter[int] = Counter()
        self._drafted_by: Counter[str] = Counter()
        self._accepted_by: Counter[str] = Counter()
        self._estimated = np.zeros((len(BINS) - 1, 3))

    def add(self, verdict: Verdict) -> None:
        """Count a draft's nodes."""
        draft, path = verdict.draft, list(verdict.path)
        self._drafted.update(depths(draft.parents).tolist())
        self._accepted.update(range(1, len(path) + 1))
        numbers = [0] * len(draft) if draft.source is None else draft.source.tolist()
        self._drafted_by.update(self._names[number] for number in numbers)
        self._accepted_by.update(self._names[numbers[node]] for node in path)
        if draft.score is not None:
            bins = np.clip(np.searchsorted(BINS, draft.score, side="right") - 1, 0, len(BINS) - 2)
            np.add.at(self._estimated[:, 0], bins, 1.0)
            np.add.at(self._estimated[:, 1], bins, draft.score)
            np.add.at(self._estimated[:, 2], bins[path], 1.0)

    def counts(self) -> DraftCounts:
        """Return what was counted so far."""
        by_depth = range(1, max(self._drafted, default=0) + 1)
        return DraftCounts(
            tuple(self._drafted[depth] for depth in by_depth),
            tuple(self._accepted[depth] for depth in by_depth),
            dict(self._drafted_by),
            dict(self._accepted_by),
            _bins(self._estimated) if self._estimated.any() else (),
        )


def _bins(sums: npt.NDArray[np.float64]) -> tuple[tuple[float, float, float], ...]:
    return tuple((nodes, believed, accepted) for nodes, believed, accepted in sums.tolist())


def count_drafts(verdicts: Iterable[Verdict], names: Sequence[str]) -> DraftCounts:
    """Add up what became of the drafts of a text.

    Args:
        verdicts: of its steps, or of those that drafted something.
        names: of the drafter's sources.
    """
    tally = DraftTally(names)
    for verdict in verdicts:
        tally.add(verdict)
    return tally.counts()


def add_counts(parts: Sequence[DraftCounts]) -> DraftCounts:
    """Return the sum of several texts' counts."""

    def by_place(name: str) -> tuple[int, ...]:
        return tuple(map(sum, zip_longest(*(getattr(each, name) for each in parts), fillvalue=0)))

    def by_name(name: str) -> dict[str, int]:
        return dict(sum((Counter(getattr(each, name)) for each in parts), Counter()))

    estimated = np.array([each.estimated for each in parts if each.estimated], np.float64).sum(0)
    return DraftCounts(
        by_place("drafted_by_depth"), by_place("accepted_by_depth"), by_name("drafted_by_source"),
        by_name("accepted_by_source"), _bins(estimated) if estimated.ndim else (),
    )  # fmt: skip


class RecordedDrafter:
    """A drafter whose verdicts are kept, those of the last text opened, as far as it is told them.

    Args:
        drafter: the one to listen to.
    """

    name: ClassVar[str] = "recorded"

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name = drafter.name  # type: ignore[misc]  # a failure is told under the name of who failed
        self.needs = drafter.needs
        self.source_names = drafter.source_names
        self.verdicts: list[Verdict] = []

    def open(self, context: DraftContext) -> Drafting:
        """Forget the last text's verdicts and begin another one."""
        self.verdicts = []
        return _RecordedDrafting(self._drafter.open(context), self.verdicts)

    def counts(self) -> DraftCounts:
        """Add up what became of the drafts."""
        return count_drafts(self.verdicts, self.source_names)

    def guesses(self, tokenizer: Any, written: Generation) -> tuple[Guesses, ...]:
        """Return every step of the text that was written last, with its tokens as text."""
        steps, at, verdict_at = [], written.prompt_length - 1, {verdict.at: verdict for verdict in self.verdicts}
        for step in written.steps:
            emitted, verdict = tuple(tokenizer.decode([token]) for token in step.emitted), verdict_at.get(at)
            drafted = [] if verdict is None else enumerate(verdict.draft.tokens.tolist())
            path = () if verdict is None else verdict.path
            wasted = tuple(tokenizer.decode([token]) for node, token in drafted if node not in path)
            steps.append(Guesses(emitted, step.sources, wasted))
            at += len(step.emitted)
        return tuple(steps)


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
