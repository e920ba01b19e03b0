"""An LM head for the most frequent tokens only: a drafting step need not score a whole vocabulary.

Zhao et al., "FR-Spec: Accelerating Large-Vocabulary Language Models via Frequency-Ranked Speculative Sampling" (ACL
2025). What is drafted is verified by the target, which scores every token, so that a text cannot tell. Knows an LM head
and ids; not where the ids come from, or what is drafted.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from foredraft.errors import UsageError
from foredraft.graph.tree import IntArray


class RankedHead(nn.Linear):
    """Some rows of an LM head, the most frequent tokens' first.

    Args:
        width: of the hidden states (D).
        ids: int64[N], the token of each row.
        bias: whether there is one.

    Attributes:
        ids: int32[N], as given.
    """

    ids: torch.Tensor

    def __init__(self, width: int, ids: torch.Tensor, *, bias: bool = False) -> None:
        super().__init__(width, len(ids), bias=bias)
        self.register_buffer("ids", ids.to(torch.int32))


@torch.no_grad()
def ranked_head(model: Any, ids: torch.Tensor) -> RankedHead:
    """Return the rows of the model's LM head for these tokens, int64[N]: a copy, in its dtype and on its device.

    Raises:
        UsageError: ids that the model does not have, or one twice.
    """
    whole = model.get_output_embeddings()
    vocabulary, width = whole.weight.shape
    if not len(ids) or len(ids.unique()) != len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise UsageError(
            f"The {len(ids)} tokens that are to be scored must be different ids below {vocabulary}, and at least one."
        )
    bias = getattr(whole, "bias", None)
    head = RankedHead(width, ids, bias=bias is not None).to(whole.weight.device, whole.weight.dtype)
    rows = ids.long().to(whole.weight.device)
    head.weight.copy_(whole.weight[rows])
    if bias is not None:
        head.bias.copy_(bias[rows])
    return head.requires_grad_(requires_grad=False)


def ids_of(lm_head: Any) -> IntArray | None:
    """Return the token of each score, int32[N]; None where the i-th score is the i-th token's."""
    if not isinstance(lm_head, RankedHead):
        return None
    found: IntArray = lm_head.ids.cpu().numpy()
    return found


def places_of(lm_head: Any, vocabulary: int) -> torch.Tensor | None:
    """Return where each token of a vocabulary is scored, int64[vocabulary]; -1 where it is not; None where all are."""
    if not isinstance(lm_head, RankedHead):
        return None
    places = torch.full((vocabulary,), -1, dtype=torch.int64, device=lm_head.ids.device)
    places[lm_head.ids.long()] = torch.arange(len(lm_head.ids), device=lm_head.ids.device)
    return places


def in_full(scores: np.ndarray, ids: IntArray, vocabulary: int) -> np.ndarray:
    """Return scores, float32[R, N], as those of a whole vocabulary, float32[R, vocabulary]: -inf for the others."""
    whole = np.full((len(scores), vocabulary), -np.inf, np.float32)
    whole[:, ids] = scores
    return whole
