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

    Args:
        top: how many of the most probable tokens are kept.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._rows: deque[torch.Tensor] = deque()  # of positions whose token has not been told

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, float[1, V], as they are."""
        self._rows.append(scores[0].float().log_softmax(dim=-1))
        return scores

    def take(self, token: int) -> TokenLogprobs:
        """Return those of the next position, whose token is `token`."""
        row = self._rows.popleft()
        values, tokens = row.topk(self._top)
        return TokenLogprobs(float(row[token]), list(zip(tokens.tolist(), values.tolist(), strict=True)))
