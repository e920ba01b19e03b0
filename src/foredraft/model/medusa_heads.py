"""Medusa's heads, their file, and the tree that their accuracies give.

Knows states and weights; not how a head drafts or how it is trained.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from foredraft.model.heads import IDS, HeadCard, check_card, fill, read_head
from foredraft.model.ranked import ranked_head

RANKS = 10
"""A Medusa head's accuracies are kept for so many of its best tokens."""


class MedusaHeads(nn.Module):
    """Medusa's heads: residual blocks on the target's last hidden state that score the tokens after the next one.

    Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (ICML 2024), section
    2.1: head k is h + SiLU(W_k h), scored by the target's own LM head, which all heads share. A head's accuracies,
    measured on held-out text, come with it and decide the tree.

    Args:
        width: of the hidden states.
        count: how many heads (K).

    Attributes:
        accuracies: float32[K, RANKS], how often a head's i-th best token is the target's; zeros before it is measured.
    """

    accuracies: torch.Tensor

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        blocks = [nn.Linear(width, width) for _ in range(count)]
        for block in blocks:  # a head begins as the LM head itself
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.blocks = nn.ModuleList(blocks)
        self.register_buffer("accuracies", torch.zeros(count, RANKS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the shared LM head is to score, float[K, ..., D], for states float[..., D]."""
        return torch.stack([hidden + nn.functional.silu(block(hidden)) for block in self.blocks])


def load_medusa(location: str | Path, model: Any) -> tuple[HeadCard, MedusaHeads, nn.Module]:
    """Read Medusa heads, in the model's dtype and on its device, and the LM head that scores their states.

    Raises:
        UsageError: there are none, or they were trained for another model.
        StoreError: their files are damaged.
    """
    card, weights = read_head(location, "medusa")
    check_card(card, model, location)
    ids = weights.pop(IDS, None)
    heads = MedusaHeads(card.width, card.count)
    fill(heads, {name: weight.float() for name, weight in weights.items()}, location)
    lm_head = model.get_output_embeddings() if ids is None else ranked_head(model, ids)
    return card, heads.to(lm_head.weight.device, lm_head.weight.dtype).requires_grad_(requires_grad=False), lm_head


def static_tree(
    accuracies: npt.NDArray[np.float32], nodes: int, depth: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return the tree of ranks whose nodes are likeliest, going by products of accuracies, best first.

    Args:
        accuracies: float32[K, I], of each head's i-th best token.
        nodes: at most.
        depth: at most.

    Returns:
        parents int32[N] (-1 below the root), ranks int32[N] (which best token of its depth's head), and score
        float32[N], the product along the path. A parent comes before its children.
    """
    parents, ranks, score, level = [-1], [0], [1.0], [0]
    open_nodes: list[tuple[float, int, int]] = [(float(accuracies[0, 0]), 0, 0)] if depth > 0 else []
    while open_nodes and len(parents) <= nodes:  # (chance, node above, rank): its next sibling and first child follow
        best = max(range(len(open_nodes)), key=lambda i: open_nodes[i][0])
        chance, above, rank = open_nodes.pop(best)
        if chance <= 0:
            break
        parents.append(above)
        ranks.append(rank)
        score.append(chance)
        level.append(level[above] + 1)
        below = level[above]
        if rank + 1 < accuracies.shape[1]:
            open_nodes.append((score[above] * float(accuracies[below, rank + 1]), above, rank + 1))
        if below + 1 < min(depth, len(accuracies)):
            open_nodes.append((chance * float(accuracies[below + 1, 0]), len(parents) - 1, 0))
    found = np.array(parents[1:], np.int32) - 1, np.array(ranks[1:], np.int32), np.array(score[1:], np.float32)
    return found[0], found[1], found[2]
