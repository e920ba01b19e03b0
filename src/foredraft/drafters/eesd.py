"""The target's first layers draft a chain or a tree, through an early exit with a small trained head.

Liu et al., "Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling Control Mechanism"
(EESD, ACL Findings 2024). Needs a head trained for the model (`foredraft train eesd`): `head=FOLDER`.

A control decides when to stop drafting. Does not depend on how tokens are chosen.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from foredraft.contracts import Budget, Draft, DraftContext, Needs, SequenceView, Verdict
from foredraft.drafters import Resources
from foredraft.errors import UsageError
from foredraft.model.candidates import Candidates, Imitation
from foredraft.model.growth import GrowthRules, RolloutDrafting
from foredraft.model.head_files import trained_head
from foredraft.model.heads import AgreementPredictor, load_exit_head, load_predictor
from foredraft.model.split import ExitModel, SplitCache, SplitTarget
from foredraft.model.target import TorchTarget

NO_HEAD = "none"


@dataclass(frozen=True, slots=True)
class EesdOptions:
    """Options of `eesd`."""

    # a folder or a hub id that `foredraft train eesd` wrote; None takes the one that a checkout holds for the model;
    # "none" exits without one, through the target's own norm and LM head (which drafts poorly)
    head: str | None = None
    layers: int | None = None  # layers before the exit; with a head, None or the number it was trained for
    out_degree: int = 1  # children of a node at most; 1 drafts chains
    least_probability: float = 0.0  # drafting stops after a token less probable than this
    least_share: float = 0.3  # a node below this share of its most probable sibling is not expanded
    levels: int = 10  # tokens drafted one after another at most
    # whether the head's predictor (`foredraft train cali`) estimates the acceptance probabilities that controls and
    # pruning use: true always, false never, None if there is one and decoding is greedy (when sampling, the head's own
    # estimate takes the noise into account)
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
    """A target split in two parts, of which the first one drafts; without a predictor, by the head's estimates."""

    name: ClassVar[str] = "eesd"
    summary: ClassVar[str] = "The target's first layers and a trained early-exit head (EESD)."
    Options = EesdOptions
    source_names = ("eesd",)

    def __init__(self, options: EesdOptions, target: SplitTarget, predictor: AgreementPredictor | None = None) -> None:
        self.options, self.target, self.predictor = options, target, predictor
        # each level costs a pass, so the control must weigh costs
        hidden, models = predictor is not None, (target.first, target.rest)
        self.needs = Needs(hidden=hidden, every_step=False, control="cost_aware", target=target, models=models)

    @classmethod
    def create(cls, options: EesdOptions, resources: Resources) -> "EesdDrafter":
        """Load the head and split the target.

        Raises UsageError for a missing or unfitting head, StoreError for a damaged one, and UnsupportedModelError for
        a model that cannot be split.
        """
        target = resources.target
        if not isinstance(target, TorchTarget):
            raise UsageError("Method 'eesd' drafts with the target's own layers, and no model is loaded here.")
        if options.head == NO_HEAD:
            assert options.layers is not None
            return cls(options, SplitTarget(target, options.layers, None))
        location = trained_head("eesd", options.head, target.model)
        card, head = load_exit_head(location, target.model)
        if options.layers not in (None, card.layers):
            raise UsageError(
                f"layers is {options.layers}, and the head in {location} was trained after {card.layers} layers; "
                "leave layers out, or train another head."
            )
        predictor = load_predictor(location, target.model) if options.calibrated is not False else None
        if options.calibrated and predictor is None:
            raise UsageError(
                f"The head in {location} has no predictor; train one with `foredraft train cali --head {location}`, or "
                "leave calibrated out."
            )
        return cls(options, SplitTarget(target, card.layers, head), predictor)

    def open(self, context: DraftContext) -> "_Drafting":
        """Begin drafting for one sequence; raises UsageError if its cache does not belong to `target`."""
        if not isinstance(context.cache, SplitCache):
            raise UsageError("Method 'eesd' needs the cache of its own target, and cannot draft for another one here.")
        return _Drafting(self, context)


class _Drafting:
    """One sequence's drafting in the first layers, whose rows stay in the cache for the verification."""

    def __init__(self, drafter: EesdDrafter, context: DraftContext) -> None:
        options, self._target = drafter.options, drafter.target
        imitation = Imitation.of(context.settings, context.seed, context.vocabulary, self._target.first.ids)
        self._samples = imitation.sampling.do_sample
        asked = not self._samples if options.calibrated is None else options.calibrated
        self._predictor = drafter.predictor if asked else None
        calibrate = self._calibrate if self._predictor is not None else None
        model = ExitModel(self._target, context.cache)
        self._rollout = RolloutDrafting(model, options.rules(), imitation, context.max_nodes, calibrate)
        self._hidden: torch.Tensor | None = None  # the target's last hidden state at the row that chose the root
        self._length = 0  # length of the sequence at that state
        self._asked = False  # whether a draft was requested in this step

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        self._asked = budget.nodes > 0
        if self._length != len(view.ids):
            self._hidden = None
        return self._rollout.propose(view, budget)

    def observe(self, verdict: Verdict) -> None:
        if verdict.hidden is not None and self._predictor is not None and self._asked:
            self._hidden, self._length = verdict.hidden[verdict.last_row], verdict.at + 1 + len(verdict.tokens)

    def close(self) -> None:
        self._rollout.close()
        self._hidden = None

    def _calibrate(self, found: Candidates, level: int) -> Candidates:
        """Give the best candidate of each row the predictor's probability, and scale the others to the rest."""
        if self._predictor is None or self._hidden is None:
            return found
        own = found.probabilities[:, 0]
        best = self._predictor.chances(
            self._hidden, self._target.exit_hidden, level, torch.from_numpy(own.copy()), sampled=self._samples
        )
        chance = best.cpu().numpy()
        others = found.probabilities * ((1 - chance) / np.maximum(1 - own, 1e-6))[:, None]
        return Candidates(found.tokens, np.column_stack([chance, np.minimum(others[:, 1:], chance[:, None])]))
