"""The target's first layers draft a chain or a tree, through an early exit with a small trained head.

Liu et al., "Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling Control Mechanism"
(EESD, ACL Findings 2024). Needs a head trained for the model (`foredraft train eesd`): `head=FOLDER`.

The target verifies with all its layers. The paper lets the verification go on from the first layers' states; but a
pass of few rows takes the time of reading the weights, so that saves less than the pass of the first layers that the
last drafted token would need. A control decides when to stop drafting. Does not depend on how tokens are chosen.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch

from foredraft.contracts import DraftContext, Needs
from foredraft.drafters import Resources
from foredraft.errors import UsageError
from foredraft.model.candidates import Candidates, Imitation
from foredraft.model.growth import GrowthRules, Rollout, RolloutDrafting
from foredraft.model.head_files import trained_head
from foredraft.model.heads import AgreementPredictor, exit_model, load_exit_head, load_predictor
from foredraft.model.layers import LAST
from foredraft.model.target import TorchTarget, loaded_target

NO_HEAD = "none"


@dataclass(frozen=True, slots=True)
class EesdOptions:
    """Options of `eesd`."""

    # a folder or a hub id that `foredraft train eesd` wrote; None takes the one that a checkout holds for the model;
    # "none" exits without one, through the target's own norm and LM head (which drafts poorly)
    head: str | None = None
    layers: int | None = None  # layers before the exit; with a head, None or the number it was trained for
    # children of a node at most. The paper drafts chains: out_degree 1, least_probability 0, levels 10; the defaults
    # verify many tokens of few passes of the first layers, which is faster on SmolLM2
    out_degree: int = 7
    least_probability: float = 0.5  # a less probable token is drafted but not expanded
    least_share: float = 0.3  # a node below this share of its most probable sibling is not expanded
    levels: int = 3  # tokens drafted one after another at most
    # whether the head's predictor (`foredraft train cali`) estimates the acceptance probabilities that controls and
    # pruning use in greedy texts (in sampled ones, the head's own estimate takes the noise into account): true always,
    # false never, None for chains if there is one (trees are 1 % faster without it)
    calibrated: bool | None = None

    def __post_init__(self) -> None:
        self.rules()
        if self.layers is not None and self.layers < 1:
            raise UsageError(f"layers is {self.layers}; at least one layer must lie before the exit.")
        if self.head == NO_HEAD and self.layers is None:
            raise UsageError("Without a head, say after how many layers to exit: layers=N.")

    def rules(self) -> GrowthRules:
        return GrowthRules(self.out_degree, self.least_probability, self.least_share, self.levels)


class EesdDrafter:
    """Drafts with the layers before the exit and the head, whose estimates a predictor may correct."""

    name: ClassVar[str] = "eesd"
    summary: ClassVar[str] = "The target's first layers and a trained early-exit head (EESD)."
    Options = EesdOptions
    source_names = ("eesd",)

    def __init__(self, options: EesdOptions, model: TorchTarget, predictor: AgreementPredictor | None) -> None:
        self._options, self._model, self._predictor = options, model, predictor
        self.needs = Needs(hidden=() if predictor is None else (LAST,), every_step=False, models=(model,))

    @classmethod
    def create(cls, options: EesdOptions, resources: Resources) -> "EesdDrafter":
        """Load the head, and its predictor if it is used.

        Raises UsageError for a missing or unfitting head, StoreError for a damaged one, and UnsupportedModelError for
        a model whose layers are not a plain list.
        """
        target = loaded_target(resources.target, cls.name, "with the target's own layers")
        head, layers, predictor = None, options.layers, None
        if options.head != NO_HEAD:
            location = trained_head("eesd", options.head, target.model)
            card, head = load_exit_head(location, target.model)
            if layers not in (None, card.layers):
                raise UsageError(
                    f"layers is {layers}, and the head in {location} was trained after {card.layers} layers; leave "
                    "layers out, or train another head."
                )
            layers = card.layers
            wanted = options.out_degree == 1 if options.calibrated is None else options.calibrated
            predictor = load_predictor(location, target.model, layers) if wanted else None
            if options.calibrated and predictor is None:
                raise UsageError(
                    f"The head in {location} has no predictor; train one with `foredraft train cali --head "
                    f"{location}`, or leave calibrated out."
                )
        assert layers is not None, "the options say so without a head"
        model = target.with_model(exit_model(target.model, layers, head), rounded=True)
        return cls(options, model, predictor)

    def open(self, context: DraftContext) -> RolloutDrafting:
        imitation = Imitation.of(context.settings, context.seed, context.vocabulary, self._model.ids)
        predictor = None if imitation.sampling.do_sample else self._predictor
        rollout = Rollout(self._model, context.max_nodes, hidden=predictor is not None)
        calibrate = None if predictor is None else partial(_calibrated, predictor, rollout)
        return RolloutDrafting(rollout, self._options.rules(), imitation, calibrate)


def _calibrated(
    predictor: AgreementPredictor, rollout: Rollout, found: Candidates, level: int, states: torch.Tensor | None
) -> Candidates:
    """Give the best candidate of each row the predictor's probability, and scale the others to the rest.

    Takes the head's states of the rows from its rollout, which keeps them; the target's, float[m, D], end with the row
    that chose the root.
    """
    hidden = rollout.hidden
    if states is None or hidden is None:
        return found
    own, like = found.probabilities[:, 0], predictor.target.weight
    target, levels = states[-1:].to(like).expand(len(own), -1), torch.full((len(own),), level, device=like.device)
    logits = predictor(target, hidden.to(like), levels, torch.from_numpy(own).to(like))
    chance = logits.sigmoid().cpu().numpy()
    others = found.probabilities * ((1 - chance) / np.maximum(1 - own, 1e-6))[:, None]
    return Candidates(found.tokens, np.column_stack([chance, np.minimum(others[:, 1:], chance[:, None])]))
