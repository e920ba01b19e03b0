"""Training Medusa's heads: on the target's last hidden states, with the target and its LM head frozen.

Cai et al. 2024, section 2.2.1: the loss of head k is weighed by 0.8 to the power k, as deeper heads are less sure. They
learn the target's distribution at the place they foresee, as traces hold it. Knows traces; not the loop.
"""

from typing import Any

import numpy as np
import torch

from foredraft.model.heads import RANKS, MedusaHeads
from foredraft.training.exits import distribution_loss, tensor_of
from foredraft.training.loop import Numbers
from foredraft.training.traces import Traces

_DEEPER = 0.8


class MedusaTask:
    """Medusa heads in training.

    Args:
        model: the target.
        count: how many heads.
        traces: what to learn from.

    Attributes:
        module: the heads, float32.
        window: tokens of a window.
    """

    module: MedusaHeads

    def __init__(self, model: Any, count: int, traces: Traces) -> None:
        self.window = traces.windows.shape[1] - 1
        lm_head = model.get_output_embeddings()
        self.module = MedusaHeads(lm_head.weight.shape[1], count).to(lm_head.weight.device)
        model.requires_grad_(requires_grad=False)
        self._model, self._lm_head, self._traces = model, lm_head, traces

    def loss(self, windows: Numbers) -> torch.Tensor:
        """Return the heads' weighed loss over the tokens of these windows."""
        total = torch.zeros((), device=self._lm_head.weight.device)
        for head, (scores, places) in enumerate(self._scores(windows)):
            top_ids, top_probabilities = (
                tensor_of(array[windows][:, places], self._lm_head.weight.device).flatten(0, 1)
                for array in (self._traces.top_ids, self._traces.top_probabilities)
            )
            loss = distribution_loss(scores.flatten(0, 1).float(), top_ids.long(), top_probabilities.float())
            total = total + _DEEPER ** (head + 1) * loss
        return total

    def agreement(self, windows: Numbers) -> float:
        """Return how often the first head's best token is the target's."""
        return float(self.measured(windows)[0, 0])

    @torch.no_grad()
    def measured(self, windows: Numbers) -> torch.Tensor:
        """Return how often each head's i-th best token is the target's, float32[K, RANKS]."""
        found = torch.zeros_like(self.module.accuracies)
        for number in windows.tolist():
            for head, (scores, places) in enumerate(self._scores(np.array([number]))):
                best = scores[0].topk(RANKS, dim=-1).indices
                theirs = tensor_of(self._traces.top_ids[number, places, :1], best.device)
                found[head] += (best == theirs).float().mean(0)
        return found / len(windows)

    def _scores(self, windows: Numbers) -> list[tuple[torch.Tensor, slice]]:
        """Return each head's scores, float[B, T - k, V], and the places whose target's choice they foresee."""
        ids = tensor_of(self._traces.windows[windows, :-1], self._lm_head.weight.device).long()
        with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):  # as they are when drafting
            output = self._model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        states = self.module(output.last_hidden_state.float())
        dtype = self._lm_head.weight.dtype
        return [
            (self._lm_head(states[head, :, : -(head + 1)].to(dtype)), slice(head + 1, None))
            for head in range(len(states))
        ]
