"""A smaller model drafts: a chain (SSD), a pruned tree (TSD), or a graph whose repeated phrases are drafted once (GSD).

Gong et al., "Graph-Structured Speculative Decoding" (ACL 2024), with its baselines: speculative decoding with a single
sequence (Leviathan et al. 2023; Chen et al. 2023) and with a token tree. Needs a draft model with the target's
tokenizer: `model=NAME`, or `--draft-model NAME`; `foredraft train draft` makes one of a target's own layers.

The three methods differ only in their options, which are the shape of the draft. Does not depend on the target.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from foredraft.drafters import Resources
from foredraft.errors import UsageError
from foredraft.model.growth import GrowthRules, RolloutDrafter, model_drafter
from foredraft.model.head_files import shipped_head
from foredraft.model.target import TorchTarget
from foredraft.options import check_range, shown


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """Options of `draft_model`."""

    # the draft model (vLLM's name): a hub id, a folder, a GGUF file, a folder that `foredraft train draft` wrote, or a
    # pair (transformers model, tokenizer); None takes the one that a checkout holds for the target
    model: Any = None
    levels: int = 10  # passes of the draft model at most: the depth of a draft, except where `draft_graph` merges nodes
    least_probability: float = 0.2  # a less probable token is drafted, but nothing after it (theta_prob)

    def __post_init__(self) -> None:
        self.rules()

    def rules(self) -> GrowthRules:
        """Return the limits of a draft; raises UsageError for a value out of range."""
        return GrowthRules(1, self.least_probability, 0.0, self.levels)


@dataclass(frozen=True, slots=True)
class TreeOptions(ChainOptions):
    """Options of `draft_tree`; the defaults are GSD's, appendix B."""

    out_degree: int = 4  # children of a node at most (k)
    least_share: float = 0.3  # a node below this share of its most probable sibling is not expanded (theta_sib)

    def rules(self) -> GrowthRules:
        return GrowthRules(self.out_degree, self.least_probability, self.least_share, self.levels)


@dataclass(frozen=True, slots=True)
class GraphOptions(TreeOptions):
    """Options of `draft_graph`; the defaults are GSD's, appendix B."""

    tau: int = 2  # a node whose last tau tokens occurred before is not expanded but borrows the continuations there

    def rules(self) -> GrowthRules:
        check_range(self, "tau", least=1, most=8)  # 0 would merge nothing
        return replace(TreeOptions.rules(self), tau=self.tau)


class DraftModelDrafter:
    """Makes drafters of chains from a draft model."""

    name: ClassVar[str] = "draft_model"
    summary: ClassVar[str] = "Chains from a smaller model (SSD)."
    Options: ClassVar[type] = ChainOptions

    @classmethod
    def create(cls, options: ChainOptions, resources: Resources) -> RolloutDrafter:
        """Load the draft model; raises UsageError if none is named or shipped, or it does not fit the target."""
        wanted, target = options.model, resources.target
        if wanted is None and isinstance(target, TorchTarget):
            wanted = shipped_head("draft", target.model)
        if wanted is None:
            raise UsageError(f"Method {cls.name!r} needs a draft model; give one: model=NAME, or --draft-model NAME.")
        if resources.draft_model is None:
            raise UsageError(f"No target is loaded that {shown(wanted)} could draft for; leave it out.")
        model = resources.draft_model(wanted)
        ids = model.ids if isinstance(model, TorchTarget) else None
        rules = options.rules()
        sources = (cls.name, f"{cls.name}, merged") if rules.tau else (cls.name,)
        return model_drafter(sources, rules, model, ids)


class DraftTreeDrafter(DraftModelDrafter):
    """Makes drafters of trees."""

    name: ClassVar[str] = "draft_tree"
    summary: ClassVar[str] = "Pruned trees from a smaller model (TSD)."
    Options: ClassVar[type] = TreeOptions


class DraftGraphDrafter(DraftModelDrafter):
    """Makes drafters of graphs."""

    name: ClassVar[str] = "draft_graph"
    summary: ClassVar[str] = "Trees from a smaller model, with repeated phrases drafted once (GSD)."
    Options: ClassVar[type] = GraphOptions
