"""Decoding with a drafter on the toy target, or on another one, and recording the drafter's calls.

Depends on the engine, not on what the record should contain or on any particular drafter.
"""

from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from foredraft.contracts import Budget, Draft, DraftContext, Drafter, SequenceView, Target, TokenIds, Verdict
from foredraft.control import FixedControl
from foredraft.engine.batch import steps
from foredraft.engine.run import Run
from foredraft.engine.state import SequenceState
from foredraft.sampling import SamplingOptions
from foredraft.testing.toy import ToyTarget

NEW_TOKENS = 32
_GREEDY = SamplingOptions()
_NODES = 16  # budget of a step without a control


@dataclass(slots=True)
class Step:
    """One call of a drafter."""

    ids: TokenIds
    budget: Budget
    draft: Draft
    verdict: Verdict | None = None


class Recorder:
    """Wraps a drafter for one sequence at a time, and keeps its calls for the last one.

    A step takes well under a microsecond longer, because only references are kept.
    """

    name: ClassVar[str] = "recorder"

    def __init__(self, drafter: Drafter, *, every_step: bool | None = None) -> None:
        self.drafter = drafter
        self.name = drafter.name  # type: ignore[misc]  # failures are reported under the wrapped drafter's name
        self.source_names = drafter.source_names
        self.needs = drafter.needs if every_step is None else replace(drafter.needs, every_step=every_step)
        self.steps: list[Step] = []

    @property
    def verdicts(self) -> list[Verdict]:
        return [step.verdict for step in self.steps if step.verdict is not None]

    def open(self, context: DraftContext) -> "Recorder":
        self._drafting, self.steps = self.drafter.open(context), []
        return self

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        draft = self._drafting.propose(view, budget)
        self.steps.append(Step(view.ids, budget, draft))
        return draft

    def observe(self, verdict: Verdict) -> None:
        self._drafting.observe(verdict)
        self.steps[-1].verdict = verdict

    def close(self) -> None:
        self._drafting.close()


def begun(
    drafter: Drafter, prompt: TokenIds, options: SamplingOptions = _GREEDY, new_tokens: int = NEW_TOKENS,
    control: FixedControl | None = None, target: Target | None = None,
) -> Run:  # fmt: skip
    """Return the run of a text after `prompt`, int64[n], on the toy target or another one."""
    target, control = target or ToyTarget(), control or FixedControl(_NODES)
    seq = SequenceState(prompt, options, max_new_tokens=new_tokens)
    context = DraftContext(target.vocabulary, options.seed, settings=asdict(options))
    return Run(seq, drafter, control, context, target)


def written(run: Run) -> SequenceState:
    """Return the sequence of a run, decoded to its end."""
    for _ in steps(run):
        pass
    return run.seq
