"""What one forward pass costs on this machine by its number of rows: measured once, kept in the cache folder.

Knows the target and the clock. Does not know what the budget rule makes of the figures.
"""

import hashlib
import json
import os
import platform
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from foredraft.control import CostCurve
from foredraft.graph.layout import lay_out
from foredraft.graph.tree import chain_parents
from foredraft.model.target import TorchTarget

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_CONTEXT = 128
_SECONDS = 1.5
_FORMAT = 1


def measured_cost(target: TorchTarget, folder: Path | None) -> CostCurve:
    """Return the target's cost curve: from `folder` if it was measured there on this machine, else measured now.

    Args:
        target: the model, on its device.
        folder: where figures are kept; None keeps none. A file that cannot be read is measured anew and replaced.
    """
    path = folder / f"cost-{_identity(target)}.json" if folder is not None else None
    if path is not None:
        known = _read(path)
        if known is not None:
            return known
    curve = measure_cost(target)
    if path is not None:
        _write(path, curve)
    return curve


def measure_cost(target: TorchTarget, rows: tuple[int, ...] = ROWS, seconds: float = _SECONDS) -> CostCurve:
    """Time forward passes of `rows` rows behind a short context, the least of a few each, for about `seconds` in all.

    Row counts are interleaved, so that a slow moment of the machine does not fall on one of them; on a slow model the
    larger counts are left out and extrapolated.
    """
    window = target.window or 4096
    context = min(_CONTEXT, max(1, window - max(rows) - 1))
    rows = tuple(count for count in rows if context + count <= window) or (1,)
    cache = target.new_cache()
    target.prefill(np.arange(context, dtype=np.int64) % target.vocabulary, cache)
    times: dict[int, list[float]] = {}
    start = perf_counter()
    for repeat in range(12):
        for count in rows:
            late = perf_counter() - start > seconds
            if late and (repeat > 1 or count not in times) and len(times) >= min(2, len(rows)):
                continue
            elapsed = _timed_pass(target, cache, count, context)
            if repeat > 0 or late:  # the first round warms up
                times.setdefault(count, []).append(elapsed)
            elif count not in times:
                times[count] = []
        if perf_counter() - start > seconds and all(times.values()):
            break
    # the least: what other processes add to a pass is not a cost of its rows
    measured = {count: min(values) for count, values in times.items() if values}
    ordered = sorted(measured)
    return CostCurve(tuple(ordered), tuple(measured[count] for count in ordered))


def _timed_pass(target: TorchTarget, cache: object, rows: int, context: int) -> float:
    tokens = (np.arange(rows - 1) % target.vocabulary).astype(np.int32)
    layout = lay_out(0, tokens, chain_parents(rows - 1), context)
    start = perf_counter()
    scores = target.forward(layout, cache)  # type: ignore[arg-type]  # the cache came from this target
    float(scores.logits[-1, 0])  # waits for the device
    return perf_counter() - start


def _identity(target: TorchTarget) -> str:
    """Name the model, its dtype and device, the threads and the machine: what a measured cost is true of."""
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else platform.processor()
    parts = (
        _FORMAT, target.model.config.to_json_string(use_diff=False), str(target.dtype), str(target.device), device,
        torch.__version__, torch.get_num_threads(), os.cpu_count(), platform.node(), platform.machine(),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _read(path: Path) -> CostCurve | None:
    try:
        data = json.loads(path.read_text())
        curve = CostCurve(tuple(int(n) for n in data["rows"]), tuple(float(s) for s in data["seconds"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    sound = curve.rows and len(curve.rows) == len(curve.seconds) and curve.rows[0] == 1
    ascending = all(a < b for a, b in zip(curve.rows, curve.rows[1:], strict=False))
    return curve if sound and ascending and all(0 < s < 1e4 for s in curve.seconds) else None


def _write(path: Path, curve: CostCurve) -> None:
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        beside.write_text(json.dumps({"rows": curve.rows, "seconds": curve.seconds}))
        beside.replace(path)
    except OSError:  # figures can be measured again
        beside.unlink(missing_ok=True)
