"""What the parts of a step cost here: verification by rows, drafting by method and budget, everything but the forward.

Knows the clock and the generator's surface.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from foredraft.api import Generator
from foredraft.bench.method import Method, use
from foredraft.bench.replay import replay
from foredraft.bench.timeline import TimedStep, timed_steps
from foredraft.contracts import TokenIds
from foredraft.model.cost import ROWS
from foredraft.model.target import TorchTarget

VERIFIED_ROWS = (*ROWS, 96, 128)
_PREFILLED = 512
_WARM_UP = 16
PARTS = ("draft", "layout", "forward", "verify", "commit", "observe")


@dataclass(frozen=True, slots=True)
class StepCost:
    """Median microseconds of a step by part.

    Attributes:
        method: the label.
        nodes: drafted a step, at most.
        parts: microseconds of draft, layout, forward, verify, commit, observe.
        between: microseconds from the end of a step to the beginning of the next.
        beside_forward: median of everything that is not the forward, `between` included.
        steps: the steps of the last text.
    """

    method: str
    nodes: int
    parts: tuple[float, ...]
    between: float
    beside_forward: float
    steps: tuple[TimedStep, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name, the steps apart."""
        parts = dict(zip(PARTS, self.parts, strict=True))
        beside = {"between": self.between, "beside_forward": self.beside_forward}
        return {"method": self.method, "nodes": self.nodes, "parts": parts, **beside}


def step_cost(generator: Generator, method: Method, prompt: str, tokens: int = 64, repeats: int = 2) -> StepCost:
    """Time the parts of a method's steps, over `repeats` texts after a short one that warms up."""
    use(generator, method)
    texts = [timed_steps(generator, prompt, limit, seed) for seed, limit in enumerate([_WARM_UP, *[tokens] * repeats])]
    steps = [step for text in texts[1:] for step in text]
    times = np.array([[step.record.nanoseconds[part] for part in PARTS] for step in steps], np.float64) / 1e3
    between = np.array([step.between for step in steps], np.float64) / 1e3
    forward = PARTS.index("forward")
    return StepCost(
        method.label,
        method.nodes or 0,
        tuple(np.median(times, axis=0).tolist()),
        float(np.median(between)),
        float(np.median(times.sum(axis=1) - times[:, forward] + between)),
        tuple(texts[-1]),
    )


def prefill_rate(target: TorchTarget, repeats: int = 5) -> tuple[int, float]:
    """Return how many tokens were prefilled at a time, and the tokens a second of the quickest of `repeats`."""
    count = min(_PREFILLED, (target.window or _PREFILLED + 1) - 1)
    ids = np.arange(count, dtype=np.int64) % target.vocabulary
    seconds = []
    for _ in range(repeats):
        cache = target.new_cache()
        start = perf_counter()
        target.prefill(ids, cache)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        seconds.append(perf_counter() - start)
    return count, count / min(seconds)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Microseconds of one `propose`, learning of the last tokens included.

    Attributes:
        method: the label.
        nodes: the budget.
        median: over all steps of the replayed texts.
        p99: likewise.
    """

    method: str
    nodes: int
    median: float
    p99: float


def draft_cost(
    generator: Generator, method: Method, texts: Sequence[tuple[TokenIds, TokenIds]], nodes: int
) -> DraftCost:
    """Time a drafter's `propose` over replayed texts, after one that warms up."""
    generator.use(method.name, method.options, nodes)
    replay(generator.drafter, texts[:1], nodes, generator.target.vocabulary)
    result = replay(generator.drafter, texts, nodes, generator.target.vocabulary).as_dict()
    return DraftCost(method.label, nodes, result["propose_median_us"], result["propose_p99_us"])
