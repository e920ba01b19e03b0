"""Text that must look like something: JSON, JSON of a schema, or a regular expression.

llguidance says which tokens may come next; every emitted position is masked, drafted or not, and what can only be
written in one way is drafted.
"""

from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch

from foredraft.contracts import SequenceView
from foredraft.drafters.prediction import Chain
from foredraft.errors import NumericsError, UsageError

FORCED = "grammar"
"""The name of the source of tokens that a constraint leaves no choice about."""

_SURE = 0.999  # the chance of each of them


class Grammars:
    """Makes constraints for one model.

    Args:
        tokenizer: the model's.
        vocabulary: ids that it scores.
        eos: ids that end a text.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos: tuple[int, ...]) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(eos) or None)

    def constraint(self, kind: str, pattern: Any, prompt_length: int) -> "Constraint":
        """Return the constraint of one text.

        Args:
            kind: "json_object", "json_schema" or "regex".
            pattern: a schema, or a regular expression.
            prompt_length: ids before the text.

        Raises:
            UsageError: a schema or an expression that cannot be read.
        """
        if kind == "regex":
            grammar = llguidance.LLMatcher.grammar_from_regex(pattern)
        else:
            schema = pattern if kind == "json_schema" else {"type": "object"}
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)  # it would print errors
        if matcher.is_error():
            raise UsageError(f"The response format cannot be honoured: {_first_line(matcher.get_error())}.")
        return Constraint(matcher, self._vocabulary, prompt_length)


class Constraint:
    """What one text may still become."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int, prompt_length: int) -> None:
        self._matcher, self._read = matcher, prompt_length
        self._vocabulary = vocabulary

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, float[1, V], minus infinity for what may not come next."""
        self._advance(input_ids[0, self._read :].tolist())
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=self._vocabulary).astype(np.bool_)
        return scores.masked_fill(torch.from_numpy(~allowed).to(scores.device), -torch.inf)

    def chains(self, view: SequenceView) -> list[Chain]:
        """Return what must come next, as far as there is one way only."""
        self._advance(view.ids[self._read :].tolist())
        forced = self._matcher.compute_ff_tokens()
        return [Chain(forced, [_SURE] * len(forced))] if forced else []

    def _advance(self, tokens: list[int]) -> None:
        """Take in what was written.

        Raises:
            NumericsError: the constraint cannot be followed any further.
        """
        self._matcher.consume_tokens(tokens)
        self._read += len(tokens)
        if self._matcher.is_error():
            why = _first_line(self._matcher.get_error())
            raise NumericsError(f"The response format cannot be followed any further: {why}. Ask for a simpler one.")


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0].rstrip(".") if message.strip() else "it is not understood"
