"""The registry of drafters: from a method's name to its class, imported only when chosen.

Third parties register a class under the entry-point group `foredraft.drafters`; the class has `name`, `summary`,
`Options` and `create(options, resources)`. Does not depend on any drafter.
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar, Protocol

from foredraft.contracts import Drafter, Target
from foredraft.errors import UsageError
from foredraft.options import check_known, options_from

ENTRY_POINT_GROUP = "foredraft.drafters"

_OWN = {
    "none": "foredraft.drafters.none:NoDrafter",
    "prompt_lookup": "foredraft.drafters.prompt_lookup:PromptLookupDrafter",
    "adaptix": "foredraft.drafters.adaptix:AdaptixDrafter",
    "rest": "foredraft.drafters.rest:RestDrafter",
    "auto": "foredraft.drafters.auto:AutoDrafter",
    "draft_model": "foredraft.drafters.draft_model:DraftModelDrafter",
    "draft_tree": "foredraft.drafters.draft_model:DraftTreeDrafter",
    "draft_graph": "foredraft.drafters.draft_model:DraftGraphDrafter",
    "layer_skip": "foredraft.drafters.layer_skip:LayerSkipDrafter",
    "lookahead": "foredraft.drafters.lookahead:LookaheadDrafter",
    "eesd": "foredraft.drafters.eesd:EesdDrafter",
    "medusa": "foredraft.drafters.medusa:MedusaDrafter",
    "eagle3": "foredraft.drafters.state_heads:Eagle3Drafter",
    "peagle": "foredraft.drafters.state_heads:PEagleDrafter",
    "dflash": "foredraft.drafters.state_heads:DFlashDrafter",
    "dspark": "foredraft.drafters.state_heads:DSparkDrafter",
    "dflash2": "foredraft.drafters.state_heads:DFlash2Drafter",
    "mtp": "foredraft.drafters.state_heads:MtpDrafter",
    "assistant": "foredraft.drafters.state_heads:AssistantDrafter",
}


@dataclass(frozen=True, slots=True)
class Resources:
    """What a drafter is built from."""

    vocabulary: int  # number of ids the target scores
    tokenizer_hash: str = ""  # stored tables must match it
    default_table: Callable[[], Path] | None = None  # builds or finds the default tri-gram table, if there is one
    default_store: Callable[[], Path] | None = None  # the same for the default datastore
    draft_model: Callable[[Any], Target] | None = None  # loads a draft model by name, and checks that it fits
    target: Target | None = None  # for drafters that use its layers


class DrafterClass(Protocol):
    """The interface of a registered class."""

    name: ClassVar[str]
    summary: ClassVar[str]
    Options: ClassVar[type]

    def create(self, options: Any, resources: Resources) -> Drafter:
        """Build the drafter; a class method."""


def method_names() -> list[str]:
    """Return the names of all methods: built-in ones first, then registered ones."""
    return [*_OWN, *sorted(set(_registered()) - set(_OWN))]


def own_place(method: str) -> str | None:
    """Return `module:class` of a built-in method, so that its source can be read without importing it; else None."""
    return _OWN.get(method)


def drafter_class(method: str) -> DrafterClass:
    """Import the class of a method; raises UsageError if it is unknown or cannot be imported."""
    if method in _OWN:
        return pkgutil.resolve_name(_OWN[method])  # type: ignore[no-any-return]  # the map is ours
    registered = _registered()
    check_known(method, method_names(), "There is no method", "Methods are")
    try:
        return registered[method].load()  # type: ignore[no-any-return]  # checked by use
    except (ImportError, AttributeError) as error:
        raise UsageError(f"The registered method {method!r} cannot be imported: {error}.") from error


def parse_options(method: str, options: Mapping[str, Any]) -> Any:
    """Return the method's options; raises UsageError for an unknown method or option, or a value out of range."""
    return options_from(drafter_class(method).Options, options, f"Method {method!r}")


def make_drafter(method: str, options: Mapping[str, Any], resources: Resources) -> Drafter:
    """Build the drafter of `method`; raises UsageError for wrong options, and StoreError for a damaged file."""
    return drafter_class(method).create(parse_options(method, options), resources)


def _registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
