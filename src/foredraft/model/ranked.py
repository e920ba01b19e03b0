"""An LM head for the most frequent tokens only, so that a drafting step need not score the whole vocabulary.

Zhao et al., "FR-Spec: Accelerating Large-Vocabulary Language Models via Frequency-Ranked Speculative Sampling" (ACL
2025). The target still scores every token. Does not depend on how the tokens were selected or drafts are made.
"""

from typing import Any

import torch
from torch import nn

from foredraft.errors import UsageError
from foredraft.graph.tree import IntArray


class RankedHead(nn.Linear):
    """Rows of an LM head for the tokens `ids`, int32[N], the most frequent token's first."""

    ids: torch.Tensor

    def __init__(self, width: int, ids: torch.Tensor, *, bias: bool = False) -> None:
        super().__init__(width, len(ids), bias=bias)
        self.register_buffer("ids", ids.to(torch.int32))


@torch.no_grad()
def ranked_head(model: Any, ids: torch.Tensor) -> RankedHead:
    """Return a frozen copy of the LM head's rows for different ids of the model, int64[N]; UsageError for others."""
    whole = model.get_output_embeddings()
    vocabulary, width = whole.weight.shape
    if not len(ids) or len(ids.unique()) != len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise UsageError(f"The {len(ids)} tokens to score must be different ids below {vocabulary}, and at least one.")
    bias = getattr(whole, "bias", None)
    head = RankedHead(width, ids, bias=bias is not None).to(whole.weight.device, whole.weight.dtype)
    head.weight.copy_(whole.weight[head.ids.long()])
    if bias is not None:
        head.bias.copy_(bias[head.ids.long()])
    return head.requires_grad_(requires_grad=False)


def ids_of(lm_head: Any) -> IntArray | None:
    """Return the token of each logit, int32[N]; None if they are 0, 1, 2, ..."""
    if not isinstance(lm_head, RankedHead):
        return None
    found: IntArray = lm_head.ids.cpu().numpy()
    return found


def places_of(lm_head: Any, vocabulary: int) -> torch.Tensor | None:
    """Return the index of each token's logit, int64[vocabulary], -1 for tokens without one; None if all have one."""
    if not isinstance(lm_head, RankedHead):
        return None
    places = torch.full((vocabulary,), -1, dtype=torch.int64, device=lm_head.ids.device)
    places[lm_head.ids.long()] = torch.arange(len(lm_head.ids), device=lm_head.ids.device)
    return places
