"""The time of one forward pass on this machine as a function of its rows: measured once, stored in the cache folder.

Depends on the target and the clock, not on how the figures are used.
"""

import contextlib
import hashlib
import itertools
import json
import os
import platform
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from foredraft.atomic_file import store_file
from foredraft.contracts import CostCurve
from foredraft.errors import StoreError
from foredraft.graph.layout import lay_out
from foredraft.graph.tree import chain_parents
from foredraft.model.fingerprint import architecture
from foredraft.model.kv_cache import TreeCache
from foredraft.model.rounding import dtype_name
from foredraft.model.target import TorchTarget

ROWS = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64)  # that are timed; after some, kernels often switch to a larger block
_FEW_ROWS = (1, 16, 64)  # on a slow model, once each in a round
_SLOW = 1 / 3  # of the time allowed, for one pass of the most rows; chosen
_CONTEXT = 128  # tokens in the cache
_SECONDS = 1.5  # time for one measurement; this and the next four are chosen
_MOST_ROUNDS = 12
_REPEATS = 4  # passes of a row count in a round at most, of which the fastest counts
_TURN_SECONDS = 0.06  # of a row count in a round, then no more passes: slow ones vary less, and leave time for rounds
_MOST_TRIES = 3  # measurements on a busy machine
# between the quartiles of a row count's share of a round, relative to the median; up to 0.05 on 2 idle cores, and from
# 0.6 on beside two busy processes
_MOST_SPREAD = 0.25
_FORMAT = 4


def measured_cost(target: TorchTarget, folder: Path) -> CostCurve:
    """Return the target's cost curve: from `folder`, or measured now, and stored there for later."""
    path = folder / f"cost-{_identity(target)}.json"
    if stored := read_curve(path):
        with contextlib.suppress(OSError):
            path.touch()  # `foredraft info --cache --prune` removes those that are long unused
        return stored
    curve, is_settled = measure_cost(target)
    if is_settled:  # otherwise the machine was busy, and the next process measures again
        path = folder / f"cost-{_identity(target)}.json"  # of what was measured, if passes could not be recorded
        with contextlib.suppress(StoreError):  # generation works without stored figures
            store_file(path, json.dumps({"rows": curve.rows, "seconds": curve.seconds}).encode())
    return curve


def measure_cost(
    target: TorchTarget, rows: tuple[int, ...] = ROWS, seconds: float = _SECONDS, context: int = _CONTEXT
) -> tuple[CostCurve, bool]:
    """Time forward passes of `rows` rows after `context` tokens, for about `seconds` in all.

    Returns the curve, and whether the machine was idle enough to trust it. A machine can be slow for seconds at a time,
    so the row counts take turns, round after round, and their proportions within a round count. The fastest of a few
    passes counts, because delays from other processes are not a cost of the rows. A curve that falls anywhere, rounds
    of other proportions, or threads that had to wait for other processes indicate a busy machine: the measurement is
    repeated. On a slow model only a few row counts are timed.
    """
    window = target.window or 4096
    context = min(context, max(1, window - max(rows) - 1))
    rows = tuple(count for count in rows if context + count <= window) or (1,)
    cache = target.new_cache()
    target.prefill(np.arange(context, dtype=np.int64) % target.vocabulary, cache)
    _timed_pass(target, cache, 1, context)  # the first pass may set things up or record the pass
    if _timed_pass(target, cache, rows[-1], context) > _SLOW * seconds:
        rows = tuple(count for count in rows if count in _FEW_ROWS) or rows[:1]
    rounds, busy = list[list[float]](), False
    for _ in range(_MOST_TRIES):
        start = perf_counter()
        for _ in range(_MOST_ROUNDS):
            rounds.append([_fastest(target, cache, n, context) for n in rows[::-1]])
            busy |= target.waiting.busy  # passes have one thread then, so that their times are steady all the same
            if perf_counter() - start > seconds:
                break
        curve = CostCurve(rows, _typical(rounds)[::-1])
        if is_settled := _is_settled(curve, rounds) and not busy:
            break
    return curve, is_settled


def _typical(rounds: list[list[float]]) -> tuple[float, ...]:
    """Return the seconds of the fastest round, in the median proportions of all rounds."""
    seconds = np.array(rounds)
    level = np.exp(np.log(seconds).mean(axis=1, keepdims=True))
    return tuple((np.median(seconds / level, axis=0) * level.min()).tolist())


def _is_settled(curve: CostCurve, rounds: list[list[float]]) -> bool:
    """Return whether no row count took 10 % longer than the next larger one, and most rounds have equal proportions."""
    rises = all(few < 1.1 * more for few, more in itertools.pairwise(curve.seconds))
    shares = np.array(rounds) / np.array(rounds).sum(axis=1, keepdims=True)
    low, middle, high = np.quantile(shares, (0.25, 0.5, 0.75), axis=0)
    return rises and len(rounds) > 1 and bool((high - low <= _MOST_SPREAD * middle).all())


def read_curve(path: Path) -> CostCurve | None:
    """Return a stored curve; None if its file is missing or damaged."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        curve = CostCurve(tuple(map(int, stored["rows"])), tuple(map(float, stored["seconds"])))
    except (OSError, ValueError, OverflowError, KeyError, TypeError):
        return None
    ascending = curve.rows[:1] == (1,) and all(few < more for few, more in itertools.pairwise(curve.rows))
    sound = ascending and len(curve.rows) == len(curve.seconds) and all(0 < each < 1e4 for each in curve.seconds)
    return curve if sound else None


def _fastest(target: TorchTarget, cache: TreeCache, rows: int, context: int) -> float:
    """Return the least seconds of several passes in a row, as in decoding: the first finds other data in the caches."""
    passes: list[float] = []
    while len(passes) < _REPEATS and sum(passes) < _TURN_SECONDS:
        passes.append(_timed_pass(target, cache, rows, context))
    return min(passes)


def _timed_pass(target: TorchTarget, cache: TreeCache, rows: int, context: int) -> float:
    tokens = (np.arange(rows - 1) % target.vocabulary).astype(np.int32)
    layout = lay_out(0, tokens, chain_parents(rows - 1), context)
    start = perf_counter()
    float(target.forward(layout, cache).logits[-1, 0])  # waits for the device
    return perf_counter() - start


def _identity(target: TorchTarget) -> str:
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else platform.processor()
    parts = (
        _FORMAT, architecture(target.outline.config), dtype_name(target.outline), str(target.device),
        device, torch.__version__, torch.get_num_threads(), os.cpu_count(), platform.node(), platform.machine(),
        target.compiled.record if target.compiled is not None else None,
        None if target.recordings is None or target.recordings.failed else target.recordings.same_bits,
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]
