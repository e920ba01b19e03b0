"""The loop that trains a head: AdamW, warm-up and cosine decay, checkpoints by the clock, an exact resume.

Which windows a step sees is a function of the seed and the step, and nothing else is drawn, so a run that was killed
ends, once resumed, with the weights of one that was not; with a time limit the schedule follows the clock instead.
Knows numbers of windows; not what a task makes of them.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from foredraft.errors import NumericsError, UsageError
from foredraft.training.checkpoints import read_checkpoint, write_checkpoint

Numbers = npt.NDArray[np.int64]
Tell = Callable[[str, int, int, int, str], None]
"""Is told how far a phase is: its name, done, total, and a count of what a unit names."""

_EVALUATED = 64
"""Held-out windows that agreement is measured on, at most."""


class Task(Protocol):
    """What is trained, and on what.

    Attributes:
        window: tokens of a window.
    """

    window: int

    @property
    def module(self) -> torch.nn.Module:
        """The module whose parameters that require a gradient are trained, in float32."""
        ...

    def loss(self, windows: Numbers) -> torch.Tensor:
        """Return the mean loss of the windows with these numbers, a scalar that can be differentiated."""
        ...

    def agreement(self, windows: Numbers) -> float:
        """Return how often what is trained says what it should, 0 to 1."""
        ...


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How a head is trained.

    Attributes:
        epochs: times that every window is seen, if the time suffices.
        micro_batch: windows of one pass.
        accumulation: passes whose gradients are averaged into a step.
        rate: peak learning rate of AdamW.
        warmup: share of the run in which the rate rises from 0.
        floor: share of the peak that is left at the end of the cosine.
        weight_decay: decoupled.
        clip: the gradient's largest norm; 0 for any.
        precision: "bfloat16" (autocast; the weights stay float32) or "float32".
        seed: of the order of windows.
    """

    epochs: float = 4.0
    micro_batch: int = 8
    accumulation: int = 1
    rate: float = 1e-3
    warmup: float = 0.03
    floor: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    precision: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        Raises:
            UsageError: naming it.
        """
        for name in ("micro_batch", "accumulation"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("epochs", "rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be above 0.")
        for name in ("warmup", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be 0 to 1.")
        if self.precision not in ("bfloat16", "float32"):
            raise UsageError(f"precision is {self.precision!r}; it may be bfloat16 or float32.")

    def rate_at(self, done: float) -> float:
        """Return the learning rate where the share `done` of the run lies behind."""
        if done < self.warmup:
            return self.rate * done / self.warmup
        left = (1 + math.cos(math.pi * min(1.0, (done - self.warmup) / max(1e-9, 1 - self.warmup)))) / 2
        return self.rate * (self.floor + (1 - self.floor) * left)


@dataclass(frozen=True, slots=True)
class Clock:
    """What of a run follows the clock; may change when it is resumed.

    Attributes:
        max_minutes: the run ends after so many minutes of training, checkpoints' and earlier sessions' included.
        checkpoint_minutes: between checkpoints.
        report_minutes: between measurements on the held-out windows.
        now: seconds.
    """

    max_minutes: float = math.inf
    checkpoint_minutes: float = 3.0
    report_minutes: float = 1.0
    now: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went.

    Attributes:
        steps: optimiser steps done.
        minutes: of training.
        history: at each measurement the step, minutes, mean loss since the last one, agreement, tokens per second.
    """

    steps: int
    minutes: float
    history: Sequence[Mapping[str, float]]


