"""Tools for testing drafters and engines: a toy target, scripted drafters, and conformance checks.

To test a drafter, call `check_drafter(make)`, where `make` returns a new one for `VOCABULARY` ids. Does not depend on
any particular drafter, on text, or on a model with weights.
"""

from foredraft.testing.checks import CHECKS, MakeDrafter, check_drafter, sequences_do_not_influence_each_other
from foredraft.testing.scripted import (
    AdversaryDrafter,
    Continuation,
    DrawingDrafter,
    LogitsOf,
    OracleDrafter,
    RandomTreeDrafter,
    ScriptedDrafting,
    continuation_in,
    logits_of,
)
from foredraft.testing.toy import VOCABULARY, ToyCache, ToyTarget

__all__ = [
    "AdversaryDrafter", "CHECKS", "Continuation", "DrawingDrafter", "LogitsOf", "MakeDrafter", "OracleDrafter",
    "RandomTreeDrafter", "ScriptedDrafting", "ToyCache", "ToyTarget", "VOCABULARY", "check_drafter", "continuation_in",
    "logits_of", "sequences_do_not_influence_each_other",
]  # fmt: skip
