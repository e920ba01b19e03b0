"""Prompt lookup: the continuation of an earlier occurrence of the last tokens in the sequence.

Saxena, "Prompt Lookup Decoding" (2023), by transformers' rule (PromptLookupCandidateGenerator): the first occurrence of
the longest n-gram that occurred earlier. Needs nothing.

Does not depend on anything but the sequence.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, Verdict
from foredraft.drafters import Resources
from foredraft.errors import UsageError
from foredraft.graph.tree import I64, chain_parents
from foredraft.options import check_range


@dataclass(frozen=True, slots=True)
class PromptLookupOptions:
    """Options of prompt lookup."""

    prompt_lookup_num_tokens: int = 10  # tokens drafted at most (transformers' name)
    prompt_lookup_max: int = 2  # longest n-gram to search (vLLM's name, transformers' default)
    prompt_lookup_min: int = 1  # shortest n-gram to search (vLLM's name)

    def __post_init__(self) -> None:
        check_range(self, "prompt_lookup_num_tokens", least=1)
        check_range(self, "prompt_lookup_max", least=1, most=64)
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise UsageError(
                f"prompt_lookup_min is {self.prompt_lookup_min} and prompt_lookup_max is {self.prompt_lookup_max}; "
                "they must satisfy 1 <= min <= max."
            )


@njit(cache=True)
def earlier_match(ids: I64, shortest: int, longest: int) -> int:
    """Return the index after the first earlier occurrence of the longest suffix of `ids` that has one, or -1.

    Suffixes have `shortest` to `longest` tokens.
    """
    n, found, most = len(ids), -1, shortest - 1
    for end in range(1, n):
        matching = 0
        while matching < min(longest, end) and ids[end - 1 - matching] == ids[n - 1 - matching]:
            matching += 1
        if matching > most:
            found, most = end, matching
            if most == longest:
                break
    return found


class PromptLookupDrafter:
    """Drafts chains from the sequence itself. It has no state, so it is every sequence's drafting itself."""

    name: ClassVar[str] = "prompt_lookup"
    summary: ClassVar[str] = "Chains copied from an earlier occurrence of the last tokens; no table, no model."
    Options = PromptLookupOptions
    needs = Needs(every_step=False)
    source_names = ("prompt_lookup",)

    def __init__(self, options: PromptLookupOptions) -> None:
        self.options = options

    @classmethod
    def create(cls, options: PromptLookupOptions, resources: Resources) -> "PromptLookupDrafter":  # noqa: ARG003  # the family's signature
        return cls(options)

    def open(self, context: DraftContext) -> "PromptLookupDrafter":  # noqa: ARG002  # the family's signature
        return self

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        length = min(budget.nodes, budget.depth, self.options.prompt_lookup_num_tokens)
        options = self.options
        start = earlier_match(view.ids, options.prompt_lookup_min, options.prompt_lookup_max) if length > 0 else -1
        if start < 0:
            return EMPTY_DRAFT
        tokens = view.ids[start : start + length].astype(np.int32)
        return Draft(tokens, chain_parents(len(tokens)))

    def observe(self, verdict: Verdict) -> None:
        """Learn nothing."""

    def close(self) -> None:
        """Nothing to drop."""
