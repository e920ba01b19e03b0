"""Tools for testing drafters: a toy target, and conformance checks.

To test a drafter, call `check_drafter(make)`, where `make` returns a new one for `VOCABULARY` ids. Does not depend on
any particular drafter, on text, or on a model with weights.
"""

from foredraft.testing.checks import CHECKS, MakeDrafter, check_drafter, sequences_do_not_influence_each_other
from foredraft.testing.toy import VOCABULARY, ToyCache, ToyTarget

__all__ = [
    "CHECKS", "MakeDrafter", "ToyCache", "ToyTarget", "VOCABULARY", "check_drafter",
    "sequences_do_not_influence_each_other",
]  # fmt: skip
