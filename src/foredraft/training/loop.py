"""The training loop: AdamW, warm-up and cosine decay, timed checkpoints, exact resumption, a loss curve.

The windows of a step depend only on the seed and the step, and there is no other randomness. So a run that was killed
and resumed ends with the same weights as an uninterrupted one, unless a time limit is set: the schedule then follows
the clock. Does not depend on what a task computes from the windows.
"""

import contextlib
import io
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from foredraft.atomic_file import TEMPORARY_SUFFIX, place_file, store_file
from foredraft.errors import NumericsError, StoreError, UsageError
from foredraft.training import Numbers, Tell, check_numbers
from foredraft.training.traces import Traces, chosen_windows

CHECKPOINT = "checkpoint.pt"
_EVALUATED = 64
"""Maximum number of held-out windows on which agreement is measured."""


class Task(Protocol):
    """A module to train, and its loss on traces."""

    @property
    def module(self) -> torch.nn.Module:
        """The module; its parameters that require a gradient are trained, in float32."""
        ...

    def loss(self, windows: Numbers) -> torch.Tensor:
        """Return the mean loss of these windows, a differentiable scalar."""
        ...

    def agreement(self, windows: Numbers) -> float:
        """Return the share of correct predictions on these windows, 0 to 1."""
        ...


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Hyperparameters."""

    epochs: float = 4.0  # passes over all windows, if time allows
    micro_batch: int = 8  # windows of one forward pass
    accumulation: int = 1  # passes whose gradients are averaged into a step
    rate: float = 1e-3  # peak learning rate of AdamW
    warmup: float = 0.03  # share of the run in which the rate rises from 0
    floor: float = 0.05  # share of the peak rate at the end of the cosine
    weight_decay: float = 0.01  # decoupled
    clip: float = 1.0  # maximum norm of the gradient; 0 for no limit
    precision: str = "bfloat16"  # "bfloat16" (autocast; the weights stay float32) or "float32"
    seed: int = 0  # of the order of windows

    def __post_init__(self) -> None:
        """Raise UsageError for invalid values."""
        check_numbers(self, ("micro_batch", "accumulation"), ("epochs", "rate"), ("warmup", "floor"))
        if self.precision not in ("bfloat16", "float32"):
            raise UsageError(f"precision is {self.precision!r}; it may be bfloat16 or float32.")

    def rate_at(self, done: float) -> float:
        """Return the learning rate after the share `done` of the run."""
        if done < self.warmup:
            return self.rate * done / self.warmup
        left = (1 + math.cos(math.pi * min(1.0, (done - self.warmup) / max(1e-9, 1 - self.warmup)))) / 2
        return self.rate * (self.floor + (1 - self.floor) * left)


@dataclass(frozen=True, slots=True)
class Clock:
    """Time limits of a run; may change when it is resumed."""

    max_minutes: float = math.inf  # of training, including checkpoints and earlier sessions
    checkpoint_minutes: float = 2.0  # between checkpoints, each with a measurement on the held-out windows
    now: Callable[[], float] = time.monotonic  # seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run: optimiser steps, minutes of training, and its history.

    Each measurement records step, minutes, mean loss since the previous one, agreement and tokens per second.
    """

    steps: int
    minutes: float
    history: Sequence[Mapping[str, float]]


def train(
    task: Task, run: Path, traces: Traces, texts: str, options: LoopOptions, clock: Clock, identity: Mapping[str, Any],
    tell: Tell,
) -> Outcome:  # fmt: skip
    """Train, or resume, the run in the folder `run`; the task's module holds the result.

    Args:
        task: the module and its loss.
        run: folder of the checkpoint; created if needed.
        traces: the training data.
        texts: which texts to train on, as for `chosen_windows`.
        options: hyperparameters.
        clock: time limits.
        identity: other settings that determine the weights; a checkpoint with different ones is rejected.
        tell: reports progress.

    Raises:
        UsageError: there is no window to learn from, or a checkpoint has other settings.
        NumericsError: the loss is not finite; the last checkpoint stays.
        StoreError: a checkpoint is damaged or cannot be written; the previous one stays.
    """
    trained, held = chosen_windows(traces, texts)
    run.mkdir(parents=True, exist_ok=True)
    progress = _Progress(task, run, options, {**identity, "options": asdict(options), "windows": len(trained)})
    each = options.micro_batch * options.accumulation
    total = max(1, round(options.epochs * len(trained) / each))
    first, begun, before = progress.step, clock.now(), progress.minutes
    tell("training", first, total, 0, "tokens")
    try:
        while progress.step < total and progress.minutes < clock.max_minutes:
            windows = windows_at(trained, options.seed, progress.step * each, each)
            rate = options.rate_at(max((progress.step + 1) / total, progress.minutes / clock.max_minutes))
            progress.advance(windows, rate)
            progress.minutes = before + (clock.now() - begun) / 60
            tell("training", progress.step, total, (progress.step - first) * each * traces.window, "tokens")
            is_last = progress.step == total or progress.minutes >= clock.max_minutes
            if is_last or progress.minutes - progress.measured_at >= clock.checkpoint_minutes:
                progress.measure(held, each * traces.window)
                progress.save()
    except KeyboardInterrupt:
        progress.save()
        raise
    return Outcome(progress.step, progress.minutes, progress.history)


