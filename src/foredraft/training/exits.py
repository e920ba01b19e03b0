"""Training an early-exit head: behind the frozen first layers, on the target's own texts.

EESD (Liu et al. 2024), section 3.2, trains with cross-entropy on the next token; learning the target's distribution,
as far as its traces hold it, is offered beside that. The exit's states of a window are computed once and kept in a
file; only the first layers and the head are in memory, once the caller lets go of the model. Knows traces and a model's
layers; not the loop.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, log_softmax

from foredraft.errors import StoreError, UsageError
from foredraft.model.heads import ExitHead, new_exit_head
from foredraft.model.layers import Passage, model_parts, shorter
from foredraft.model.ranked import ids_of, places_of
from foredraft.training import Numbers
from foredraft.training.traces import Traces

LOSSES = ("distribution", "tokens")


class ExitTask:
    """An early-exit head in training.

    Args:
        model: the target; afterwards only its first layers are held here.
        layers: how many (N).
        traces: what to learn from.
        loss: "distribution" (the target's, of its most probable tokens) or "tokens" (the next token; the paper's).
        states: the file that keeps the exit's states; None computes them anew each time.
        ids: int64[N], the tokens that the head scores, with the target's own LM head, which is not trained then; None
            trains an LM head of its own for all of them.

    Attributes:
        module: the head, float32.

    Raises:
        UsageError: N out of range, or an unknown loss.
        UnsupportedModelError: the model's layers are no plain list.
        StoreError: the states' file cannot be written.
    """

    module: ExitHead

    def __init__(
        self,
        model: Any,
        layers: int,
        traces: Traces,
        *,
        loss: str,
        states: Path | None,
        ids: torch.Tensor | None = None,
    ) -> None:
        if loss not in LOSSES:
            raise UsageError(f"loss is {loss!r}; it may be {' or '.join(LOSSES)}.")
        parts = model_parts(model)
        parts.check_exit(layers)
        self._traces, self._loss = traces, loss
        self.module = new_exit_head(model, ids).float().requires_grad_(requires_grad=True)
        self.module.lm_head.requires_grad_(requires_grad=ids is None)
        self._places = places_of(self.module.lm_head, model.get_output_embeddings().weight.shape[0])
        self.module.train()
        self._device: torch.device = model.get_input_embeddings().weight.device
        nothing, own = torch.nn.Identity(), dict(enumerate(model.get_submodule(parts.layers)[:layers]))
        self._first = shorter(model, parts, own, {parts.norm: nothing, parts.lm_head: nothing}).base_model
        self._exit = Passage(enters=True)
        self._behind = shorter(
            model, parts, {parts.count - 1: self._exit.into(self.module.layer)},
            {parts.norm: self.module.norm, parts.lm_head: self.module.lm_head},
        )  # fmt: skip
        self._known = np.zeros(len(traces.windows), np.bool_)  # windows whose states this run has put into the file
        width = model.get_output_embeddings().weight.shape[1]
        self._kept = None if states is None else _states_file(states, (len(traces.windows), traces.window, width))

    def loss(self, windows: Numbers) -> torch.Tensor:
        """Return the mean loss over the tokens of these windows."""
        logits = self.logits(windows).flatten(0, 1).float()
        if self._loss == "tokens":
            following = torch.from_numpy(self._traces.windows[windows, 1:].astype(np.int64)).to(self._device).flatten()
            return cross_entropy(
                logits, following if self._places is None else self._places[following], ignore_index=-1
            )
        return distribution_loss(logits, *self._traces.labels(windows, self._device), self._places)

    def agreement(self, windows: Numbers) -> float:
        """Return how often the head's most probable token is the target's."""
        right, ids = 0, ids_of(self.module.lm_head)
        for number in windows.tolist():
            chosen = self.logits(np.array([number]))[0].argmax(dim=-1).cpu().numpy()
            chosen = chosen if ids is None else ids[chosen]
            right += int((chosen == self._traces.top_ids[number, :, 0]).sum())
        return float(right / (len(windows) * self._traces.window))

    def logits(self, windows: Numbers) -> torch.Tensor:
        """Return the head's scores, float[B, T, V], or [B, T, N] of the tokens that it scores."""
        inputs = self._traces.inputs(windows, self._device)
        self._exit.states = self._states(windows, inputs)
        return self._behind(**inputs).logits  # type: ignore[no-any-return]  # transformers' outputs are Any

    @torch.no_grad()
    def _states(self, windows: Numbers, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the exit's states, float32[B, T, D], from the file where it holds them, in bfloat16."""
        if self._kept is not None and self._known[windows].all():
            return torch.from_numpy(self._kept[windows]).view(torch.bfloat16).float().to(self._device)
        with torch.autocast(self._device.type, enabled=False):  # as they are when drafting
            states = self._first(**inputs).last_hidden_state
        if self._kept is not None:
            self._kept[windows] = states.to(torch.bfloat16).view(torch.int16).cpu().numpy()
            self._known[windows] = True
        return states.float()  # type: ignore[no-any-return]  # transformers' outputs are Any


def distribution_loss(
    logits: torch.Tensor, top_ids: torch.Tensor, top_probabilities: torch.Tensor, places: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean cross-entropy to a distribution of which only the top is known; the rest counts as one token.

    Args:
        logits: float[R, V].
        top_ids: int64[R, K].
        top_probabilities: float[R, K].
        places: int64[vocabulary], where each token is scored, -1 where it is not; None where all are. What the target
            gives a token that is not scored is no part of the loss.
    """
    left = (1 - top_probabilities.sum(-1)).clamp_min(0)
    scored = torch.ones_like(top_ids, dtype=torch.bool)
    if places is not None:
        top_ids = places[top_ids]
        scored, top_ids = top_ids >= 0, top_ids.clamp_min(0)
    found = log_softmax(logits, dim=-1).gather(-1, top_ids)
    ours_left = (1 - (found.exp() * scored).sum(-1)).clamp_min(1e-6).log()
    return -((top_probabilities * scored * found).sum(-1) + left * ours_left).mean()


def _states_file(file: Path, shape: tuple[int, int, int]) -> np.memmap[Any, np.dtype[np.int16]]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return np.lib.format.open_memmap(file, "w+", np.int16, shape)
    except OSError as error:
        raise StoreError(
            f"{file} cannot be written ({error.strerror}); it needs {2 * np.prod(shape) / 2**30:.1f} GiB."
        ) from error
