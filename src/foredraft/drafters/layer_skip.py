"""The target drafts for itself with some of its sub-layers skipped (Self-SD).

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding" (ACL 2024).
Needs no second model and no further weights; `scripts/skipped_layers.py` finds the layers to skip.

Does not depend on how sub-layers are skipped (model/skipping.py), nor on how drafts grow.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from foredraft.drafters import Resources
from foredraft.errors import UsageError
from foredraft.model.growth import GrowthRules, RolloutDrafter, model_drafter
from foredraft.model.skipping import Skipped, default_skipped, layer_numbers, read_skipped, skipping
from foredraft.model.target import loaded_target
from foredraft.options import user_path


@dataclass(frozen=True, slots=True)
class LayerSkipOptions:
    """Options of `layer_skip`."""

    skipped: str | None = None  # file of the skipped sub-layers, from `scripts/skipped_layers.py`
    attention: Any = None  # instead of a file, the layers whose attention is skipped, a list of numbers from 0 on
    # the layers whose MLP is skipped. With none of the three, attention and MLP of every second layer are skipped, from
    # a quarter of the way on, never of the last layer
    mlp: Any = None
    levels: int = 12  # tokens drafted per step at most (the paper's K)
    # drafting stops after a token less probable than this; the control may stop it earlier
    least_probability: float = 0.2

    def __post_init__(self) -> None:
        self.rules()
        if self.skipped is not None and not (self.attention is None and self.mlp is None):
            raise UsageError("skipped names a file, and attention or mlp is given too; give the file or the lists.")
        layer_numbers(self.attention, "attention")
        layer_numbers(self.mlp, "mlp")

    def rules(self) -> GrowthRules:
        return GrowthRules(1, self.least_probability, 0.0, self.levels)


class LayerSkipDrafter:
    """Makes drafters that use the target as its own draft model."""

    name: ClassVar[str] = "layer_skip"
    summary: ClassVar[str] = "Chains from the target itself with some of its layers skipped (Self-SD)."
    Options = LayerSkipOptions

    @classmethod
    def create(cls, options: LayerSkipOptions, resources: Resources) -> RolloutDrafter:
        """Make the draft model.

        Raises UsageError without a target or the named layers, StoreError for a file that is damaged or of another
        model, and UnsupportedModelError if sub-layers cannot be skipped one by one.
        """
        target = loaded_target(resources.target, cls.name, "with the target's own layers")
        if options.skipped is not None:
            skipped = read_skipped(user_path(options.skipped), target.model)
        elif options.attention is None and options.mlp is None:
            skipped = default_skipped(int(target.outline.config.num_hidden_layers))
        else:
            skipped = Skipped(layer_numbers(options.attention, "attention"), layer_numbers(options.mlp, "mlp"))
        return model_drafter((cls.name,), options.rules(), skipping(target, skipped))
