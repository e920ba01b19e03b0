"""Training a draft model made of the target's own layers: the target's distribution, by distillation from its traces.

DistillSpec (Zhou et al., ICLR 2024) finds that a draft model learns best what the target says of texts like those that
will be drafted, which the target's own are. Knows traces and a model's layers; not the loop.
"""

from typing import Any

import numpy as np
import torch

from foredraft.model.first_layers import FirstLayers, draft_model, new_first_layers
from foredraft.model.ranked import ids_of, places_of
from foredraft.training import Numbers
from foredraft.training.exits import distribution_loss
from foredraft.training.traces import Traces


class DraftTask:
    """A draft model in training; its embeddings and LM head are the target's, and stay as they are.

    Args:
        model: the target; afterwards only its embeddings are held here.
        layers: of the draft model.
        traces: what to learn from.
        ids: int64[N], the tokens that it scores; None for all.

    Attributes:
        module: its layers and norm, float32.

    Raises:
        UsageError: layers out of range.
        UnsupportedModelError: the model's layers are no plain list.
    """

    module: FirstLayers

    def __init__(self, model: Any, layers: int, traces: Traces, ids: torch.Tensor | None = None) -> None:
        self._traces = traces
        self._device: torch.device = model.get_input_embeddings().weight.device
        self.module = new_first_layers(model, layers, ids).float().requires_grad_(requires_grad=True)
        self.module.lm_head.requires_grad_(requires_grad=False)
        self.module.train()
        self._places = places_of(self.module.lm_head, model.get_output_embeddings().weight.shape[0])
        self._drafting = draft_model(model.requires_grad_(requires_grad=False), self.module)

    def loss(self, windows: Numbers) -> torch.Tensor:
        """Return the mean loss over the tokens of these windows."""
        logits = self._logits(windows).flatten(0, 1).float()
        return distribution_loss(logits, *self._traces.labels(windows, self._device), self._places)

    def agreement(self, windows: Numbers) -> float:
        """Return how often the draft model's most probable token is the target's."""
        right, ids = 0, ids_of(self.module.lm_head)
        for number in windows.tolist():
            chosen = self._logits(np.array([number]))[0].argmax(dim=-1).cpu().numpy()
            chosen = chosen if ids is None else ids[chosen]
            right += int((chosen == self._traces.top_ids[number, :, 0]).sum())
        return float(right / (len(windows) * self._traces.window))

    def _logits(self, windows: Numbers) -> torch.Tensor:
        """Return the draft model's scores, float[B, T, V], or [B, T, N] of the tokens that it scores."""
        return self._drafting(**self._traces.inputs(windows, self._device)).logits  # type: ignore[no-any-return]  # transformers' outputs are Any
