"""Trained heads on the target's states: EAGLE-3, P-EAGLE, DFlash, DSpark, MTP layers, and Gemma 4's assistants.

`model=FOLDER` names a head in the `speculators` format or as its authors publish it; `mtp` finds its own. Trees are
grown and cut by the expected acceptance of paths, as in EAGLE-2 (Li et al., EMNLP 2024).

`eagle3`: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(NeurIPS 2025). `mtp`: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2. `dflash`: z-lab (2026).

Does not depend on how tokens are chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from foredraft.contracts import Needs
from foredraft.drafters import Resources
from foredraft.errors import UsageError
from foredraft.model.assistant import AssistantRollout, load_assistant
from foredraft.model.dflash import DFlashBlock, load_dflash
from foredraft.model.eagle3 import PEagleBlock, load_eagle3
from foredraft.model.gguf.files import is_gguf
from foredraft.model.growth import GrowthRules, RolloutDrafter
from foredraft.model.head_files import trained_head
from foredraft.model.layers import LAST
from foredraft.model.mtp import load_mtp, load_trained_mtp
from foredraft.model.speculators import FILES
from foredraft.model.state_heads import HeadModel, StateHead
from foredraft.model.state_rollout import Block, BlockRollout, StateRollout
from foredraft.model.target import TorchTarget, loaded_target


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """Options of `mtp` and `assistant`."""

    # children of a node at most; 1 drafts chains, and num_speculative_tokens limits their length
    out_degree: int = 4
    least_probability: float = 0.2  # a less probable token is drafted but not expanded
    least_share: float = 0.3  # a node below this share of its most probable sibling is not expanded
    levels: int = 4  # tokens drafted one after another at most
    # a folder or hub id (vLLM's name); eagle3 takes the one that a checkout holds for the target, if none is named, and
    # mtp the layer in the target's checkpoint
    model: str | None = None

    def __post_init__(self) -> None:
        self.rules()

    def rules(self) -> GrowthRules:
        """Return the limits of a draft; raises UsageError for a value out of range."""
        return GrowthRules(self.out_degree, self.least_probability, self.least_share, self.levels)


@dataclass(frozen=True, slots=True)
class Eagle3Options(HeadOptions):
    """Options of `eagle3`."""

    # children of a node at most; 1 drafts chains, and num_speculative_tokens limits their length
    out_degree: int = 6
    least_share: float = 0.2  # a node below this share of its most probable sibling is not expanded
    levels: int = 6  # tokens drafted one after another at most


@dataclass(frozen=True, slots=True)
class BlockOptions(HeadOptions):
    """Options of heads that score all levels in one pass, so that expanding a node costs little."""

    least_probability: float = 0.05  # a less probable token is drafted but not expanded
    least_share: float = 0.05  # a node below this share of its most probable sibling is not expanded
    levels: int = 16  # tokens drafted one after another at most, if the head's block has as many


class MtpDrafter:
    """Makes drafters of the layer in the target's own checkpoint, or of one trained apart."""

    name: ClassVar[str] = "mtp"
    summary: ClassVar[str] = "The multi-token-prediction layer of the target's own checkpoint, or of a file apart."
    Options: ClassVar[type] = HeadOptions

    @classmethod
    def create(cls, options: HeadOptions, resources: Resources) -> RolloutDrafter:
        """Load the layer; raises UsageError if there is none for this target, StoreError if it is damaged."""
        target = _target(cls.name, resources)
        place = options.model and _placed(cls.name, options, resources)[0]
        if place and not is_gguf(place):
            head: StateHead[Any] = load_trained_mtp(place, target.model)
        else:
            head = load_mtp(target.model, place or None)
        return _state_drafter(cls.name, options.rules(), head, target)


class AssistantDrafter:
    """Makes drafters of a Gemma 4's assistant."""

    name: ClassVar[str] = "assistant"
    summary: ClassVar[str] = "An assistant published for a Gemma 4 model, which reads the target's keys and values."
    Options: ClassVar[type] = HeadOptions

    @classmethod
    def create(cls, options: HeadOptions, resources: Resources) -> RolloutDrafter:
        """Load the assistant; raises UsageError if it is not one for this target."""
        target = _target(cls.name, resources).model
        if options.model is None:
            raise UsageError("Method 'assistant' needs the option model, the assistant's folder or hub id; give it.")
        assistant = load_assistant(options.model, target)
        needs = Needs(hidden=(LAST,), keys=True, every_step=False)
        return RolloutDrafter((cls.name,), options.rules(), needs, lambda most: AssistantRollout(assistant, most))


