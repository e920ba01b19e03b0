"""Options of how tokens are chosen, with transformers' names and meaning.

Does not depend on how the options are applied.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from foredraft.errors import UsageError
from foredraft.options import check_range

LogitsProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""transformers' protocol: (input_ids int64[1, n], scores float32[1, V]) -> scores float32[1, V]."""

SEED_LIMIT = 2**64
LEAST_TEMPERATURE = 1e-6  # lower ones overflow float32 when they divide the logits


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen; names and meaning are transformers'."""

    do_sample: bool = False  # draw from the softmax; otherwise take the most probable token
    temperature: float = 1.0  # divides the logits; above 0
    top_k: int = 0  # keep the `top_k` most probable tokens (and ties with the last); 0 keeps all
    top_p: float = 1.0  # keep the smallest set of most probable tokens with at least this mass; 1 keeps all
    min_p: float = 0.0  # drop tokens less probable than this share of the most probable one; 0 keeps all
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits of tokens in the text; 1 is off
    seed: int = 0  # to 2**64 - 1

    @property
    def filters(self) -> tuple[float, int, float, float]:
        """Temperature (0 for greedy decoding), top-k, top-p and min-p, as `filter_row` takes them."""
        return self.temperature if self.do_sample else 0.0, self.top_k, self.top_p, self.min_p

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= LEAST_TEMPERATURE):
            greedy = "do_sample=False" if self.temperature == 0 else "0"
            raise UsageError(
                f"temperature is {self.temperature}; it must be a finite number, at least {LEAST_TEMPERATURE:g}. For "
                f"greedy decoding use {greedy}."
            )
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}; use a positive number of tokens, or 0 to keep all.")
        check_range(self, "top_p", above=0, most=1)
        check_range(self, "min_p", least=0, most=1)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise UsageError(
                f"repetition_penalty is {self.repetition_penalty}; it must be finite and above 0 (1 is off)."
            )
        if not 0 <= self.seed < SEED_LIMIT:
            raise UsageError(f"seed is {self.seed}; it must be between 0 and 2**64 - 1.")
