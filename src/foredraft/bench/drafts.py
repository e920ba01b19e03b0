"""Draft statistics: verified and accepted nodes by depth, source and estimated acceptance; and the account of one text.

Counted from recorded verdicts, after the timing. Does not depend on any drafter.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from foredraft.api import Generator, Prompt
from foredraft.bench.metrics import finite, mean
from foredraft.contracts import CostCurve, StepRecord, Verdict
from foredraft.generation import Generation
from foredraft.graph.tree import depths
from foredraft.testing.recording import Recorder

BINS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)  # bin edges of estimated acceptance (chosen; most are near 0)


@dataclass(frozen=True, slots=True)
class Reliability:
    """One bin of nodes with similar estimates: a calibrated drafter has `estimate` equal to `accepted`."""

    low: float  # lower edge of the bin
    high: float  # upper edge
    nodes: int  # number of verified nodes, at least 1
    estimate: float  # mean estimate that the path to a node is accepted
    accepted: float  # share of the nodes that was accepted


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Numbers of verified and accepted nodes of one or more texts, by depth (from 1) and by source.

    `estimated` has for each bin the number of verified nodes, the sum of their estimates, and the number accepted; it
    is empty if the drafter gives no estimates.
    """

    drafted_by_depth: tuple[int, ...]
    accepted_by_depth: tuple[int, ...]
    drafted_by_source: dict[str, int]
    accepted_by_source: dict[str, int]
    estimated: tuple[tuple[float, ...], ...] = ()

    @property
    def reliability(self) -> tuple[Reliability, ...]:
        """The bins with nodes, in ascending order of the estimates."""
        pairs = zip(pairwise(BINS), self.estimated, strict=False)
        return tuple(
            Reliability(low, high, int(nodes), estimates / nodes, accepted / nodes)
            for (low, high), (nodes, estimates, accepted) in pairs
            if nodes
        )

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "DraftCounts":
        by_depth = {name: tuple(body[name]) for name in ("drafted_by_depth", "accepted_by_depth")}
        return cls(**{**body, **by_depth, "estimated": tuple(map(tuple, body["estimated"]))})


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


# --- the account of one text


@dataclass(frozen=True, slots=True)
class Account:
    """The draft statistics of one text, and expected against measured acceptance and cost.

    Both are means by name, NaN if unknown: `tokens` per step with a draft, expected by the drafter's estimates;
    `plain_milliseconds` and `drafted_milliseconds` per pass without and with a draft, expected by the cost curve; and,
    measured only, `overhead_milliseconds`: the time outside the pass per step with a draft.
    """

    generation: Generation
    names: tuple[str, ...]  # source names, in the drafter's order
    counts: DraftCounts
    plain_steps: int  # steps without a draft
    expected: Mapping[str, float]
    measured: Mapping[str, float]

    @property
    def sources(self) -> list[dict[str, Any]]:
        drafted, accepted = Counter(self.counts.drafted_by_source), Counter(self.counts.accepted_by_source)
        wasted = drafted - accepted
        return [
            {"name": name, "drafted": drafted[name], "accepted": accepted[name], "wasted": wasted[name]}
            for name in self.names
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name, without the steps; None for unknown ones."""
        return {
            "plain_steps": self.plain_steps,
            "sources": self.sources,
            "reliability": [asdict(each) for each in self.counts.reliability],
            "statistics": self.generation.statistics.as_dict(),
            "expected": {name: finite(value) for name, value in self.expected.items()},
            "measured": {name: finite(value) for name, value in self.measured.items()},
        }


def account_for(generator: Generator, prompt: Prompt, options: Mapping[str, Any]) -> Account:
    """Generate a text and return its account; raises the errors of `Generator.generate`."""
    drafter = generator.drafter
    generator.drafter = recorded = Recorder(drafter)
    try:
        generation = generator.generate(prompt, **options)
    finally:
        generator.drafter = drafter
    return make_account(generation, recorded.verdicts, tuple(recorded.source_names), generator.cost)


def make_account(
    generation: Generation, verdicts: Sequence[Verdict], names: tuple[str, ...], curve: CostCurve
) -> Account:
    """Return the account of a text, given its verdicts, the source names, and the cost of passes."""

    def forward(step: StepRecord) -> float:
        return step.nanoseconds["forward"] / 1e6

    drafted = [step for step in generation.steps if step.drafted]
    plain = [step for step in generation.steps if not step.drafted]
    milliseconds = 1e3 * curve.table(max((step.drafted for step in drafted), default=0) + 1)
    expected = {
        "tokens": mean(
            1.0 + min(float(draft.score.sum()), float(depths(draft.parents).max()))  # at most the draft's depth
            for draft in (verdict.draft for verdict in verdicts)
            if len(draft) and draft.score is not None
        ),
        "plain_milliseconds": float(milliseconds[1]),
        "drafted_milliseconds": mean(milliseconds[step.drafted + 1] for step in drafted),
    }
    measured = {
        "tokens": mean(len(step.emitted) for step in drafted),
        "plain_milliseconds": mean(forward(step) for step in plain),
        "drafted_milliseconds": mean(forward(step) for step in drafted),
        "overhead_milliseconds": mean(sum(step.nanoseconds.values()) / 1e6 - forward(step) for step in drafted),
    }
    return Account(generation, names, count_drafts(verdicts, names), len(plain), expected, measured)
