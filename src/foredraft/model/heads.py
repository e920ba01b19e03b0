"""Trained modules that draft: early exits (EESD), agreement predictors (Cali-TS), draft models, Medusa heads, LM heads.

Builds them from a target and loads them from their files (model/head_files.py). Does not depend on how they draft or
how they are trained.
"""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foredraft.errors import UsageError
from foredraft.graph.tree import IntArray
from foredraft.model.head_files import CONFIG_FILE, IDS, HeadCard, filled, read_head
from foredraft.model.layers import model_parts, shorter

POSITIONS = 10  # draft levels that a predictor distinguishes; deeper ones count as the last (EESD, equation 5)
PREDICTOR_FOLDER = "agreement"  # subfolder of a head's folder that holds its agreement predictor
RANKS = 10  # number of a Medusa head's best tokens whose accuracies are stored
_ESTIMATE = "estimate.weight"  # a predictor's weight of the head's own estimate
_MARGIN = 1e-4  # estimates are clamped to this distance from 0 and 1, so that their logits are finite


class RankedHead(nn.Linear):
    """A frozen copy of an LM head's rows for the tokens `ids`, the most frequent first, so that a draft costs less.

    Zhao et al., "FR-Spec: Accelerating Large-Vocabulary Language Models via Frequency-Ranked Speculative Sampling" (ACL
    2025). The target still scores every token. Raises UsageError unless these are different ids of the model, int64[N].
    """

    ids: torch.Tensor  # int32[N]

    @torch.no_grad()
    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        whole = model.get_output_embeddings()
        vocabulary, width = whole.weight.shape
        if not len(ids) or len(ids.unique()) != len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise UsageError(
                f"The {len(ids)} tokens to score must be different ids below {vocabulary}, and at least one."
            )
        super().__init__(width, len(ids), bias=getattr(whole, "bias", None) is not None)
        self.register_buffer("ids", ids.to(torch.int32))
        self.to(whole.weight.device, whole.weight.dtype).requires_grad_(requires_grad=False)
        for own, rows in zip(self.parameters(), whole.parameters(), strict=True):  # the weight, and the bias if any
            own.copy_(rows[self.ids.long()])


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


class ExitHead(nn.Module):
    """An early exit: frozen copies of the model's last layer, for the exit's states, of its norm and its LM head.

    It scores the tokens `ids`, int64[N], or all. Raises UsageError for ids that the model does not have, and
    UnsupportedModelError if its layers are not a plain list.
    """

    def __init__(self, model: Any, ids: torch.Tensor | None = None) -> None:
        super().__init__()
        (self.layer,), self.norm, self.lm_head = _copies(model, 1, ids)
        self.requires_grad_(requires_grad=False)


def load_exit_head(location: str | Path, model: Any) -> tuple[HeadCard, ExitHead]:
    """Load an early-exit head, in the model's dtype and on its device. Raises what `read_head`, `ExitHead` do."""
    card, weights = read_head(location, "eesd", model)
    return card, filled(ExitHead(model, weights.get(IDS)), weights, location)


def exit_model(model: Any, layers: int, head: ExitHead | None) -> Any:
    """Return a model of the target's kind that runs its first `layers` layers and a head; shares the weights.

    Without a head, these layers' states are scored by the target's own norm and LM head. Raises UsageError for layers
    out of range.
    """
    parts = model_parts(model)
    parts.check_exit(layers)
    before = model.get_submodule(parts.layers)[:layers]
    return shorter(model, parts, dict(enumerate(before))) if head is None else headed(model, before, head.layer, head)


def headed(model: Any, before: Iterable[nn.Module], last: nn.Module, head: "ExitHead | FirstLayers") -> Any:
    """Return a model of the target's kind with the layers `before` and `last`, and the norm and LM head of `head`."""
    parts = model_parts(model)
    layers = {**dict(enumerate(before)), parts.count - 1: last}
    return shorter(model, parts, layers, {parts.norm: head.norm, parts.lm_head: head.lm_head})


def _copies(model: Any, count: int, ids: torch.Tensor | None) -> tuple[nn.ModuleList, nn.Module, nn.Module]:
    """Return copies of the first `count - 1` layers and the last one, of the norm, and of the LM head for `ids`."""
    parts = model_parts(model)
    own = model.get_submodule(parts.layers)
    lm_head = copy.deepcopy(model.get_output_embeddings()) if ids is None else RankedHead(model, ids)
    layers = nn.ModuleList(copy.deepcopy(each) for each in (*own[: count - 1], own[-1]))
    return layers, copy.deepcopy(model.get_submodule(parts.norm)), lm_head


class FirstLayers(nn.Module):
    """The layers of a draft model: frozen copies of a model's first `count - 1`, its last one, its norm and LM head.

    The embeddings are the target's own; they are shared in memory and not stored in the head's file. Raises UsageError
    if `count` is not between 1 and the model's layers less one, and what `ExitHead` does.
    """

    def __init__(self, model: Any, count: int, ids: torch.Tensor | None = None) -> None:
        super().__init__()
        model_parts(model).check_exit(count)
        self.layers, self.norm, self.lm_head = _copies(model, count, ids)
        self.requires_grad_(requires_grad=False)