def windows_at(windows: Numbers, seed: int, first: int, count: int) -> Numbers:
    """Return `count` windows from index `first` of a run, int64[count]; each epoch is shuffled with the seed."""
    epochs, indices = np.divmod(np.arange(first, first + count), len(windows))
    shuffled = {epoch: np.random.default_rng([seed, epoch]).permutation(windows) for epoch in set(epochs.tolist())}
    return np.array([shuffled[epoch][index] for epoch, index in zip(epochs.tolist(), indices, strict=True)], np.int64)


class _Progress:
    """The state of a run, loaded from its checkpoint if there is one."""

    def __init__(self, task: Task, run: Path, options: LoopOptions, identity: Mapping[str, Any]) -> None:
        self._task, self._run, self._options, self._identity = task, run, options, identity
        self._weights = [weight for weight in task.module.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=options.rate, betas=(0.9, 0.95), weight_decay=options.weight_decay
        )
        self.step, self.minutes = 0, 0.0
        self.history: list[dict[str, float]] = []
        state = read_checkpoint(run, identity)
        if state is not None:
            task.module.load_state_dict(state["module"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step, self.minutes, self.history = state["step"], state["minutes"], list(state["history"])
        self.measured_at, self._losses = self.minutes, list[float]()  # last measurement, and the losses since

    def advance(self, windows: Numbers, rate: float) -> None:
        """Do one optimiser step on these windows; if the loss is not finite, no weight changes."""
        options, weights, total = self._options, self._weights, 0.0
        for part in np.split(windows, options.accumulation):
            with autocast(weights[0].device, options.precision):
                loss = self._task.loss(part) / options.accumulation
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            raise NumericsError(
                f"The loss became {total} at step {self.step}, so training stopped; the last checkpoint, if one was "
                f"written, is good. Lower the rate, which is {options.rate:g}, or warm up longer, in another folder."
            )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        if options.clip:
            torch.nn.utils.clip_grad_norm_(weights, options.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._losses.append(total)

    def measure(self, held: Numbers, step_tokens: int) -> None:
        """Append a measurement to the history; a step uses `step_tokens` tokens."""
        chosen = held[:: max(1, len(held) // _EVALUATED)][:_EVALUATED]
        with torch.no_grad(), autocast(self._weights[0].device, self._options.precision):
            agreement = self._task.agreement(chosen) if len(chosen) else math.nan
        seconds = max(1e-9, 60 * (self.minutes - self.measured_at))
        self.history.append(
            {
                "step": self.step, "minutes": self.minutes, "loss": sum(self._losses) / len(self._losses),
                "agreement": agreement, "tokens_per_second": len(self._losses) * step_tokens / seconds,
            }
        )  # fmt: skip
        self.measured_at, self._losses = self.minutes, []

    def save(self) -> None:
        states = {"module": self._task.module.state_dict(), "optimizer": self._optimizer.state_dict()}
        position = {"step": self.step, "minutes": self.minutes, "history": self.history}
        write_checkpoint(self._run, {"identity": self._identity, **position, **states})


def autocast(device: torch.device, precision: str) -> Any:
    """Return the context manager in which a pass is computed."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")


def write_checkpoint(run: Path, state: Mapping[str, Any]) -> None:
    """Write `state` (tensors, numbers, strings, lists and dicts of them) as the run's only checkpoint, atomically."""
    unfinished = run / f"{CHECKPOINT}.{os.getpid()}{TEMPORARY_SUFFIX}"
    try:
        with unfinished.open("wb") as file:
            torch.save(dict(state), file)
        place_file(unfinished, run / CHECKPOINT)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        why = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
        raise StoreError(
            f"No checkpoint can be written to {run} ({why}); the previous one stays. Check its free space."
        ) from error


def read_checkpoint(run: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the run's checkpoint on the CPU, or None; UsageError if its `identity` differs."""
    file = run / CHECKPOINT
    if not file.is_file():
        return None
    try:
        # weights_only loads tensors and plain values only: a stranger's checkpoint cannot run code
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        saved = state["identity"]
    except Exception as error:  # torch passes on any error of its unpickler or zip reader
        raise StoreError(f"{file} cannot be read ({error}). Remove it to begin the run again.") from error
    different = sorted(key for key in {*saved, *identity} if saved.get(key) != identity.get(key))
    if different:
        changes = "; ".join(f"{key} was {saved.get(key)!r} and is now {identity.get(key)!r}" for key in different)
        raise UsageError(f"The run {run} was started with other settings: {changes}. Give those, or another folder.")
    return state


def draw_curve(history: Sequence[Mapping[str, float]], path: Path) -> bool:
    """Plot loss and held-out agreement over time as PNG; return False without matplotlib or without history."""
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
