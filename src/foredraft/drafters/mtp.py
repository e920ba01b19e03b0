"""The multi-token-prediction layer of the target's own checkpoint drafts a tree, by its own next states.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2. Qwen3.5, DeepSeek V3, GLM 4.5, Mellum 2 and others have
one; it is found without being named. The tree is grown and cut as EAGLE-3's.

Does not depend on how tokens are chosen.
"""

from dataclasses import dataclass
from typing import ClassVar

from foredraft.contracts import DraftContext, Needs
from foredraft.drafters import Resources
from foredraft.model.candidates import Imitation
from foredraft.model.growth import GrowthRules, RolloutDrafting
from foredraft.model.mtp import MtpLayers, load_mtp
from foredraft.model.state_heads import StateHead
from foredraft.model.state_rollout import StateRollout
from foredraft.model.target import loaded_target


@dataclass(frozen=True, slots=True)
class MtpOptions:
    """Options of `mtp`."""

    # children of a node at most; 1 drafts chains, and num_speculative_tokens limits their length
    out_degree: int = 4
    least_probability: float = 0.2  # a less probable token is drafted but not expanded
    levels: int = 4  # tokens drafted one after another at most

    def __post_init__(self) -> None:
        self.rules()

    def rules(self) -> GrowthRules:
        return GrowthRules(self.out_degree, self.least_probability, levels=self.levels)


class MtpDrafter:
    """Drafts with the checkpoint's layer, whose tree is grown level by level."""

    name: ClassVar[str] = "mtp"
    summary: ClassVar[str] = "The multi-token-prediction layer that the target's own checkpoint holds."
    Options = MtpOptions
    source_names = (name,)

    def __init__(self, options: MtpOptions, head: StateHead[MtpLayers]) -> None:
        self._options, self._head = options, head
        self.needs = Needs(hidden=head.reads, every_step=False)

    @classmethod
    def create(cls, options: MtpOptions, resources: Resources) -> "MtpDrafter":
        """Load the layer; raises UsageError if the checkpoint has none, StoreError if it is damaged."""
        return cls(
            options, load_mtp(loaded_target(resources.target, cls.name, "from the target's hidden states").model)
        )

    def open(self, context: DraftContext) -> RolloutDrafting:
        imitation = Imitation.of(context.settings, context.seed, context.vocabulary)
        return RolloutDrafting(StateRollout(self._head, context.max_nodes), self._options.rules(), imitation)
