"""Logits processors of one request: bias, penalties, log-probabilities, and format constraints.

Each is called once per emitted position, drafted or not, in order, with the ids before it. Does not depend on HTTP.
"""

import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import llguidance
import numpy as np
import torch

from foredraft.contracts import SequenceView
from foredraft.drafters.prediction import Chain
from foredraft.errors import UsageError
from foredraft.server.replies import RequestError

_NOTHING = "NoExtension"  # a word of the error of a grammar that no text matches
GRAMMAR = "grammar"  # source name of the tokens that a constraint forces
_FORCED_SCORE = 0.999  # acceptance estimate of each forced token (chosen)
_LEAST_LOGPROB = -9999.0  # of a token that is not allowed, as in OpenAI's API: JSON has no infinity
_LIMITS = llguidance.LLParserLimits(initial_lexer_fuel=400_000, max_grammar_size=20_000, max_items_in_row=20_000)
"""Of a format: most take at most a second to prepare, and an object of 2,000 optional properties is within them. As the
size is limited more tightly than the row, an object that is accepted can be written (measured with llguidance 1.9)."""

_FORMAT_SECONDS = 1.5  # of a processor, for preparing a format; else its masks would delay all texts of a step (chosen)


class Penalties:
    """Adds a bias to the logits of given tokens, and lowers those of generated ones.

    The latter by `presence` once, and by `frequency` per occurrence. An id outside the vocabulary is a UsageError.
    """

    def __init__(
        self, prompt_length: int, presence: float, frequency: float, biases: Mapping[int, float], vocabulary: int
    ) -> None:
        for token in biases:
            if not 0 <= token < vocabulary:
                raise UsageError(f"logit_bias holds token {token}; the model has ids 0 to {vocabulary - 1}.")
        self._prompt_length, self._presence, self._frequency = prompt_length, presence, frequency
        self._tokens = torch.tensor(list(biases), dtype=torch.int64)
        self._biases = torch.tensor(list(biases.values()), dtype=torch.float32)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits, float[1, V], changed in place."""
        scores[0, self._tokens.to(scores.device)] += self._biases.to(scores)
        tokens, counts = input_ids[0, self._prompt_length :].unique(return_counts=True)
        scores[0, tokens] -= self._presence + self._frequency * counts.to(scores.dtype)
        return scores


class TokenLogprob(NamedTuple):
    """A token's bytes, which may be a part of a character, and its log-probability."""

    bytes: bytes
    logprob: float

    @property
    def text(self) -> str:
        r"""The token's text; the bytes of a part of a character as in OpenAI's API, such as `bytes:\xe6`."""
        try:
            return self.bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{each:02x}" for each in self.bytes)


class Position(NamedTuple):
    """The log-probability of a position's token, and of its most probable tokens, descending."""

    token: TokenLogprob
    top: list[TokenLogprob]


class Logprobs:
    """Reports the `top` log-probabilities of every position, under the softmax of the logits passed to it.

    `take` is called on another thread, as soon as a position's token is known.
    """

    def __init__(self, top: int, tokenizer: llguidance.LLTokenizer) -> None:
        self._top, self._tokenizer = top, tokenizer
        self._rows: deque[torch.Tensor] = deque()  # float32[V], of the positions not taken yet

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002  # a processor's signature
        """Keep the logits, float[1, V], and return them unchanged."""
        self._rows.append(scores[0].float().log_softmax(dim=-1))
        return scores

    def take(self, token: int) -> Position:
        """Return the log-probabilities of the next position, whose token is `token`."""
        row = self._rows.popleft().clamp(min=_LEAST_LOGPROB)
        values, tokens = row.topk(self._top)
        found = [(token, float(row[token])), *zip(tokens.tolist(), values.tolist(), strict=True)]
        first, *top = [TokenLogprob(self._tokenizer.decode_bytes([each]), logprob) for each, logprob in found]
        return Position(first, top)


def matcher_of(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """Return what matches a grammar, of which each text needs a copy. It may take a second, without Python's lock.

    One that cannot be parsed, is too large, takes too long, or is matched by no text is a UsageError.
    """
    began = time.thread_time()  # neither waiting for a processor nor the work of other threads counts
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)  # 0: does not print errors
    if why := _problem(matcher):
        raise UsageError(f"The response format is not supported: {why}.")
    matcher.compute_bitmask()  # reads regular expressions, and finds out whether there is a first token
    if why := _problem(matcher):
        known = "No text matches the response format" if _NOTHING in why else f"The response format is too large: {why}"
        raise UsageError(f"{known}; use another one.")
    if time.thread_time() - began > _FORMAT_SECONDS:
        raise UsageError(
            f"The response format takes more than {_FORMAT_SECONDS} seconds to prepare; use a simpler one."
        )
    return matcher


def _problem(matcher: llguidance.LLMatcher) -> str | None:
    """Return why a matcher has failed, in one line, or None."""
    if not matcher.is_error():
        return None
    first, *others = matcher.get_error().strip().splitlines() or ["unknown error"]
    reasons = (line.removeprefix("error: ") for line in others if line.startswith("error: "))  # of a regular expression
    return f"{first.rstrip(':.')}{''.join(f' ({each})' for each in reasons)}"


class Constraint:
    """Constrains one text to what an unused matcher matches: masks tokens that are not allowed, drafts forced ones.

    `prompt_length` is the number of prompt ids.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int, prompt_length: int) -> None:
        self._matcher, self._vocabulary, self._read = matcher, vocabulary, prompt_length

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
        self._matcher.consume_tokens(tokens)
        self._read += len(tokens)
        if why := _problem(self._matcher):
            problem = f"The response format cannot be followed any further: {why}. Use a simpler one."
            raise RequestError(400, problem)
