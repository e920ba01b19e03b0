"""Rates: how often what each source says came true, and the one chance of a candidate from all of them.

A source puts a candidate into one of its cells by what it knows of it. A cell's chance is the share of its candidates
that the target chose, counted wherever the target came to choose among them. The chances of the sources that know a
context are mixed in the logistic domain, by weights that are learned with each choice (Mahoney, "Adaptive Weighing of
Context Models for Lossless Data Compression", 2005). Knows cells; not what the sources are.
"""

from importlib import resources
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

SOURCES = 7
CELLS = 128
UNLISTED = 0
"""The cell of a candidate that a source which knows the context does not list."""
ABSENT = 255
"""Stands for a cell where the source does not know the context."""
_MOST_SEEN = np.float32(1000.0)  # candidates of a cell, beyond which older ones count for less
_STEP = np.float32(0.01)  # of the weights, along the gradient; our choice, as the others
_LEAST_SHARE = np.float32(0.002)  # of hits, and of misses, so that logarithms stay finite


class Rates(NamedTuple):
    """What was counted."""

    hits: F32  # float32[7, 128], candidates of a source's cell that the target chose
    seen: F32  # float32[7, 128], candidates of the cell among which it chose
    weights: F32  # float32[128, 8], by the set of sources that know a context, as bits: one a source, and a constant


def flat_rates() -> Rates:
    """Return the rates of somebody who has seen nothing."""
    return Rates(
        np.full((SOURCES, CELLS), 0.4, np.float32), np.full((SOURCES, CELLS), 2.0, np.float32),
        np.repeat(np.array([[0.45] * SOURCES + [0.0]], np.float32), 1 << SOURCES, axis=0),
    )  # fmt: skip


def prior_rates(*, sampled: bool) -> Rates:
    """Return rates fitted on real texts (scripts/fit_rates.py), for sampling or for greedy decoding."""
    mode = "sampled" if sampled else "greedy"
    with resources.files("foredraft.index").joinpath("rates.npz").open("rb") as file, np.load(file) as kept:
        return Rates(*(kept[f"{mode}_{name}"] for name in Rates._fields))


@njit(cache=True, error_model="numpy")
def chance(rates: Rates, cells: U8, known: int) -> float:
    """Return a candidate's chance by its cells, uint8[7]; `known` is the set of sources that know the context."""
    total = rates.weights[known, SOURCES]
    for source in range(SOURCES):
        cell = cells[source]
        if cell != ABSENT:
            hits, seen = rates.hits[source, cell], rates.seen[source, cell]
            total += rates.weights[known, source] * np.log(hits / (seen - hits))
    return float(np.float32(1) / (np.float32(1) + np.exp(-total)))


@njit(cache=True, error_model="numpy")
def credit(rates: Rates, cells: U8, known: int, chosen: bool) -> None:
    """Count a candidate among which the target chose, and whether it chose this one."""
    error = np.float32(chosen) - np.float32(chance(rates, cells, known))
    rates.weights[known, SOURCES] += _STEP * error
    for source in range(SOURCES):
        cell = cells[source]
        if cell == ABSENT:
            continue
        hits, seen = rates.hits[source, cell], rates.seen[source, cell]
        rates.weights[known, source] += _STEP * error * np.log(hits / (seen - hits))
        keep = min(np.float32(1), _MOST_SEEN / (seen + 1))
        seen = (seen + 1) * keep
        hits = (hits + np.float32(chosen)) * keep
        rates.seen[source, cell] = seen
        rates.hits[source, cell] = min(max(hits, _LEAST_SHARE * seen), (1 - _LEAST_SHARE) * seen)
