"""Training of Cali-TS's predictor: will the target agree with what an early-exit head drafts?

EESD (Liu et al. 2024), section 3.3. The labels compare the head's token with the target's at each position of a window,
for levels whose previous levels agreed, as the predictor is only used for those. In odd windows both choose with the
same noise, as in sampled texts. Does not depend on the training loop.
"""

from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from foredraft.model.candidates import NOISY_TOKENS
from foredraft.model.heads import POSITIONS, AgreementPredictor, ExitHead
from foredraft.model.ranked import RankedHead
from foredraft.training import Numbers
from foredraft.training.tasks import ExitTask
from foredraft.training.traces import Traces

TEMPERATURE = 0.7  # of the windows that are treated as sampled; chosen, as the traces' default


class AgreementTask:
    """Trains a predictor for a head that exits after `layers` layers; `module` is the predictor."""

    module: AgreementPredictor

    def __init__(self, model: Any, head: ExitHead, layers: int, traces: Traces) -> None:
        self._ids = head.lm_head.ids.long() if isinstance(head.lm_head, RankedHead) else None
        self._exit = ExitTask(model, layers, traces, loss="tokens", states=None, ids=self._ids)
        self._exit.module.load_state_dict(head.state_dict())
        self._exit.module.eval().requires_grad_(requires_grad=False)
        self._exit.module.lm_head.register_forward_pre_hook(self._keep_states)
        self._model, self._traces = model, traces
        self._device: torch.device = model.get_input_embeddings().weight.device
        self._states = torch.empty(0)  # the head's hidden states in its last pass, [B, T, D]
        self._vocabulary, width = model.get_output_embeddings().weight.shape
        self.module = AgreementPredictor(width).to(self._device)

    def loss(self, windows: Numbers) -> torch.Tensor:
        """Return the mean cross-entropy over all levels that a draft could reach in these windows."""
        logits, labels = self._predicted(windows)
        return binary_cross_entropy_with_logits(logits, labels)

    def agreement(self, windows: Numbers) -> float:
        """Return the share of levels whose acceptance is predicted correctly."""
        logits, labels = self._predicted(windows)
        return float(((logits > 0) == (labels > 0.5)).float().mean())

    def _predicted(self, windows: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the predictor's logits and the labels, float[n]."""
        *inputs, labels = (torch.cat(each) for each in zip(*map(self.levels, windows.tolist()), strict=True))
        with torch.autocast(self._device.type, enabled=False):
            return self.module(*inputs), labels

    @torch.no_grad()
    def levels(self, number: int) -> tuple[torch.Tensor, ...]:
        """Return the training examples of a window: every level that a draft would reach, from every position.

        These are the target's states and the head's, float[n, D], the level, int64[n], the head's estimate, whether the
        window is treated as sampled, and whether target and head agree, float[n].
        """
        window = np.array([number])
        with torch.autocast(self._device.type, enabled=False):
            scores = self._exit.logits(window)[0].float()
            target = self._model.base_model(**self._traces.inputs(window, self._device)).last_hidden_state[0].float()
        agree, estimate = self._compared(number, scores)
        level = torch.arange(1, POSITIONS + 1, device=self._device)[None]
        position = torch.arange(self._traces.window, device=self._device)[:, None] + level
        inside = position < self._traces.window
        position = position.clamp(max=self._traces.window - 1)
        agreed = torch.cat([torch.ones_like(inside[:, :1]), agree[position[:, :-1]]], 1)
        reached = torch.cumprod(agreed.int(), 1).bool()
        at, row = torch.nonzero(inside & reached, as_tuple=True)
        chosen = position[at, row]
        sampled = torch.full_like(estimate[chosen], float(number % 2))
        draft = self._states[0].float()
        return target[at], draft[chosen], row + 1, estimate[chosen], sampled, agree[chosen].float()

    def _compared(self, number: int, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether head and target agree at each position, bool[T], and the head's estimate, float[T]."""
        theirs, known = self._traces.labels(np.array([number]), self._device)
        if number % 2 == 0:
            best = torch.softmax(scores, -1).max(-1)
            return self._full(best.indices) == theirs[:, 0], best.values
        generator = torch.Generator().manual_seed(number)
        uniform = torch.rand((len(scores), self._vocabulary), generator=generator).clamp(1e-10, 1 - 1e-7)
        noise = -torch.log(-torch.log(uniform)).to(self._device)
        target = known.clamp_min(1e-8).log() / TEMPERATURE + noise.gather(1, theirs)
        ours = torch.log_softmax(scores, -1).topk(min(NOISY_TOKENS, scores.shape[-1]))
        drafted = self._full(ours.indices)
        best = torch.softmax(ours.values / TEMPERATURE + noise.gather(1, drafted), -1).max(-1)
        chosen = drafted.gather(1, best.indices[:, None]) == theirs.gather(1, target.argmax(-1)[:, None])
        return chosen[:, 0], best.values

    def _full(self, places: torch.Tensor) -> torch.Tensor:
        """Return the tokens, int64, of indices into the head's logits."""
        return places if self._ids is None else self._ids[places]

    def _keep_states(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._states = inputs[0]
