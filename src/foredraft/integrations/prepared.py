"""Translates what transformers' `generate` has prepared for a row into what foredraft's engine takes.

Filters that the engine implements become sampling options, and stopping criteria become ids and limits where possible.
The rest is called as transformers would call it, with the row's whole padded prefix.
"""

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import logits_process

from foredraft.contracts import TokenIds
from foredraft.errors import UsageError
from foredraft.sampling import LEAST_TEMPERATURE, LogitsProcessor

NO_LIMIT = 1 << 40  # maximum new tokens if nothing sets a limit; the model's window then does
_FILTERS = (
    (logits_process.TemperatureLogitsWarper, "temperature", LEAST_TEMPERATURE),
    (logits_process.TopKLogitsWarper, "top_k", 1),
    (logits_process.TopPLogitsWarper, "top_p", 1e-9),
    (logits_process.MinPLogitsWarper, "min_p", 0.0),
)
"""The filters that the engine implements, in the order of their application, and the least value that it accepts."""


def split_filters(processors: Iterable[Any]) -> tuple[LogitsProcessorList, dict[str, Any]]:
    """Return the processors but for the last ones that the engine implements, and these as sampling options."""
    left, options = list(processors), {}
    for kind, name, least in reversed(_FILTERS):
        last = left[-1] if left else None
        # a subclass may behave differently, as does a filter that always keeps some tokens
        if type(last) is not kind or getattr(last, name) < least or getattr(last, "min_tokens_to_keep", 1) != 1:
            continue
        if getattr(last, "filter_value", -math.inf) == -math.inf:
            options[name] = getattr(left.pop(), name)
    return LogitsProcessorList(left), options


def split_criteria(criteria: Iterable[Any]) -> tuple[int | None, tuple[int, ...], StoppingCriteriaList]:
    """Return a row's maximum length, padding included, the ids that end it, and the remaining criteria."""
    lengths, eos, others = [], [], StoppingCriteriaList()
    for each in criteria:
        if type(each) is MaxLengthCriteria:
            lengths.append(each.max_length)
        elif type(each) is EosTokenCriteria:
            eos.extend(each.eos_token_id.flatten().tolist())
        else:
            others.append(each)
    return min(lengths, default=None), tuple(eos), others


@dataclass(slots=True)
class Row:
    """One row of a batch: the inputs of its processors and criteria, and their results."""

    number: int  # index of the row
    batch: torch.Tensor  # int64[B, L], the prompts as passed to `generate`, padding included
    prompt: TokenIds  # int64[n], the row without padding
    processors: LogitsProcessorList  # the remaining ones; the row's own copies if the batch has several rows
    criteria: StoppingCriteriaList  # called after every token
    scores: list[torch.Tensor] | None  # processed logits, float32[V] for each token; None if they are not returned
    logits: list[torch.Tensor] | None  # the same before processing
    tokens: list[int] = field(default_factory=list)  # the tokens written

    def engine_processors(self) -> tuple[LogitsProcessor, ...]:
        """Return the processors for the engine to call at every emitted position; none if there is nothing to do."""
        is_needed = bool(self.processors) or self.scores is not None or self.logits is not None
        return (self._process,) if is_needed else ()

    def stops(self, token: int) -> bool:
        """Record an emitted token, and return whether a criterion ends the row with it."""
        self.tokens.append(token)
        if not self.criteria:
            return False
        new = torch.tensor([self.tokens], dtype=torch.long, device=self.batch.device)
        ids = torch.cat([self.batch[self.number : self.number + 1], new], dim=1)
        scores = None if self.scores is None else tuple(each[None] for each in self.scores)
        return bool(torch.as_tensor(self.criteria(ids, scores)).any())

    def _process(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Process float32[1, V] as transformers would, with the whole batch."""
        scores = scores.to(self.batch.device)
        if self.logits is not None:
            self.logits.append(scores[0].clone())
        if self.processors:
            # processors may index their data by row, so this row is at its own index in a batch of copies
            prompt = self.batch[self.number : self.number + 1]
            ids = torch.cat([prompt, input_ids[:, len(self.prompt) :].to(prompt.device)], dim=1)
            rows = len(self.batch)
            processed = self.processors(ids.repeat(rows, 1), scores.repeat(rows, 1))  # type: ignore[arg-type]  # ids are int64
            scores = processed[self.number : self.number + 1]
        if self.scores is not None:
            self.scores.append(scores[0].clone())
        return scores


def own_processors(processors: LogitsProcessorList, rows: int, model: Any) -> list[LogitsProcessorList]:
    """Return the processors of each of `rows` rows; copies if there are several, as some processors keep state.

    The model itself is not copied. A processor that cannot be copied is a UsageError.
    """
    if rows == 1 or not processors:
        return [processors] * rows
    try:
        return [copy.deepcopy(processors, {id(model): model}) for _ in range(rows)]
    except Exception as error:
        names = ", ".join(type(each).__name__ for each in processors)
        raise UsageError(
            f"The logits processors ({names}) cannot be copied ({error}), and each row of a batch needs its own; "
            "generate each row in a separate call."
        ) from error
