"""Sorted runs of counted keys: put on disk one by one, merged a range of keys at a time.

Knows keys (uint64, whose highest bits say what must stay together) and counts. Does not know what a key stands for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Run:
    """Sorted distinct keys (uint64) and their counts (uint32) on disk, with every `stride`-th key in memory."""

    keys: Path
    counts: Path
    length: int
    stride: int
    sample: U64

    def read(self, start: int, bound: np.uint64 | None) -> tuple[U64, U32]:
        """Return the records from number `start` up to the first whose key is not below `bound`."""
        stop = self.length
        if bound is not None:
            stop = min(stop, int(np.searchsorted(self.sample, bound)) * self.stride)
        if stop <= start:
            return np.empty(0, np.uint64), np.empty(0, np.uint32)
        # Read, not mapped: mapped pages would count as this process's memory until the system takes them back.
        keys = np.fromfile(self.keys, np.uint64, stop - start, offset=start * 8)
        if bound is not None:
            keys = keys[: np.searchsorted(keys, bound)]
        return keys, np.fromfile(self.counts, np.uint32, len(keys), offset=start * 4)


def spill(folder: Path, number: int, keys: U64, counts: U32, stride: int) -> Run:
    """Put a run on disk."""
    run = Run(folder / f"run-{number}.keys", folder / f"run-{number}.counts", len(keys), stride, keys[::stride].copy())
    for path, array in ((run.keys, keys), (run.counts, counts)):
        with path.open("wb") as file:  # not tofile(), whose error on a full disk does not say that it is full
            file.write(array.data)
    return run


def merged(runs: Sequence[Run], bits: int, samples_at_once: int) -> Iterator[tuple[U64, I64, int]]:
    """Merge the runs a range of keys at a time, never cutting between keys that differ in their lowest `bits` alone.

    The ranges are chosen from the runs' samples, so they hold about equally many records whatever the text was.

    Yields:
        Sorted distinct keys, their counts over all runs, and how many records went into them.
    """
    shift = np.uint64(bits)
    samples = np.sort(np.concatenate([run.sample for run in runs]))
    bounds = np.unique(samples[samples_at_once::samples_at_once] >> shift << shift)
    starts = [0] * len(runs)
    for bound in [*bounds, None]:
        parts = [run.read(start, bound) for run, start in zip(runs, starts, strict=True)]
        starts = [start + len(keys) for start, (keys, _) in zip(starts, parts, strict=True)]
        keys = np.concatenate([keys for keys, _ in parts])
        order = np.argsort(keys)
        keys = keys[order]
        groups = group_bounds(keys)
        yield keys[groups[:-1]], group_sums(np.concatenate([c for _, c in parts])[order], groups), len(keys)


def group_bounds(keys: U64) -> I64:
    """Return where each group of equal neighbours starts, and the length behind the last: int64[groups + 1]."""
    changes = np.flatnonzero(keys[1:] != keys[:-1]) + 1
    return np.concatenate([[0], changes, [len(keys)]]).astype(np.int64) if len(keys) else np.zeros(1, np.int64)


def group_sums(counts: npt.NDArray[Any], bounds: I64) -> I64:
    """Return the sum of each group: int64[groups]."""
    if len(bounds) == 1:
        return np.empty(0, np.int64)
    return np.add.reduceat(counts, bounds[:-1], dtype=np.int64)
