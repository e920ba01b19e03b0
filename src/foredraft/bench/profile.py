"""Where a method's tokens and time go: acceptance by depth and by estimate, loans, and the parts of a step.

The figures of GSD's tables 1 and 3 (Gong et al. 2024) and of EESD's tables 1, 4 and 8 (Liu et al. 2024). Knows the
generator's surface and step records.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foredraft.api import Generator
from foredraft.bench.method import BASE, Method, attach, use
from foredraft.bench.recording import RecordedDrafter
from foredraft.bench.reliability import Reliability, ReliabilityTally
from foredraft.bench.tasks import TaskPrompt
from foredraft.bench.writer import time_split
from foredraft.contracts import Learner, StepRecord
from foredraft.control import StepCosts
from foredraft.engine.statistics import harmonic_mean
from foredraft.generation import Generation

DEPTHS = 8


@dataclass(frozen=True, slots=True)
class Profile:
    """A method over all prompts.

    Attributes:
        method: the label.
        tokens: emitted.
        steps: target forwards after prefill.
        drafted: nodes verified.
        accepted: of them, emitted.
        merged: of the accepted, those that came through a loan of a draft graph.
        reached: of all steps, the share that emitted at least 1, 2, ... drafted tokens.
        draft_ms: milliseconds of drafting an emitted token.
        forward_ms: likewise, of the target's passes.
        other_ms: likewise, of all else.
        speed_up: plain decoding's decode time a token, on the same prompts in the same run, over this method's.
        reliability: how far the drafter's estimates were right; all empty where it gives none.
    """

    method: str
    tokens: int
    steps: int
    drafted: int
    accepted: int
    merged: int
    reached: tuple[float, ...]
    draft_ms: float
    forward_ms: float
    other_ms: float
    speed_up: float
    reliability: tuple[Reliability, ...]

    @property
    def tokens_per_target_step(self) -> float:
        """Emitted tokens / steps."""
        return self.tokens / max(self.steps, 1)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted tokens; EESD's v_d."""
        return self.accepted / max(self.drafted, 1)

    @property
    def drafted_share(self) -> float:
        """Accepted / emitted tokens; EESD's r_d."""
        return self.accepted / max(self.tokens, 1)

    @property
    def harmonic_mean(self) -> float:
        """2 v_d r_d / (v_d + r_d), EESD's HM, as a fraction."""
        return harmonic_mean(self.draft_acceptance_rate, self.drafted_share)

    @property
    def cost_ratio(self) -> float:
        """Time of drafting one token over that of a plain step, EESD's alpha; 0 where nothing was drafted."""
        plain_ms = self.speed_up * (self.draft_ms + self.forward_ms + self.other_ms)
        return self.draft_ms * self.tokens / self.drafted / max(plain_ms, 1e-9) if self.drafted else 0.0

    @property
    def modelled_speed_up(self) -> float:
        """What EESD's cost model expects (its equations 13 and 14), where a verification costs what a plain step does.

        A text of L tokens takes r_d L / v_d drafted tokens and (1 - r_d) L steps.
        """
        v_d, r_d = self.draft_acceptance_rate, self.drafted_share
        return v_d / ((self.cost_ratio - v_d) * r_d + v_d) if v_d else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return every figure by name; bins of estimates without nodes are left out."""
        names = "tokens_per_target_step draft_acceptance_rate drafted_share harmonic_mean cost_ratio modelled_speed_up"
        figures = asdict(self) | {name: getattr(self, name) for name in names.split()}
        return figures | {"reliability": [asdict(each) for each in self.reliability if each.nodes]}


def profile_methods(
    generator: Generator,
    methods: Sequence[Method],
    prompts: Sequence[TaskPrompt],
    setting: Mapping[str, Any],
    *,
    done: Callable[[], None] = lambda: None,
) -> list[Profile]:
    """Run plain decoding and every method on every prompt, one prompt after the other, and add up the steps.

    Args:
        generator: loaded; its method is changed as the run goes.
        methods: without plain decoding, which is always run.
        prompts: what to write about; the first is written once more before, to warm up.
        setting: generation arguments, `seed` among them, to which a prompt's number is added.
        done: called after each prompt.
    """
    ready = {method.label: _Recording(generator, method) for method in [Method(BASE, BASE), *methods]}
    for recording in ready.values():
        recording.write(prompts[0].prompt, {**setting, "max_new_tokens": 16})
        recording.forget()
    for prompt in prompts:
        for recording in ready.values():
            recording.count(recording.write(prompt.prompt, {**setting, "seed": setting["seed"] + prompt.number}))
        done()
    plain = sum(_milliseconds(ready[BASE].steps))
    return [_profile(label, each.steps, each.tally.curve(), plain) for label, each in ready.items()]


class _Recording:
    """A method made ready to write, and the steps that it was counted to take."""

    def __init__(self, generator: Generator, method: Method) -> None:
        use(generator, method)
        self._generator, self._method = generator, method
        self._shared, self._drafter, self._costs = generator.drafter, RecordedDrafter(generator.drafter), StepCosts()
        self.steps: list[StepRecord] = []
        self.tally = ReliabilityTally()

    def write(self, prompt: Any, arguments: Mapping[str, Any]) -> Generation:
        """Write a text, whatever the generator was used for in between."""
        attach(self._generator, self._method, self._drafter, self._costs)
        return self._generator.generate(prompt, **arguments)

    def forget(self) -> None:
        """Forget what the texts so far have taught the drafter."""
        if isinstance(self._shared, Learner):
            self._shared.forget()

    def count(self, generation: Generation) -> None:
        """Take up the steps of the text that was written last."""
        self.steps += generation.steps
        for verdict in self._drafter.verdicts:
            self.tally.add(verdict)


def _milliseconds(steps: Sequence[StepRecord]) -> tuple[float, float, float]:
    """Return the milliseconds of drafting, forwards and all else of an emitted token."""
    a_token = 1e3 / max(sum(len(step.emitted) for step in steps), 1)
    seconds = time_split(steps)
    draft, forward = seconds.pop("draft"), seconds.pop("forward")
    return a_token * draft, a_token * forward, a_token * sum(seconds.values())


def _profile(label: str, steps: Sequence[StepRecord], curve: tuple[Reliability, ...], plain: float) -> Profile:
    accepted = [step.accepted for step in steps]
    draft, forward, other = _milliseconds(steps)
    return Profile(
        method=label,
        tokens=sum(len(step.emitted) for step in steps),
        steps=len(steps),
        drafted=sum(step.drafted for step in steps),
        accepted=sum(accepted),
        merged=sum(source is not None and source.endswith(", merged") for step in steps for source in step.sources),
        reached=tuple(sum(count >= depth for count in accepted) / max(len(steps), 1) for depth in range(1, DEPTHS + 1)),
        draft_ms=draft,
        forward_ms=forward,
        other_ms=other,
        speed_up=plain / max(draft + forward + other, 1e-9),
        reliability=curve,
    )
