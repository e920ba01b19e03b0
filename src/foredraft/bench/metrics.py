"""Figures of a comparison: shares of repeated n-grams, where texts part, ratios of paired times and their intervals.

Knows ids, and arrays of counts and seconds; does not know who made them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LOOP_SHARE = 0.2
"""Outputs with a larger share of repeated 8-grams count as looping: loops flatter every n-gram drafter."""

LEAST_PAIRS = 4
"""Fewer pairs than this resample to next to nothing, and an interval from them would say more than is known."""

_RESAMPLES = 2000
"""Bootstrap draws of an interval."""

FloatVector = npt.NDArray[np.float64]


def repeated_share(ids: Sequence[int], n: int = 8) -> float:
    """Return the share of `n`-grams of `ids` that occurred before in it; 0 for texts shorter than two of them."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the place of the first id that differs, from 0; the shorter one's length if there is none before."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio with its 95% bootstrap interval.

    Attributes:
        value: of all pairs.
        low: 2.5% quantile over resampled pairs; 0 where there are too few to resample.
        high: 97.5% quantile; infinity where there are too few.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return the value and the interval, as in `1.23 [1.20, 1.27]`."""
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


NO_RATIO = Ratio(float("nan"), float("nan"), float("nan"))
"""What can be said of no pairs."""


def mean(values: Iterable[float]) -> float:
    """Return the mean; NaN of no values."""
    found = list(values)
    return float(np.mean(found)) if found else float("nan")


def finite(value: float) -> float | None:
    """Return a figure for JSON, which has neither NaN nor infinity: None for those."""
    return value if math.isfinite(value) else None


def speed_up(
    base_seconds: FloatVector,
    base_tokens: FloatVector,
    seconds: FloatVector,
    tokens: FloatVector,
) -> Ratio:
    """Return the base's seconds per token over the method's, resampling prompts, which stay paired.

    Args:
        base_seconds: float64[P], of the base, by prompt.
        base_tokens: float64[P].
        seconds: float64[P], of the method.
        tokens: float64[P].
    """
    if not len(seconds):
        return NO_RATIO

    def ratio(pick: npt.NDArray[np.int64]) -> FloatVector:
        base = base_seconds[pick].sum(-1) / base_tokens[pick].sum(-1)
        own = seconds[pick].sum(-1) / tokens[pick].sum(-1)
        return np.asarray(base / own)

    return _resampled(ratio, len(seconds))


def mean_speed_up(ratios: FloatVector) -> Ratio:
    """Return the geometric mean of the prompts' own speed-ups, float64[P]: each prompt counts the same."""
    if not len(ratios):
        return NO_RATIO
    logs = np.log(ratios)
    return _resampled(lambda pick: np.asarray(np.exp(logs[pick].mean(-1))), len(ratios))


def _resampled(figure: Callable[[npt.NDArray[np.int64]], FloatVector], count: int) -> Ratio:
    value = float(figure(np.arange(count)))
    if count < LEAST_PAIRS:
        return Ratio(value, 0.0, float("inf"))
    draws = np.random.default_rng(0).integers(0, count, (_RESAMPLES, count))
    low, high = np.quantile(figure(draws), [0.025, 0.975])
    return Ratio(value, float(low), float(high))
