"""A drafter that notes what becomes of another one's drafts: which tokens were verified, how deep, by whom.

Knows the drafter's protocol. A note is a reference to the verdict, so noting costs a step well under a microsecond;
what the notes add up to is worked out after the clock has stopped.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from foredraft.contracts import Budget, Draft, DraftContext, Drafter, Drafting, SequenceView, Verdict
from foredraft.generation import Generation
from foredraft.graph.tree import depths


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What became of the drafts of one text.

    Attributes:
        drafted_by_depth: nodes verified at depth 1, 2, ...
        accepted_by_depth: of them, accepted.
        drafted_by_source: nodes verified, by who drafted them.
        accepted_by_source: of them, accepted.
    """

    drafted_by_depth: tuple[int, ...]
    accepted_by_depth: tuple[int, ...]
    drafted_by_source: dict[str, int]
    accepted_by_source: dict[str, int]


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


def count_drafts(verdicts: Iterable[Verdict], names: Sequence[str]) -> DraftCounts:
    """Add up what became of the drafts of a text.

    Args:
        verdicts: of its steps, or of those that drafted something.
        names: of the drafter's sources.
    """
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    drafted_by: Counter[str] = Counter()
    accepted_by: Counter[str] = Counter()
    for verdict in verdicts:
        drafted.update(depths(verdict.draft.parents).tolist())
        accepted.update(range(1, len(verdict.path) + 1))
        sources = _names_of(verdict.draft, names)
        drafted_by.update(sources)
        accepted_by.update(sources[node] for node in verdict.path)
    deepest = max(drafted, default=0)
    return DraftCounts(
        tuple(drafted[depth] for depth in range(1, deepest + 1)),
        tuple(accepted[depth] for depth in range(1, deepest + 1)),
        dict(drafted_by),
        dict(accepted_by),
    )


def _names_of(draft: Draft, names: Sequence[str]) -> list[str]:
    """Return who drafted each node."""
    source = np.zeros(len(draft), np.uint8) if draft.source is None else draft.source
    return [names[number] for number in source.tolist()]


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
