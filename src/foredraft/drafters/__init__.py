"""The door to the drafters: a method's name to its class, imported only when chosen.

Does not import any drafter by itself. Third parties register a class under the entry-point group
`foredraft.drafters`; the class has `name`, `summary`, `Options` and `create(options, resources)`.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar, Protocol

from foredraft.contracts import Drafter, Target
from foredraft.errors import UsageError
from foredraft.options import nearest, options_from

ENTRY_POINT_GROUP = "foredraft.drafters"

_OWN: Mapping[str, str] = {
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
}


@dataclass(frozen=True, slots=True)
class Resources:
    """What a drafter may build on.

    Attributes:
        vocabulary: how many ids the target scores.
        tokenizer_hash: what stored tables must have been made with.
        default_table: makes or finds the tri-gram table to use when none is given; None where there is no such table.
        default_store: likewise, the datastore.
        draft_model: loads a draft model by name and checks that it fits the target; None where nothing can be loaded.
        target: the target itself, for drafters that draft with its own layers.
    """

    vocabulary: int
    tokenizer_hash: str = ""
    default_table: Callable[[], Path] | None = None
    default_store: Callable[[], Path] | None = None
    draft_model: Callable[[Any], Target] | None = None
    target: Target | None = None

    def heads_for(self, method: str, named: str | Path | None) -> str | Path:
        """Return where a method's trained heads are; raises UsageError where they are named nowhere."""
        if named is None:
            raise UsageError(
                f"Method {method!r} needs heads trained for this model; train them with `foredraft train {method}`, "
                "and name their folder: head=FOLDER."
            )
        return named


class DrafterClass(Protocol):
    """What a registered class provides."""

    name: ClassVar[str]
    summary: ClassVar[str]
    Options: ClassVar[type]

    def create(self, options: Any, resources: Resources) -> Drafter:
        """Build the drafter; a class method."""
        ...


def method_names() -> list[str]:
    """Return every method's name: foredraft's own first, then registered ones."""
    return [*_OWN, *sorted(set(_registered()) - set(_OWN))]


def own_place(method: str) -> str | None:
    """Return `module:class` of a method of foredraft's own, to be read without importing it; None for another."""
    return _OWN.get(method)


def drafter_class(method: str) -> DrafterClass:
    """Import the class of a method; raises UsageError for an unknown name, or one that cannot be imported."""
    if method in _OWN:
        module, _, name = _OWN[method].partition(":")
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]  # the map is ours
    registered = _registered()
    if method not in registered:
        known = method_names()
        raise UsageError(f"There is no method {method!r}.{nearest(method, known)} Methods are: {', '.join(known)}.")
    try:
        return registered[method].load()  # type: ignore[no-any-return]  # checked by use
    except ImportError as error:
        raise UsageError(f"The registered method {method!r} cannot be imported: {error}.") from error


def parse_options(method: str, options: Mapping[str, Any]) -> Any:
    """Return the method's options; raises UsageError for an unknown method or option, or a value out of range."""
    return options_from(drafter_class(method).Options, options, f"Method {method!r}")


def make_drafter(method: str, options: Mapping[str, Any], resources: Resources) -> Drafter:
    """Build the drafter of `method` from loose options; raises UsageError, and StoreError for a damaged file."""
    return drafter_class(method).create(parse_options(method, options), resources)


def _registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
