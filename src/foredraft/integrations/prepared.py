"""What transformers' `generate` has prepared for a row, as foredraft's engine takes it.

Filters that the engine applies itself become sampling options, ends become ids and limits, and all else stays the
object that transformers made, called with what transformers would call it with: the row's whole padded prefix.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foredraft.errors import UsageError
from foredraft.sampling import LEAST_TEMPERATURE, LogitsProcessor

NO_LIMIT = 1 << 40
"""New tokens at most where nothing sets a limit; the model's window then does."""
_FILTERS = (
    (TemperatureLogitsWarper, "temperature", LEAST_TEMPERATURE),
    (TopKLogitsWarper, "top_k", 1),
    (TopPLogitsWarper, "top_p", 1e-9),
    (MinPLogitsWarper, "min_p", 0.0),
)
"""The filters that the engine has, in the order in which it applies them, and the least value that it takes."""


def split_filters(processors: Iterable[Any]) -> tuple[LogitsProcessorList, dict[str, Any]]:
    """Take from the end of `processors` the filters that foredraft's sampling applies itself, in the same order.

    Returns the processors that are left, and sampling options by name.
    """
    left, options = list(processors), {}
    for kind, name, least in reversed(_FILTERS):
        last = left[-1] if left else None
        # a subclass may do something else, and so may a filter that keeps some tokens in any case
        if type(last) is not kind or getattr(last, name) < least or getattr(last, "min_tokens_to_keep", 1) != 1:
            continue
        if getattr(last, "filter_value", -math.inf) == -math.inf:
            options[name] = getattr(left.pop(), name)
    return LogitsProcessorList(left), options


def split_criteria(criteria: Iterable[Any]) -> tuple[int | None, tuple[int, ...], StoppingCriteriaList]:
    """Return the tokens of a row at most, padding included, the ids that end it, and what must be asked every time."""
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
    """One row of a batch: what its processors and criteria see, and what they have made of it."""

    number: int  # which row
    batch: torch.Tensor  # int64[B, L], the prompts as `generate` was given them, padding included
    length: int  # how many of the row's L ids are its own
    processors: LogitsProcessorList  # what is left of the prepared ones; own to this row where the batch has several
    criteria: StoppingCriteriaList  # asked after every token
    keeps_scores: bool = False  # whether processed scores are wanted
    keeps_logits: bool = False  # whether scores as the model gave them are wanted
    tokens: list[int] = field(default_factory=list)  # what was written, as the criteria were told
    scores: list[torch.Tensor] = field(default_factory=list)  # float32[V] for each token written, if wanted
    logits: list[torch.Tensor] = field(default_factory=list)  # the same before processing, if wanted

    def engine_processors(self) -> tuple[LogitsProcessor, ...]:
        """Return what the engine must call at every emitted position; nothing where there is nothing to do."""
        wanted = len(self.processors) > 0 or self.keeps_scores or self.keeps_logits
        return (self._process,) if wanted else ()

    def stops(self, token: int) -> bool:
        """Note an emitted token, and say whether a criterion ends the row with it."""
        self.tokens.append(token)
        if not self.criteria:
            return False
        new = torch.tensor([self.tokens], dtype=torch.long, device=self.batch.device)
        ids = torch.cat([self.batch[self.number : self.number + 1], new], dim=1)
        scores = tuple(each[None] for each in self.scores) if self.keeps_scores else None
        return bool(torch.as_tensor(self.criteria(ids, scores)).any())

    def _process(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Process float32[1, V] as transformers would, which has the whole batch before it."""
        scores = scores.to(self.batch.device)
        if self.keeps_logits:
            self.logits.append(scores[0].clone())
        if len(self.processors):
            # processors may index what they hold by row, so this row stands in its own place in a batch of copies
            prompt = self.batch[self.number : self.number + 1]
            ids = torch.cat([prompt, input_ids[:, self.length :].to(prompt.device)], dim=1)
            rows = len(self.batch)
            processed = self.processors(ids.repeat(rows, 1), scores.repeat(rows, 1))  # type: ignore[arg-type]  # ids are int64
            scores = processed[self.number : self.number + 1]
        if self.keeps_scores:
            self.scores.append(scores[0].clone())
        return scores


def own_processors(processors: LogitsProcessorList, rows: int, model: Any) -> Sequence[LogitsProcessorList]:
    """Return the processors of each of `rows` rows: copies where there are several, as some keep a text's state.

    Raises:
        UsageError: a processor that cannot be copied; those that hold the model hold the same one in their copies.
    """
    if rows == 1 or not processors:
        return [processors] * rows
    try:
        return [copy.deepcopy(processors, {id(model): model}) for _ in range(rows)]
    except Exception as error:
        names = ", ".join(type(each).__name__ for each in processors)
        raise UsageError(
            f"The logits processors ({names}) cannot be copied ({error}), and each row of a batch needs its own; "
            "generate the rows in calls of their own."
        ) from error
