"""Folders with untrained heads for models of four layers."""

import functools

import torch

from foredraft.model.head_files import card_for, save_head
from foredraft.model.heads import RANKS, ExitHead, MedusaHeads
from support.exits import target_of

HEADS = 3
"""Those of Medusa, each for one more position."""


@functools.cache
def head_folder(family, layers, folder):
    model = target_of(family).model
    save_head(folder, card_for(model, "eesd", family, layers=layers, dtype="float32"), ExitHead(model).state_dict())
    return str(folder)


def head_of(family, folder):
    model = target_of(family).model
    heads = MedusaHeads(model.config.hidden_size, HEADS)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    heads.accuracies.copy_(0.6 ** torch.arange(1, RANKS + 1).float().expand(HEADS, -1))
    card = card_for(model, "medusa", family, dtype="float32", count=HEADS)
    save_head(folder, card, heads.state_dict())
    return str(folder)
