"""A trained head on three of the target's layers drafts a tree, by its own next states (EAGLE-3).

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (NeurIPS 2025).
Its tree is grown and cut by the expected acceptance of paths, as in EAGLE-2 (Li et al., EMNLP 2024). Needs a head of
the target: `model=FOLDER`, in the `speculators` format or as the authors publish them.

Does not depend on how tokens are chosen.
"""

from dataclasses import dataclass
from typing import ClassVar

from foredraft.contracts import DraftContext, Needs
from foredraft.drafters import Resources
from foredraft.model.candidates import Imitation
from foredraft.model.eagle3 import METHOD, Eagle3Layers, load_eagle3
from foredraft.model.growth import GrowthRules, RolloutDrafting
from foredraft.model.head_files import trained_head
from foredraft.model.speculators import FILES
from foredraft.model.state_heads import StateHead
from foredraft.model.state_rollout import StateRollout
from foredraft.model.target import loaded_target


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """Options of `eagle3`."""

    # the head (vLLM's name): a folder or hub id, in the `speculators` format or as EAGLE-3's authors publish them; None
    # takes the one that a checkout holds for the target
    model: str | None = None
    # children of a node at most; 1 drafts chains, and num_speculative_tokens limits their length
    out_degree: int = 6
    least_probability: float = 0.2  # a less probable token is drafted but not expanded
    least_share: float = 0.2  # a node below this share of its most probable sibling is not expanded
    levels: int = 6  # tokens drafted one after another at most

    def __post_init__(self) -> None:
        self.rules()

    def rules(self) -> GrowthRules:
        return GrowthRules(self.out_degree, self.least_probability, self.least_share, self.levels)


class Eagle3Drafter:
    """Drafts with a head, whose tree is grown level by level."""

    name: ClassVar[str] = METHOD
    summary: ClassVar[str] = "A trained head on the states of three of the target's layers (EAGLE-3)."
    Options = Eagle3Options
    source_names = (METHOD,)

    def __init__(self, options: Eagle3Options, head: StateHead[Eagle3Layers]) -> None:
        self._options, self._head = options, head
        self.needs = Needs(hidden=head.reads, every_step=False)

    @classmethod
    def create(cls, options: Eagle3Options, resources: Resources) -> "Eagle3Drafter":
        """Load the head; raises UsageError if there is none for this target, StoreError if it is damaged."""
        target = loaded_target(resources.target, cls.name, "from the target's hidden states")
        folder = trained_head(METHOD, options.model, target.model, option="model", files=FILES)
        return cls(options, load_eagle3(folder, target.model))

    def open(self, context: DraftContext) -> RolloutDrafting:
        imitation = Imitation.of(context.settings, context.seed, context.vocabulary, self._head.ends.ids)
        return RolloutDrafting(StateRollout(self._head, context.max_nodes), self._options.rules(), imitation)
