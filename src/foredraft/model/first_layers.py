"""A draft model made of a target's own layers: its first ones and its last, behind the embeddings of the target.

Its file holds the layers and a norm (model/heads.py, kind "draft"); embeddings and LM head are the target's, shared in
memory and stored once. Knows a target's modules and such files; not what is drafted.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foredraft.errors import UsageError
from foredraft.model.heads import IDS, HeadCard, check_card, fill, new_lm_head, read_head
from foredraft.model.layers import model_parts, shorter

KIND = "draft"


class FirstLayers(nn.Module):
    """What of a draft model is its own.

    Args:
        layers: of the target's kind.
        norm: takes the last one's output.
        lm_head: scores it; the target's, or its rows for the most frequent tokens.
    """

    def __init__(self, layers: nn.ModuleList, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.layers, self.norm, self.lm_head = layers, norm, lm_head


def new_first_layers(model: Any, count: int, ids: torch.Tensor | None = None) -> FirstLayers:
    """Return what a draft model begins as: copies of the first `count - 1` layers, of the last one, and of the norm.

    Args:
        model: the target.
        count: layers of the draft model.
        ids: int64[N], the tokens that it scores; None for all.

    Raises:
        UsageError: as many layers as the target has, none, or ids that it does not have.
        UnsupportedModelError: its layers are no plain list.
    """
    parts = model_parts(model)
    if not 1 <= count < parts.count:
        raise UsageError(f"layers is {count}; a draft model of this one has 1 to {parts.count - 1}.")
    own = model.get_submodule(parts.layers)
    layers = nn.ModuleList(copy.deepcopy(each) for each in (*own[: count - 1], own[-1]))
    norm = copy.deepcopy(model.get_submodule(parts.norm))
    return FirstLayers(layers, norm, new_lm_head(model, ids)).requires_grad_(requires_grad=False)


def draft_model(model: Any, first: FirstLayers) -> Any:
    """Return a model of the target's kind that runs these layers; the embeddings are the target's own."""
    parts = model_parts(model)
    *before, last = first.layers
    layers = {**dict(enumerate(before)), parts.count - 1: last}
    return shorter(model, parts, layers, {parts.norm: first.norm, parts.lm_head: first.lm_head})


def load_draft_model(location: str | Path, model: Any) -> tuple[HeadCard, Any]:
    """Read a draft model for `model`, in its dtype and on its device.

    Raises:
        UsageError: there is none, or it was trained for another model.
        StoreError: its files are damaged.
        UnsupportedModelError: the model's layers are no plain list.
    """
    card, weights = read_head(location, KIND)
    check_card(card, model, location)
    first = new_first_layers(model, card.layers, weights.get(IDS))
    fill(first, weights, location)
    return card, draft_model(model, first)