class Eagle3Drafter:
    """Makes drafters of EAGLE-3's heads."""

    name: ClassVar[str] = "eagle3"
    summary: ClassVar[str] = "A trained head on the states of three of the target's layers (EAGLE-3)."
    Options: ClassVar[type] = Eagle3Options

    @classmethod
    def create(cls, options: Eagle3Options, resources: Resources) -> RolloutDrafter:
        """Load the head; raises UsageError if there is none for this target, StoreError if it is damaged."""
        folder, target = _placed(cls.name, options, resources)
        return _state_drafter(cls.name, options.rules(), load_eagle3(folder, target.model), target)


class PEagleDrafter:
    """Makes drafters of P-EAGLE's heads."""

    name: ClassVar[str] = "peagle"
    summary: ClassVar[str] = "A trained head like EAGLE-3's that scores all drafted levels in one pass (P-EAGLE)."
    Options: ClassVar[type] = BlockOptions

    @classmethod
    def create(cls, options: BlockOptions, resources: Resources) -> RolloutDrafter:
        """Load the head; raises as `Eagle3Drafter.create` does."""
        folder, target = _placed(cls.name, options, resources)
        head = load_eagle3(folder, target.model, cls.name)
        model = _run_by(target, head)
        return _block_drafter(cls.name, options, head, lambda: PEagleBlock(head, model), model)


class DFlashDrafter:
    """Makes drafters of DFlash's heads."""

    name: ClassVar[str] = "dflash"
    summary: ClassVar[str] = "A trained head on the target's layers drafts a block of tokens in one pass (DFlash)."
    Options: ClassVar[type] = BlockOptions

    @classmethod
    def create(cls, options: BlockOptions, resources: Resources) -> RolloutDrafter:
        """Load the head; raises as `Eagle3Drafter.create` does."""
        folder, target = _placed(cls.name, options, resources)
        head = load_dflash(folder, target.model, cls.name)
        return _block_drafter(cls.name, options, head, lambda: DFlashBlock(head))


class DSparkDrafter(DFlashDrafter):
    """Makes drafters of DSpark's heads."""

    name: ClassVar[str] = "dspark"
    summary: ClassVar[str] = "A head like DFlash's, whose scores also depend on the token before (DSpark)."
    Options: ClassVar[type] = BlockOptions  # again, as `foredraft methods` reads the class's own lines


class DFlash2Drafter(DFlashDrafter):
    """Makes drafters of DFlash 2's heads."""

    name: ClassVar[str] = "dflash2"
    summary: ClassVar[str] = "A head like DFlash's that scores the best tokens again by the token before (DFlash 2)."
    Options: ClassVar[type] = BlockOptions


def _target(method: str, resources: Resources) -> TorchTarget:
    return loaded_target(resources.target, method, "from the target's hidden states")


def _placed(method: str, options: HeadOptions, resources: Resources) -> tuple[Path, TorchTarget]:
    """Return the folder of a method's head, and the target."""
    target = _target(method, resources)
    return trained_head(method, options.model, target.model, option="model", files=FILES), target


def _run_by(target: TorchTarget, head: StateHead[Any]) -> TorchTarget:
    """Return what runs a head's layers; only an LM head that is the target's own is sought in the target's file."""
    is_own = head.ends.lm_head is target.model.get_output_embeddings()
    return target.with_model(HeadModel(head, target.model.name_or_path if is_own else ""), rounded=True)


def _state_drafter(method: str, rules: GrowthRules, head: StateHead[Any], target: TorchTarget) -> RolloutDrafter:
    model = _run_by(target, head)
    needs = Needs(hidden=head.reads, every_step=False, models=(model,))
    return RolloutDrafter((method,), rules, needs, lambda most: StateRollout(head, model, most), head.ends.ids)


def _block_drafter(
    method: str, options: BlockOptions, head: StateHead[Any], make: Callable[[], Block], *models: TorchTarget
) -> RolloutDrafter:
    rules, needs = options.rules(), Needs(hidden=head.reads, every_step=False, models=models)
    rules = replace(rules, levels=min(rules.levels, make().levels))
    return RolloutDrafter((method,), rules, needs, lambda most: BlockRollout(head, make(), most), head.ends.ids)
