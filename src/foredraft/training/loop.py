"""The training loop: AdamW, warm-up and cosine decay, timed checkpoints, exact resumption, a loss curve.

The windows of a step depend only on the seed and the step, and there is no other randomness. So a run that was killed
and resumed ends with the same weights as an uninterrupted one, unless a time limit is set: the schedule then follows
the clock. Does not depend on what a task computes from the windows.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foredraft.atomic_file import replacing
from foredraft.errors import NumericsError, StoreError, UsageError
from foredraft.index.datastore import Progress
from foredraft.options import check_known, check_range
from foredraft.training.tasks import Task
from foredraft.training.traces import Numbers, Traces, spread

CHECKPOINT = "checkpoint.pt"
_EVALUATED = 64  # held-out windows on which agreement is measured, at most


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
        check_range(self, "micro_batch", "accumulation", least=1)
        check_range(self, "epochs", "rate", above=0)
        check_range(self, "clip", "weight_decay", "seed", least=0)
        check_range(self, "warmup", "floor", least=0, most=1)
        check_known(self.precision, ("bfloat16", "float32"), "There is no precision", "Precisions are")

    def rate_at(self, done: float) -> float:
        """Return the learning rate after the share `done` of the run."""
        if done < self.warmup:
            return self.rate * done / self.warmup
        left = (1 + math.cos(math.pi * min(1.0, (done - self.warmup) / max(1e-9, 1 - self.warmup)))) / 2
        return self.rate * (self.floor + (1 - self.floor) * left)


def train(
    task: Task, folder: Path, traces: Traces, options: LoopOptions, identity: Mapping[str, Any], tell: Progress, *,
    max_minutes: float = math.inf, checkpoint_minutes: float = 2.0, now: Callable[[], float] = time.monotonic,
) -> "Run":  # fmt: skip
    """Train the task's module, or resume the run in `folder`, and report progress to `tell`.

    `identity` names other settings that determine the weights. UsageError for a checkpoint with different ones, and if
    all windows are held out. The minutes are of training, those before a resumption included, and between checkpoints;
    these may change when a run is resumed. `now` returns seconds.

    The last checkpoint stays if the loss is not finite (NumericsError), or if the next one cannot be written
    (StoreError, also for one that is damaged).
    """
    trained, held = traces.split
    if not len(trained):
        raise UsageError("The traces hold no window to learn from: all texts are held out. Make traces of more.")
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(task, folder, options, {**identity, "options": asdict(options), "windows": len(trained)})
    each = options.micro_batch * options.accumulation
    total = max(1, round(options.epochs * len(trained) / each))
    begun, before = now(), run.minutes
    tell("training", run.step, total)
    try:
        while run.step < total and run.minutes < max_minutes:
            windows = _windows_at(trained, options.seed, run.step * each, each)
            run.advance(windows, options.rate_at(max((run.step + 1) / total, run.minutes / max_minutes)))
            run.minutes = before + (now() - begun) / 60
            tell("training", run.step, total)
            is_last = run.step == total or run.minutes >= max_minutes
            if is_last or run.minutes - run.measured_at >= checkpoint_minutes:
                run.measure(held, each * traces.window)
                run.save()
        if not run.history:  # resumed without time for a step
            run.measure(held, each * traces.window)
    except KeyboardInterrupt:
        if run.whole:  # else the last checkpoint stays
            run.save()
        raise
    return run


def _windows_at(windows: Numbers, seed: int, first: int, count: int) -> Numbers:
    """Return `count` windows from index `first` of a run, int64[count]; each epoch is shuffled with the seed."""
    epochs, indices = np.divmod(np.arange(first, first + count), len(windows))
    shuffled = {epoch: np.random.default_rng([seed, epoch]).permutation(windows) for epoch in set(epochs.tolist())}
    return np.array([shuffled[epoch][index] for epoch, index in zip(epochs.tolist(), indices, strict=True)], np.int64)


class Run:
    """The state of a run, loaded from its checkpoint if there is one."""

    def __init__(self, task: Task, folder: Path, options: LoopOptions, identity: Mapping[str, Any]) -> None:
        self._task, self._folder, self._options, self._identity = task, folder, options, identity
        self._weights = [weight for weight in task.module.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=options.rate, betas=(0.9, 0.95), weight_decay=options.weight_decay
        )
        self.step, self.minutes = 0, 0.0  # optimiser steps done, and minutes of training
        self.whole = True  # whether no step is half done
        self.history: list[dict[str, float]] = []  # what `measure` appended
        state = _read_checkpoint(folder, identity)
        if state is not None:
            task.module.load_state_dict(state["module"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step, self.minutes, self.history = state["step"], state["minutes"], list(state["history"])
        self.measured_at, self._losses = self.minutes, list[float]()  # last measurement, and the losses since

    def advance(self, windows: Numbers, rate: float) -> None:
        """Do one optimiser step on these windows; if the loss is not finite, no weight changes."""
        total = 0.0
        for part in np.split(windows, self._options.accumulation):
            with self._autocast():
                loss = self._task.loss(part) / self._options.accumulation
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            raise NumericsError(
                f"The loss became {total} at step {self.step}, so training stopped; the last checkpoint, if one was "
                f"written, is good. Lower the rate, which is {self._options.rate:g}, or warm up longer, in another "
                "folder."
            )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        if self._options.clip:
            torch.nn.utils.clip_grad_norm_(self._weights, self._options.clip)
        self.whole = False
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._losses.append(total)
        self.whole = True

    def measure(self, held: Numbers, step_tokens: int) -> None:
        """Append step, minutes, mean loss since the last, agreement and tokens a second, given `step_tokens` a step."""
        chosen = spread(held, _EVALUATED)
        with torch.no_grad(), self._autocast():
            agreement = self._task.agreement(chosen) if len(chosen) else math.nan
        seconds = max(1e-9, 60 * (self.minutes - self.measured_at))
        loss = sum(self._losses) / len(self._losses) if self._losses else math.nan
        self.history.append(
            {
                "step": self.step, "minutes": self.minutes, "loss": loss,
                "agreement": agreement, "tokens_per_second": len(self._losses) * step_tokens / seconds,
            }
        )  # fmt: skip
        self.measured_at, self._losses = self.minutes, []

    def save(self) -> None:
        state = {
            "identity": self._identity, "step": self.step, "minutes": self.minutes, "history": self.history,
            "module": self._task.module.state_dict(), "optimizer": self._optimizer.state_dict(),
        }  # fmt: skip
        try:
            with replacing(self._folder / CHECKPOINT) as file:
                torch.save(state, file)
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
            why = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
            raise StoreError(
                f"No checkpoint can be written to {self._folder} ({why}); the previous one stays. Check its free space."
            ) from error

    def _autocast(self) -> Any:
        is_on = self._options.precision == "bfloat16"
        return torch.autocast(self._weights[0].device.type, dtype=torch.bfloat16, enabled=is_on)


def _read_checkpoint(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the run's checkpoint on the CPU, or None; UsageError if its `identity` differs."""
    file = folder / CHECKPOINT
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
        raise UsageError(f"The run {folder} was started with other settings: {changes}. Give those, or another folder.")
    return state
