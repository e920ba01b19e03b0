"""P-EAGLE's head: EAGLE-3's layers, with placeholders in the place of the tokens and states that follow the root.

P-EAGLE (2026), in the `speculators` format. One pass reads the text's new tokens and scores all levels. Does not depend
on what is drafted from the rows' scores.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from foredraft.contracts import TokenIds
from foredraft.errors import StoreError
from foredraft.graph.layout import lay_out_text
from foredraft.graph.tree import IntArray
from foredraft.model.eagle3 import Eagle3Layers
from foredraft.model.speculators import Speculator
from foredraft.model.state_heads import StateCache, StateHead, load_state_head
from foredraft.model.target import TorchTarget

METHOD = "peagle"


def load_peagle(folder: Path, model: Any) -> StateHead[Eagle3Layers]:
    """Load the head in a folder; raises what `load_state_head` does, and StoreError without a placeholder's id."""

    def make(found: Speculator, width: int) -> Eagle3Layers:
        if found.config.get("mask_token_id") is None or _levels(found.config) is None:
            raise StoreError(
                f"The drafter in {folder} names no mask_token_id or number of speculative_tokens; copy or download it "
                "again."
            )
        wide = len(found.layers) * width
        layers = Eagle3Layers(found.layer_config, found.config, len(found.layers), wide)
        layers.mask_hidden = nn.Parameter(torch.empty(1, 1, wide))
        return layers

    return load_state_head(folder, METHOD, model, make)


def _levels(config: Any) -> int | None:
    """Return how many tokens a drafter says that it drafts."""
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    count = proposals[0].get("speculative_tokens")
    return None if count is None else int(count)


class PEagleBlock:
    """One sequence's passes, as `Block`; `model` runs the `HeadModel` of `head`."""

    def __init__(self, head: StateHead[Eagle3Layers], model: TorchTarget) -> None:
        self._head, self._model, self.new_cache = head, model, model.new_cache
        self.levels = _levels(head.config) or 1
        self._masks = np.full(self.levels - 1, int(head.config["mask_token_id"]), np.int64)
        self._logits = torch.empty(0)  # float[L, V]

    def read(self, text: StateCache, ids: TokenIds, states: torch.Tensor) -> None:
        layers = self._head.layers
        for new in text.missing(len(ids), states):
            known, masks = states[new], self._masks if new.stop >= len(states) else self._masks[:0]
            layout = lay_out_text(np.concatenate([ids[text.begun :][new], masks]), new.start)
            placeholders = layers.get_parameter("mask_hidden")[0].expand(len(masks), -1)
            fused = layers.fused(torch.cat([known, placeholders]))
            rows = torch.cat([self._head.ends.embedded(layout)[0], fused], dim=-1)
            self._logits, _ = self._model.forward_rows(layout, text.cache, rows, scored=1 + len(masks))
            text.cache.commit(range(len(known)))

    def scores(self, level: int, tokens: IntArray) -> torch.Tensor:
        return self._logits[level : level + 1].expand(len(tokens), -1)
