"""The account of one text: which sources drafted, what came of it, and what was believed beforehand.

Listens to a drafter at work; changes neither drafts nor text. Does not know how drafts are made.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from foredraft.api import Generator, Prompt
from foredraft.bench.drafts import DraftCounts, RecordedDrafter, count_drafts
from foredraft.bench.metrics import finite, mean
from foredraft.contracts import CostCurve, Draft, StepRecord, Verdict
from foredraft.generation import Generation
from foredraft.graph.tree import depths


@dataclass(frozen=True, slots=True)
class Account:
    """One text's account.

    Attributes:
        generation: what was written.
        names: of the drafter's sources, in its order.
        counts: what became of the drafts.
        plain_steps: steps without a draft.
        tokens_believed: of a step with a draft, by the drafter's own estimates; NaN where it gives none.
        tokens_happened: of a step with a draft; NaN where there was none.
        plain_milliseconds_believed: of a forward pass of one row, by the measured curve.
        plain_milliseconds_happened: in this text's plain steps; NaN where there was none.
        drafted_milliseconds_believed: of the passes with drafts, by the curve.
        drafted_milliseconds_happened: in this text.
        beside_milliseconds: of a step with a draft, everything but its forward pass.
    """

    generation: Generation
    names: tuple[str, ...]
    counts: DraftCounts
    plain_steps: int
    tokens_believed: float
    tokens_happened: float
    plain_milliseconds_believed: float
    plain_milliseconds_happened: float
    drafted_milliseconds_believed: float
    drafted_milliseconds_happened: float
    beside_milliseconds: float

    @property
    def sources(self) -> list[dict[str, Any]]:
        """Of each source its name, how many nodes were drafted, accepted, and wasted."""
        drafted, accepted = Counter(self.counts.drafted_by_source), Counter(self.counts.accepted_by_source)
        return [
            {"name": name, "drafted": drafted[name], "accepted": accepted[name],
             "wasted": drafted[name] - accepted[name]}
            for name in self.names
        ]  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name, None for what there was none of, without the steps."""
        left_out = ("generation", "names", "counts")
        figures = {name: value for name, value in asdict(self).items() if name not in left_out}
        figures["sources"] = self.sources
        figures["reliability"] = [asdict(each) for each in self.counts.reliability]
        figures["statistics"] = self.generation.statistics.as_dict()
        return {name: finite(value) if isinstance(value, float) else value for name, value in figures.items()}


def account_for(generator: Generator, prompt: Prompt, options: Mapping[str, Any]) -> Account:
    """Write a text and account for it.

    Args:
        generator: ready.
        prompt: as `Generator.generate` takes it.
        options: generation arguments.

    Raises:
        UsageError: what cannot be honoured.
    """
    drafter = generator.drafter
    listening = RecordedDrafter(drafter)
    generator.drafter = listening
    try:
        generation = generator.generate(prompt, **options)
    finally:
        generator.drafter = drafter
    return make_account(generation, listening.verdicts, tuple(listening.source_names), generator.cost)


def make_account(
    generation: Generation, verdicts: Sequence[Verdict], names: tuple[str, ...], curve: CostCurve
) -> Account:
    """Add up the verdicts of a text.

    Args:
        generation: the text.
        verdicts: of its steps, or of those that drafted something, in order.
        names: of the sources.
        curve: what passes cost.
    """
    drafted = [verdict for verdict in verdicts if len(verdict.draft)]
    scored = [verdict for verdict in drafted if verdict.draft.score is not None]
    with_draft = [step for step in generation.steps if step.drafted]
    plain = [step for step in generation.steps if not step.drafted]
    seconds = curve.table(max((step.drafted for step in with_draft), default=0) + 1)
    return Account(
        generation=generation,
        names=names,
        counts=count_drafts(drafted, names),
        plain_steps=len(plain),
        tokens_believed=mean(_believed_tokens(verdict.draft) for verdict in scored),
        tokens_happened=mean(len(step.emitted) for step in with_draft),
        plain_milliseconds_believed=1e3 * float(seconds[1]),
        plain_milliseconds_happened=mean(_forward_ms(step) for step in plain),
        drafted_milliseconds_believed=mean(1e3 * float(seconds[step.drafted + 1]) for step in with_draft),
        drafted_milliseconds_happened=mean(_forward_ms(step) for step in with_draft),
        beside_milliseconds=mean(sum(step.nanoseconds.values()) / 1e6 - _forward_ms(step) for step in with_draft),
    )


def _believed_tokens(draft: Draft) -> float:
    """Return the expected tokens of a step: its own one, and at most as many drafted ones as the draft is deep."""
    score = draft.score if draft.score is not None else np.empty(0, np.float32)
    return 1.0 + min(float(score.sum()), float(depths(draft.parents).max(initial=0)))


def _forward_ms(step: StepRecord) -> float:
    return step.nanoseconds["forward"] / 1e6
