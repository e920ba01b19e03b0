"""An assistant that was published for a Gemma 4 model drafts a tree; it attends to the target's keys and values.

Such are `google/gemma-4-E2B-it-assistant` and its siblings: `model=NAME`. The tree is grown and cut as EAGLE-3's.

Does not depend on how tokens are chosen.
"""

from dataclasses import dataclass
from typing import ClassVar

from foredraft.contracts import DraftContext, Needs
from foredraft.drafters import Resources
from foredraft.errors import UsageError
from foredraft.model.assistant import Assistant, AssistantRollout, load_assistant
from foredraft.model.candidates import Imitation
from foredraft.model.growth import GrowthRules, RolloutDrafting
from foredraft.model.layers import LAST
from foredraft.model.target import loaded_target


@dataclass(frozen=True, slots=True)
class AssistantOptions:
    """Options of `assistant`."""

    model: str | None = None  # a folder or hub id (vLLM's name), which has to be given
    # children of a node at most; 1 drafts chains, and num_speculative_tokens limits their length
    out_degree: int = 4
    least_probability: float = 0.2  # a less probable token is drafted but not expanded
    levels: int = 4  # tokens drafted one after another at most

    def __post_init__(self) -> None:
        self.rules()

    def rules(self) -> GrowthRules:
        return GrowthRules(self.out_degree, self.least_probability, levels=self.levels)


class AssistantDrafter:
    """Drafts with an assistant, whose tree is grown level by level."""

    name: ClassVar[str] = "assistant"
    summary: ClassVar[str] = "An assistant published for a Gemma 4 model, which reads the target's keys and values."
    Options = AssistantOptions
    source_names = (name,)
    needs = Needs(hidden=(LAST,), keys=True, every_step=False)

    def __init__(self, options: AssistantOptions, assistant: Assistant) -> None:
        self._options, self._assistant = options, assistant

    @classmethod
    def create(cls, options: AssistantOptions, resources: Resources) -> "AssistantDrafter":
        """Load the assistant; raises UsageError if it is not one for this target."""
        target = loaded_target(resources.target, cls.name, "from the target's keys and values")
        if options.model is None:
            raise UsageError("Method 'assistant' needs the option model, the assistant's folder or hub id; give it.")
        return cls(options, load_assistant(options.model, target.model))

    def open(self, context: DraftContext) -> RolloutDrafting:
        imitation = Imitation.of(context.settings, context.seed, context.vocabulary)
        return RolloutDrafting(AssistantRollout(self._assistant, context.max_nodes), self._options.rules(), imitation)
