"""What changes or reads scores for one request: penalties and biases of OpenAI's, and log-probabilities.

Each is called once for every emitted position, in order, with the ids before it: drafted positions too.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch


class Bias:
    """Adds to the scores of given tokens.

    Args:
        biases: by token id.
    """

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._tokens = torch.tensor(list(biases), dtype=torch.int64)
        self._biases = torch.tensor(list(biases.values()), dtype=torch.float32)

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, float[1, V], with the biases added."""
        scores[0, self._tokens.to(scores.device)] += self._biases.to(scores)
        return scores


class Penalties:
    """Lowers the scores of tokens that were written: once, and for every time.

    Args:
        prompt_length: ids that do not count.
        presence: taken off once.
        frequency: taken off for every time.
    """

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self._prompt_length, self._presence, self._frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, float[1, V], lowered."""
        tokens, counts = input_ids[0, self._prompt_length :].unique(return_counts=True)
        scores[0, tokens] -= self._presence + self._frequency * counts.to(scores.dtype)
        return scores


class TokenLogprobs(NamedTuple):
    """Log-probabilities at a position.

    Attributes:
        of_chosen: the emitted token's.
        top: the most probable tokens, each with its own, falling.
    """

    of_chosen: float
    top: list[tuple[int, float]]


class Logprobs:
    """Keeps the log-probabilities of every position, under the softmax of the scores as they come to it.

    Called on one thread and asked on another. Whole rows are kept for the last position only, so that a client that
    reads slowly costs little memory.

    Args:
        top: how many of the most probable tokens are kept.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._positions: deque[_Position] = deque()  # whose tokens have not been asked for
        self._last: _Position | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, float[1, V], as they are."""
        if self._last is not None:
            self._last.settle(int(input_ids[0, -1]))
        self._last = _Position(scores[0].float().log_softmax(dim=-1), self._top)
        self._positions.append(self._last)
        return scores

    def take(self, token: int) -> TokenLogprobs:
        """Return those of the next position, whose token is `token`."""
        return self._positions.popleft().settle(token)


class _Position:
    """The log-probabilities of one position: all of them, until its token is known."""

    def __init__(self, row: torch.Tensor, top: int) -> None:
        self._kept: torch.Tensor | TokenLogprobs = row
        self._top = top

    def settle(self, token: int) -> TokenLogprobs:
        """Return what is told of the position, and keep no more."""
        kept = self._kept  # read once: two threads may come here together, and find the same
        if isinstance(kept, torch.Tensor):
            values, tokens = kept.topk(self._top)
            kept = TokenLogprobs(float(kept[token]), list(zip(tokens.tolist(), values.tolist(), strict=True)))
            self._kept = kept
        return kept
