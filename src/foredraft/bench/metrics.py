"""Figures of a comparison: repeated n-grams, and speed-ups with confidence intervals.

Does not depend on methods or models.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from foredraft.graph.tree import F64, I64

LOOP_SHARE = 0.2  # outputs with a larger share of repeated 8-grams loop, which favours n-gram drafters (chosen)
LEAST_PAIRS = 4  # minimum number of pairs for a confidence interval (chosen)
_RESAMPLES = 2000  # bootstrap samples of an interval (chosen)


def repeated_share(ids: Sequence[int], n: int = 8) -> float:
    """Return the share of `n`-grams that occurred before in `ids`; 0 for texts of fewer than two `n`-grams."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio with its 95% bootstrap interval: NaN without pairs; 0 to infinity for fewer than `LEAST_PAIRS`."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return the value and the interval, as in `1.23 [1.20, 1.27]`; `-` without pairs."""
        return "-" if math.isnan(self.value) else f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def mean(values: Iterable[float]) -> float:
    """Return the mean; NaN without values."""
    found = list(values)
    return float(np.mean(found)) if found else math.nan


def finite(value: float) -> float | None:
    """Return a value for JSON, with None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


def speed_up(base_seconds: F64, base_tokens: F64, seconds: F64, tokens: F64) -> Ratio:
    """Return the baseline's seconds per token over the method's, summed over prompts; each array is float64[P]."""

    def ratio(pick: I64) -> F64:
        base = base_seconds[pick].sum(-1) / base_tokens[pick].sum(-1)
        own = seconds[pick].sum(-1) / tokens[pick].sum(-1)
        return np.asarray(base / own)

    return _resampled(ratio, len(seconds))


def mean_speed_up(ratios: F64) -> Ratio:
    """Return the geometric mean of the prompts' speed-ups, float64[P]; prompts have equal weight."""
    logs = np.log(ratios)
    return _resampled(lambda pick: np.asarray(np.exp(logs[pick].mean(-1))), len(ratios))


def _resampled(figure: Callable[[I64], F64], count: int) -> Ratio:
    if not count:
        return Ratio(math.nan, math.nan, math.nan)
    value = float(figure(np.arange(count)))
    if count < LEAST_PAIRS:
        return Ratio(value, 0.0, math.inf)
    draws = np.random.default_rng(0).integers(0, count, (_RESAMPLES, count))
    low, high = np.quantile(figure(draws), [0.025, 0.975])
    return Ratio(value, float(low), float(high))
