"""The loss curve of a run as a PNG file: loss and held-out agreement over the minutes.

Knows a history and matplotlib, which is an optional extra.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from foredraft.atomic_file import store_file


def draw_curve(history: Sequence[Mapping[str, float]], path: Path) -> bool:
    """Draw a run's history (training/loop.py); return False where matplotlib is not installed or there is no history.

    Raises:
        StoreError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not history:
        return False
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    left = figure.add_subplot()
    right = left.twinx()
    minutes = [row["minutes"] for row in history]
    left.plot(minutes, [row["loss"] for row in history], color="#0b66b0", marker=".")
    right.plot(minutes, [row["agreement"] for row in history], color="#c8500a", marker=".")
    left.set_xlabel("minutes of training")
    left.set_ylabel("training loss, nats a token", color="#0b66b0")
    right.set_ylabel("held-out agreement with the target", color="#c8500a")
    memory = io.BytesIO()
    figure.savefig(memory, format="png", dpi=160)
    store_file(path, memory.getvalue())
    return True
