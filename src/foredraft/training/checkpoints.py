"""The checkpoint that a training run resumes from.

Knows how to write and read it safely. Does not know what a step does, nor what text the run saw.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import StoreError, UsageError

CHECKPOINT = "checkpoint.pt"


def write_checkpoint(run: Path, state: Mapping[str, Any]) -> None:
    """Write `state` (tensors, numbers, strings, lists and dicts of them) as the run's only checkpoint, atomically."""
    partial = run / f"{CHECKPOINT}.partial-{os.getpid()}"
    try:
        with partial.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(run / CHECKPOINT)
    except (OSError, RuntimeError) as error:  # torch's own writer raises the latter where the disk is full
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        why = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
        raise StoreError(
            f"No checkpoint can be written to {run} ({why}); the one before stays. Check its free space."
        ) from error


def read_checkpoint(run: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the run's checkpoint on the CPU, or None when it has none yet.

    Args:
        run: the run's folder.
        identity: everything that decides the run's weights; must equal the checkpoint's entry `identity`.

    Raises:
        StoreError: the file is damaged.
        UsageError: the checkpoint is of a run with other settings.
    """
    file = run / CHECKPOINT
    if not file.is_file():
        return None
    try:
        # Tensors and plain values only: a checkpoint from a stranger cannot run code.
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        saved = state["identity"]
    except Exception as error:  # torch raises whatever its unpickler or zip reader does
        raise StoreError(f"{file} cannot be read ({error}). Remove it to begin the run again.") from error
    different = sorted(key for key in {*saved, *identity} if saved.get(key) != identity.get(key))
    if different:
        told = "; ".join(f"{key} was {saved.get(key)!r} and is now {identity.get(key)!r}" for key in different)
        raise UsageError(f"The run {run} was begun with other settings: {told}. Give those, or another run folder.")
    return state
