"""Training Medusa's heads: on the target's last hidden states, with the target and its LM head frozen.

Cai et al. 2024, section 2.2.1: the loss of head k is weighed by 0.8 to the power k, as deeper heads are less sure. They
learn the target's distribution at the place they foresee, as traces hold it. Knows traces; not the loop.
"""

from typing import Any

import torch

from foredraft.model.medusa_heads import RANKS, MedusaHeads
from foredraft.model.ranked import places_of, ranked_head
from foredraft.training import Numbers
from foredraft.training.exits import distribution_loss
from foredraft.training.traces import Traces

_DEEPER = 0.8


class MedusaTask:
    """Medusa heads in training.

    Args:
        model: the target.
        count: how many heads.
        traces: what to learn from.
        ids: int64[N], the tokens that the heads score; None for all.

    Attributes:
        module: the heads, float32.
    """

    module: MedusaHeads

    def __init__(self, model: Any, count: int, traces: Traces, ids: torch.Tensor | None = None) -> None:
        self._model, self._traces = model.requires_grad_(requires_grad=False), traces
        whole = model.get_output_embeddings()
        self._lm_head = whole if ids is None else ranked_head(model, ids)
        self._ids, self._places = ids, places_of(self._lm_head, whole.weight.shape[0])
        self._device: torch.device = self._lm_head.weight.device
        self.module = MedusaHeads(self._lm_head.weight.shape[1], count).to(self._device)

    def loss(self, windows: Numbers) -> torch.Tensor:
        """Return the heads' weighed loss over the tokens of these windows."""
        losses = [
            _DEEPER ** (head + 1)
            * distribution_loss(
                scores.flatten(0, 1).float(), *self._traces.labels(windows, self._device, places), self._places
            )
            for head, (scores, places) in enumerate(self._scores(windows))
        ]
        return torch.stack(losses).sum()

    def agreement(self, windows: Numbers) -> float:
        """Return how often the first head's best token is the target's."""
        return float(self.measured(windows)[0, 0])

    @torch.no_grad()
    def measured(self, windows: Numbers) -> torch.Tensor:
        """Return how often each head's i-th best token is the target's, float32[K, RANKS]."""
        found = torch.zeros_like(self.module.accuracies)
        for window in windows[:, None]:
            for head, (scores, places) in enumerate(self._scores(window)):
                theirs, _ = self._traces.labels(window, self._device, places)
                best = scores[0].topk(RANKS, dim=-1).indices
                best = best if self._ids is None else self._ids.to(best.device)[best]
                found[head] += (best == theirs[:, :1]).float().mean(0)
        return found / len(windows)

    def _scores(self, windows: Numbers) -> list[tuple[torch.Tensor, slice]]:
        """Return each head's scores, float[B, T - k, V], and the places whose target's choice they foresee."""
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):  # as they are when drafting
            output = self._model.base_model(**self._traces.inputs(windows, self._device))
        states = self.module(output.last_hidden_state.float()).to(self._lm_head.weight.dtype)
        return [(self._lm_head(each[:, : -(head + 1)]), slice(head + 1, None)) for head, each in enumerate(states)]