def draft_model(model: Any, first: FirstLayers) -> Any:
    """Return a model of the target's kind that runs these layers and shares the target's embeddings."""
    *before, last = first.layers
    return headed(model, before, last, first)


def load_draft_model(location: str | Path, model: Any) -> tuple[HeadCard, Any]:
    """Load a draft model for `model`, in its dtype and on its device. Raises what `read_head`, `ExitHead` do."""
    card, weights = read_head(location, "draft", model)
    first = filled(FirstLayers(model, card.layers, weights.get(IDS)), weights, location)
    return card, draft_model(model, first)


class MedusaHeads(nn.Module):
    """Medusa's heads: residual blocks on the target's last hidden state that score the tokens after the next one.

    Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (ICML 2024), section
    2.1: head k of the `count` heads (K) is h + SiLU(W_k h) for hidden states of `width` numbers, scored by the target's
    LM head, which all heads share.
    """

    accuracies: torch.Tensor
    """float32[K, RANKS], how often a head's i-th best token is the target's, measured on held-out text and stored with
    the heads; it determines the draft tree. Zeros before measurement."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        for weight in self.blocks.parameters():  # with zero weights, a head is the LM head itself
            nn.init.zeros_(weight)
        self.register_buffer("accuracies", torch.zeros(count, RANKS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the LM head's inputs, float[K, ..., D], for states float[..., D]."""
        return torch.stack([hidden + nn.functional.silu(block(hidden)) for block in self.blocks])


def load_medusa(location: str | Path, model: Any) -> tuple[HeadCard, MedusaHeads, nn.Module]:
    """Load Medusa heads as `load_exit_head` does, and the LM head that scores their outputs."""
    card, weights = read_head(location, "medusa", model)
    ids = weights.pop(IDS, None)
    heads = filled(MedusaHeads(card.width, card.count), weights, location)
    lm_head = model.get_output_embeddings() if ids is None else RankedHead(model, ids)
    return card, heads.to(lm_head.weight.device, lm_head.weight.dtype).requires_grad_(requires_grad=False), lm_head


class AgreementPredictor(nn.Module):
    """Estimates the probability that the target agrees with a drafted token: Cali-TS's theta_M.

    EESD (Liu et al. 2024), equation 5: Sigmoid(W_p (W^i H_T, H_D)). H_T is the target's last hidden state at the token
    that gave the root, H_D the head's at the i-th drafted token, both of `width` numbers, and i is at most 10. W_p and
    W^i are both linear, so only their product matters: one vector for each i is stored, instead of ten matrices. Our
    addition: the head's own estimate of its token is an input too. It is for greedy texts: in sampled ones the estimate
    includes the noise that the target will add, and is better alone.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.target = nn.Linear(width, POSITIONS)
        self.draft = nn.Linear(width, 1, bias=False)
        self.estimate = nn.Linear(1, 1, bias=False)  # of the estimate's logit
        for weight in (self.target.weight, self.target.bias, self.draft.weight):
            nn.init.zeros_(weight)
        nn.init.ones_(self.estimate.weight)  # initially returns the head's own estimate

    def forward(
        self, target: torch.Tensor, draft: torch.Tensor, level: torch.Tensor, estimate: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits of agreement, float[R].

        Takes the last hidden states of the target and the head, float[R, D], the depths of the drafted tokens from 1,
        int64[R], and the head's estimates of them, float[R].
        """
        position = level.clamp(1, POSITIONS) - 1
        from_states = self.target(target).gather(1, position[:, None])[:, 0] + self.draft(draft)[:, 0]
        own = torch.logit(estimate, eps=_MARGIN)
        return from_states + self.estimate(own[:, None])[:, 0]  # type: ignore[no-any-return]  # a module's output is Any


def load_predictor(head: Path, model: Any, layers: int) -> AgreementPredictor | None:
    """Load the agreement predictor of the head in a folder, after `layers` layers; None if it has none.

    UsageError for one that was trained with another head, and what `read_head` raises.
    """
    folder = head / PREDICTOR_FOLDER
    if not (folder / CONFIG_FILE).is_file():
        return None
    card, weights = read_head(folder, "cali", model)
    if card.layers != layers:
        raise UsageError(
            f"The predictor in {folder} is of a head after {card.layers} layers, and this one is after {layers}; train "
            "it again with `foredraft train cali`, or remove its folder."
        )
    if (estimate := weights.get(_ESTIMATE)) is not None:  # files before 0.3 have two more, for sampled texts
        weights[_ESTIMATE] = estimate.reshape(1, -1)[:, :1]
    predictor = filled(AgreementPredictor(card.width), weights, folder)
    return predictor.to(model.get_input_embeddings().weight.device).requires_grad_(requires_grad=False)
