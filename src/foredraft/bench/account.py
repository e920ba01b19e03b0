"""The account of one text: which sources drafted, what came of it, and how far estimates and the cost curve were right.

Listens to a drafter at work; changes neither drafts nor text. Does not know how drafts are made.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foredraft.api import Generator, Prompt
from foredraft.bench.drafts import DraftCounts, RecordedDrafter, count_drafts
from foredraft.bench.metrics import finite, mean
from foredraft.contracts import CostCurve, StepRecord, Verdict
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
        expected: means by name, NaN where there is none: `tokens` of a step with a draft, by the drafter's estimates;
            `plain_milliseconds` and `drafted_milliseconds` of the passes without and with a draft, by the cost curve.
        measured: the same means of this text, and `overhead_milliseconds`: everything but the pass of a step with a
            draft.
    """

    generation: Generation
    names: tuple[str, ...]
    counts: DraftCounts
    plain_steps: int
    expected: Mapping[str, float]
    measured: Mapping[str, float]

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
        means = {"expected": self.expected, "measured": self.measured}
        return {
            "plain_steps": self.plain_steps,
            "sources": self.sources,
            "reliability": [asdict(each) for each in self.counts.reliability],
            "statistics": self.generation.statistics.as_dict(),
            **{key: {name: finite(value) for name, value in each.items()} for key, each in means.items()},
        }


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
    drafted = [step for step in generation.steps if step.drafted]
    plain = [step for step in generation.steps if not step.drafted]
    scored = [verdict for verdict in verdicts if len(verdict.draft) and verdict.draft.score is not None]
    seconds = curve.table(max((step.drafted for step in drafted), default=0) + 1)
    expected = {
        "tokens": mean(_expected_tokens(verdict) for verdict in scored),
        "plain_milliseconds": 1e3 * float(seconds[1]),
        "drafted_milliseconds": mean(1e3 * float(seconds[step.drafted + 1]) for step in drafted),
    }
    measured = {
        "tokens": mean(len(step.emitted) for step in drafted),
        "plain_milliseconds": mean(_forward_ms(step) for step in plain),
        "drafted_milliseconds": mean(_forward_ms(step) for step in drafted),
        "overhead_milliseconds": mean(sum(step.nanoseconds.values()) / 1e6 - _forward_ms(step) for step in drafted),
    }
    return Account(generation, names, count_drafts(verdicts, names), len(plain), expected, measured)


def _expected_tokens(verdict: Verdict) -> float:
    """Return the expected tokens of a step: its own one, and at most as many drafted ones as the draft is deep."""
    draft = verdict.draft
    accepted = 0.0 if draft.score is None else float(draft.score.sum())
    return 1.0 + min(accepted, float(depths(draft.parents).max(initial=0)))


def _forward_ms(step: StepRecord) -> float:
    return step.nanoseconds["forward"] / 1e6
