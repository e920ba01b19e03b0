"""Training Cali-TS's predictor: does the target agree with what an early-exit head drafts?

EESD (Liu et al. 2024), section 3.3. The labels compare the head's token with the target's at each place of a window,
for levels whose levels above agreed, as only those are ever asked about. In every other window both choose with the
same noise, as they do when a text is sampled. Knows traces and a head; not the loop.
"""

from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from foredraft.model.heads import POSITIONS, AgreementPredictor, ExitHead
from foredraft.model.ranked import RankedHead
from foredraft.training import Numbers
from foredraft.training.tasks import ExitTask
from foredraft.training.traces import Traces

TEMPERATURE = 0.7
"""Of the windows that are looked at as sampled."""
_LOOKED_AT = 32
"""Tokens of a row that noise may bring to the top, as when drafting (model/candidates.py)."""


class AgreementTask:
    """A predictor in training for a head that exits after `layers` of the model; `module` is the predictor."""

    module: AgreementPredictor

    def __init__(self, model: Any, head: ExitHead, layers: int, traces: Traces) -> None:
        self._ids = head.lm_head.ids.long() if isinstance(head.lm_head, RankedHead) else None
        self._exit = ExitTask(model, layers, traces, loss="tokens", states=None, ids=self._ids)
        self._exit.module.load_state_dict(head.state_dict())
        self._exit.module.eval().requires_grad_(requires_grad=False)
        self._exit.module.lm_head.register_forward_pre_hook(self._see)
        self._model, self._traces = model, traces
        self._device: torch.device = model.get_input_embeddings().weight.device
        self._seen = torch.empty(0)
        self._vocabulary, width = model.get_output_embeddings().weight.shape
        self.module = AgreementPredictor(width).to(self._device)

    def loss(self, windows: Numbers) -> torch.Tensor:
        """Return the mean cross-entropy over all levels that a draft could reach in these windows."""
        logits, labels = self._predicted(windows)
        return binary_cross_entropy_with_logits(logits, labels)

    def agreement(self, windows: Numbers) -> float:
        """Return how often a level is rightly predicted to be accepted or not."""
        logits, labels = self._predicted(windows)
        return float(((logits > 0) == (labels > 0.5)).float().mean())

    def _predicted(self, windows: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the predictor's logits and the labels, float[n]."""
        *seen, labels = (torch.cat(each) for each in zip(*map(self.levels, windows.tolist()), strict=True))
        with torch.autocast(self._device.type, enabled=False):
            return self.module(*seen), labels

    @torch.no_grad()
    def levels(self, number: int) -> tuple[torch.Tensor, ...]:
        """Return what is learned from a window: of each level that a draft would reach, from each of its places.

        Returns:
            the target's states and the head's, float[n, D], the level, int64[n], the head's estimate, whether the
            window is looked at as sampled, and whether target and head agree, float[n].
        """
        window = np.array([number])
        with torch.autocast(self._device.type, enabled=False):
            scores = self._exit.logits(window)[0].float()
            target = self._model.base_model(**self._traces.inputs(window, self._device)).last_hidden_state[0].float()
        agree, estimate = self._compared(number, scores)
        level = torch.arange(1, POSITIONS + 1, device=self._device)[None]
        place = torch.arange(self._traces.window, device=self._device)[:, None] + level
        inside = place < self._traces.window
        place = place.clamp(max=self._traces.window - 1)
        reached = torch.cumprod(torch.cat([torch.ones_like(inside[:, :1]), agree[place[:, :-1]]], 1).int(), 1).bool()
        at, row = torch.nonzero(inside & reached, as_tuple=True)
        chosen = place[at, row]
        sampled = torch.full_like(estimate[chosen], float(_as_sampled(number)))
        draft = self._seen[0].float()
        return target[at], draft[chosen], row + 1, estimate[chosen], sampled, agree[chosen].float()

    def _compared(self, number: int, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether head and target choose alike at each place, bool[T], and how sure the head is, float[T]."""
        theirs, known = self._traces.labels(np.array([number]), self._device)
        if not _as_sampled(number):
            best = torch.softmax(scores, -1).max(-1)
            return self._full(best.indices) == theirs[:, 0], best.values
        generator = torch.Generator().manual_seed(number)
        uniform = torch.rand((len(scores), self._vocabulary), generator=generator).clamp(1e-10, 1 - 1e-7)
        noise = -torch.log(-torch.log(uniform)).to(self._device)
        target = known.clamp_min(1e-8).log() / TEMPERATURE + noise.gather(1, theirs)
        ours = torch.log_softmax(scores, -1).topk(min(_LOOKED_AT, scores.shape[-1]))
        drafted = self._full(ours.indices)
        best = torch.softmax(ours.values / TEMPERATURE + noise.gather(1, drafted), -1).max(-1)
        chosen = drafted.gather(1, best.indices[:, None]) == theirs.gather(1, target.argmax(-1)[:, None])
        return chosen[:, 0], best.values

    def _full(self, places: torch.Tensor) -> torch.Tensor:
        """Return the tokens, int64, of scores in these places."""
        return places if self._ids is None else self._ids[places]

    def _see(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._seen = inputs[0]


def _as_sampled(number: int) -> bool:
    return number % 2 == 1