def train(
    task: Task, run: Path, trained: Numbers, held: Numbers, options: LoopOptions, clock: Clock,
    identity: Mapping[str, Any], tell: Tell,
) -> Outcome:  # fmt: skip
    """Train, or resume, the run in the folder `run`; the task's module holds the result.

    Args:
        task: what is trained.
        run: holds the checkpoint; made if needed.
        trained: numbers of the windows to learn from.
        held: of those to measure on; may be empty.
        options: how.
        clock: when to stop, and when to write.
        identity: what else decides the weights; a checkpoint of another is refused.
        tell: shows progress.

    Raises:
        UsageError: no window to learn from, or a checkpoint of other settings.
        NumericsError: the loss is no longer a number; the last checkpoint stays.
        StoreError: a checkpoint is damaged or cannot be written; the one before stays.
    """
    if not len(trained):
        raise UsageError("There is no window to learn from; give more text.")
    run.mkdir(parents=True, exist_ok=True)
    identity = {**identity, "options": asdict(options), "windows": len(trained)}
    progress = _Progress(task, run, options, identity)
    each = options.micro_batch * options.accumulation
    total = max(1, round(options.epochs * len(trained) / each))
    order = _Order(trained, options.seed)
    start, before, first = clock.now(), progress.minutes, progress.step
    saved = reported = before
    since, losses = progress.step, []  # since the last measurement
    tell("training", progress.step, total, 0, "tokens")
    try:
        while progress.step < total and progress.minutes < clock.max_minutes:
            rate = options.rate_at(max((progress.step + 1) / total, progress.minutes / clock.max_minutes))
            losses.append(progress.advance(order.batch(progress.step * each, each), rate))
            progress.minutes = before + (clock.now() - start) / 60
            tokens = (progress.step - since) * each * task.window
            tell("training", progress.step, total, (progress.step - first) * each * task.window, "tokens")
            last = progress.step == total or progress.minutes >= clock.max_minutes
            if last or progress.minutes - reported >= clock.report_minutes:
                progress.measure(held, losses, tokens / max(1e-9, 60 * (progress.minutes - reported)))
                reported, since, losses = progress.minutes, progress.step, []
            if last or progress.minutes - saved >= clock.checkpoint_minutes:
                progress.save()
                saved = progress.minutes
    except KeyboardInterrupt:
        progress.save()
        raise
    return Outcome(progress.step, progress.minutes, progress.history)


class _Progress:
    """A run as far as it has come: continued from its checkpoint where there is one."""

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

    def advance(self, windows: Numbers, rate: float) -> float:
        """Do one optimiser step on these windows; return its mean loss.

        Raises:
            NumericsError: it is not finite; nothing has been moved.
        """
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
        return total

    def measure(self, held: Numbers, losses: list[float], speed: float) -> None:
        """Put how things stand into the history."""
        chosen = held[:: max(1, len(held) // _EVALUATED)][:_EVALUATED]
        with torch.no_grad(), autocast(self._weights[0].device, self._options.precision):
            agreement = self._task.agreement(chosen) if len(chosen) else math.nan
        self.history.append(
            {
                "step": self.step, "minutes": self.minutes, "loss": sum(losses) / len(losses), "agreement": agreement,
                "tokens_per_second": speed,
            }
        )  # fmt: skip

    def save(self) -> None:
        """Write the checkpoint.

        Raises:
            StoreError: it cannot be written; the one before stays.
        """
        states = {"module": self._task.module.state_dict(), "optimizer": self._optimizer.state_dict()}
        place = {"step": self.step, "minutes": self.minutes, "history": self.history}
        write_checkpoint(self._run, {"identity": self._identity, **place, **states})


def autocast(device: torch.device, precision: str) -> Any:
    """Return the context in which a pass is calculated."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")


class _Order:
    """Windows shuffled anew in each epoch, by the seed and the epoch alone."""

    def __init__(self, windows: Numbers, seed: int) -> None:
        self._windows, self._seed = windows, seed
        self._epoch, self._order = -1, windows

    def batch(self, first: int, count: int) -> Numbers:
        """Return the windows that stand at `first` to `first + count` of the run, int64[count]."""
        found = []
        for place in range(first, first + count):
            epoch, within = divmod(place, len(self._windows))
            if epoch != self._epoch:
                self._epoch, self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(self._windows)
            found.append(self._order[within])
        return np.array(found, np.int64)
