"""Logits processors of one request: bias, penalties, log-probabilities, and format constraints.

Each is called once per emitted position, drafted or not, in order, with the ids before it. Does not depend on HTTP.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import llguidance
import llguidance.hf
import numpy as np
import torch

from foredraft.contracts import SequenceView
from foredraft.drafters.prediction import Chain
from foredraft.errors import NumericsError, UsageError

GRAMMAR = "grammar"
"""Source name of the tokens that a constraint forces."""
_FORCED_SCORE = 0.999  # acceptance estimate of each forced token (chosen)


class Bias:
    """Adds a bias to the logits of given tokens; an id outside the vocabulary is a UsageError."""

    def __init__(self, biases: Mapping[int, float], vocabulary: int) -> None:
        for token in biases:
            if not 0 <= token < vocabulary:
                raise UsageError(f"logit_bias holds token {token}; the model has ids 0 to {vocabulary - 1}.")
        self._tokens = torch.tensor(list(biases), dtype=torch.int64)
        self._biases = torch.tensor(list(biases.values()), dtype=torch.float32)

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits, float[1, V], with the biases added in place."""
        scores[0, self._tokens.to(scores.device)] += self._biases.to(scores)
        return scores


class Penalties:
    """Lowers the logits of generated tokens: by `presence` once, and by `frequency` per occurrence."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self._prompt_length, self._presence, self._frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits, float[1, V], lowered in place."""
        tokens, counts = input_ids[0, self._prompt_length :].unique(return_counts=True)
        scores[0, tokens] -= self._presence + self._frequency * counts.to(scores.dtype)
        return scores


class TokenLogprobs(NamedTuple):
    """A token, its log-probability, and the most probable tokens of its position with theirs, descending."""

    token: int
    of_chosen: float
    top: list[tuple[int, float]]


class Logprobs:
    """Records the `top` log-probabilities of every position, under the softmax of the logits passed to it.

    `__call__` and `take` run on different threads. Only the last position keeps its full row, so that a slow client
    costs little memory.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._positions: deque[_Position] = deque()  # not taken yet
        self._last: _Position | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Record the logits, float[1, V], and return them unchanged."""
        if self._last is not None:
            self._last.settle(int(input_ids[0, -1]))
        self._last = _Position(scores[0].float().log_softmax(dim=-1), self._top)
        self._positions.append(self._last)
        return scores

    def take(self, token: int) -> TokenLogprobs:
        """Return the log-probabilities of the next position, whose token is `token`."""
        return self._positions.popleft().settle(token)


class _Position:
    """The log-probabilities of one position: the full row until its token is known, then the reported ones."""

    def __init__(self, row: torch.Tensor, top: int) -> None:
        self._kept: torch.Tensor | TokenLogprobs = row
        self._top = top

    def settle(self, token: int) -> TokenLogprobs:
        """Return the reported log-probabilities, and drop the full row."""
        kept = self._kept  # read once: two threads may compute the same result at once
        if isinstance(kept, torch.Tensor):
            values, tokens = kept.topk(self._top)
            kept = TokenLogprobs(token, float(kept[token]), list(zip(tokens.tolist(), values.tolist(), strict=True)))
            self._kept = kept
        return kept


def grammar_tokenizer(tokenizer: Any, vocabulary: int, eos: tuple[int, ...]) -> llguidance.LLTokenizer:
    """Return the tokenizer for `Constraint`, for a model of `vocabulary` ids; this takes half a second."""
    return llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(eos) or None)


class Constraint:
    """Constrains one text to a format by llguidance: masks tokens that are not allowed, and drafts forced ones.

    Args:
        tokenizer: from `grammar_tokenizer`.
        kind: "json_object", "json_schema" or "regex".
        pattern: the schema or regular expression.
        prompt_length: number of prompt ids.

    Raises:
        UsageError: a schema or regular expression that cannot be parsed.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer, kind: str, pattern: Any, prompt_length: int) -> None:
        if kind == "regex":
            grammar = llguidance.LLMatcher.grammar_from_regex(pattern)
        else:
            schema = pattern if kind == "json_schema" else {"type": "object"}
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
        self._matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)  # 0: does not print errors
        if self._matcher.is_error():
            raise UsageError(f"The response format is not supported: {_first_line(self._matcher.get_error())}.")
        self._vocabulary, self._read = tokenizer.vocab_size, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits, float[1, V], with minus infinity for tokens that are not allowed."""
        self._advance(input_ids[0, self._read :].tolist())
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=self._vocabulary).astype(np.bool_)
        return scores.masked_fill(torch.from_numpy(~allowed).to(scores.device), -torch.inf)

    def chains(self, view: SequenceView) -> list[Chain]:
        """Return the forced tokens, as one chain, or none."""
        self._advance(view.ids[self._read :].tolist())
        forced = self._matcher.compute_ff_tokens()
        return [Chain(forced, [_FORCED_SCORE] * len(forced))] if forced else []

    def _advance(self, tokens: list[int]) -> None:
        """Advance the matcher by the new tokens."""
        self._matcher.consume_tokens(tokens)
        self._read += len(tokens)
        if self._matcher.is_error():
            why = _first_line(self._matcher.get_error())
            raise NumericsError(f"The response format cannot be followed any further: {why}. Use a simpler one.")


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0].rstrip(".") if message.strip() else "unknown error"
