"""Measures the time of a step's parts by method and node budget, and the prefill rate.

Does not depend on any drafter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter, perf_counter_ns

import numpy as np
import torch

from foredraft.api import Generator
from foredraft.bench.method import Method
from foredraft.engine.step import PARTS
from foredraft.model.cost import ROWS
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions

VERIFIED_ROWS = (*ROWS, 96, 128)
_PREFILLED = 512  # tokens per timed prefill (chosen)
_WARM_UP = 16  # tokens (chosen)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Median microseconds of a step, by part."""

    method: str
    nodes: int  # maximum number of drafted nodes per step
    parts: Mapping[str, float]  # by `PARTS`
    between: float  # from the end of a step to the start of the next
    overhead: float  # all but the forward pass, including `between`


def step_cost(generator: Generator, method: Method, prompt: str, tokens: int = 64, repeats: int = 2) -> StepCost:
    """Time the steps of `repeats` texts at temperature 0.7, ignoring end tokens, after a short warm-up text."""
    generator.use(**method.drafting)
    ids, rows = generator.encode(prompt), []
    for seed in range(repeats + 1):
        sampling, length, last = SamplingOptions(True, temperature=0.7, seed=seed), tokens if seed else _WARM_UP, 0
        for record in generator.begin(ids, sampling, max_new_tokens=length).steps():
            now, parts = perf_counter_ns(), [record.nanoseconds[part] for part in PARTS]
            if seed:
                rows.append([*parts, now - last - sum(parts) if last else 0])  # 0 between prefill and the first step
            last = now
    times = np.array(rows, np.float64) / 1e3  # microseconds, float64[steps, parts + 1]
    *medians, between = np.median(times, axis=0).tolist()
    overhead = float(np.median(times.sum(axis=1) - times[:, PARTS.index("forward")]))
    by_part = dict(zip(PARTS, medians, strict=True))
    return StepCost(method.label, method.amount.get("nodes") or 0, by_part, between, overhead)


def prefill_rate(target: TorchTarget, repeats: int = 5) -> tuple[int, float]:
    """Return the number of prefilled tokens, and the tokens per second of the fastest of `repeats` prefills."""
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
