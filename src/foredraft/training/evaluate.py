"""Loss in nats per token, domain by domain, of a causal language model on whole documents.

Knows documents, windows and any model called like transformers' (ids in, `.logits` out). Does not train, and does not
decide which texts are fit to measure on: a set of them is described in a TOML file, one table a domain:

    [math]
    file = "gsm8k_test.jsonl"       # relative to the root that is given
    user = "question"               # a field of every row; or: text = ["prompt", "canonical_solution"]
    assistant = "answer"
    remove = "<<[^<>]*>>"           # optional: a regular expression, deleted from every field
    where = { split = "test" }      # optional: only rows whose fields have these values

A dot in a field's name goes down into it: `turns.0` is the first of the list `turns`.
"""

import gzip
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from foredraft.errors import UsageError
from foredraft.options import options_from
from foredraft.training.text_data import Document, chat_document, encode, text_document

IGNORED = -100  # cross_entropy's label for "no target here"


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Which rows of a JSONL file are a domain's documents; see the module's docstring.

    Attributes:
        file: relative to a root.
        text: fields that are joined to plain text; empty when the rows are chats.
        user: field of the prompt, with `assistant`.
        assistant: field of the answer.
        remove: regular expression deleted from every field, or "".
        where: field -> value that a row must have.
    """

    file: str
    text: tuple[str, ...] | list[str] = ()
    user: str = ""
    assistant: str = ""
    remove: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse sets that describe neither text nor chats, or both."""
        if bool(self.text) == bool(self.user) or bool(self.user) != bool(self.assistant):
            raise UsageError(f"The evaluation set of {self.file} needs either 'text', or both 'user' and 'assistant'.")

    def document(self, row: Mapping[str, Any]) -> Document | None:
        """Make a document of a row, or None when `where` leaves it out."""
        if any(field_of(row, name) != value for name, value in self.where.items()):
            return None
        if self.text:
            return text_document("".join(self._field(row, name) for name in self.text))
        messages = [("user", self._field(row, self.user)), ("assistant", self._field(row, self.assistant))]
        return chat_document([{"role": role, "content": content} for role, content in messages])

    def documents(self, root: Path) -> Iterator[Document]:
        """Yield the documents of the file below `root`.

        Raises:
            UsageError: it cannot be read, or a row lacks a field.
        """
        path = root / self.file
        try:
            with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
                for line in lines:
                    if line.strip() and (document := self.document(json.loads(line))) is not None:
                        yield document
        except (OSError, json.JSONDecodeError) as error:
            raise UsageError(f"The evaluation text {path} cannot be read ({error}).") from error

    def _field(self, row: Mapping[str, Any], name: str) -> str:
        value = str(field_of(row, name))
        return re.sub(self.remove, "", value) if self.remove else value


@dataclass(frozen=True, slots=True)
class DomainLoss:
    """What a model made of a domain.

    Attributes:
        documents: how many were read.
        tokens: predicted ids: every id of a document, its first one and its end included.
        nats: summed loss over them.
        answer_tokens: those that a model would write: assistants' contents, or all of a plain text.
        answer_nats: summed loss over these.
        utf8_bytes: of the documents' contents; 0 where they are not known.
    """

    documents: int
    tokens: int
    nats: float
    answer_tokens: int
    answer_nats: float
    utf8_bytes: int

    @property
    def loss(self) -> float:
        """Nats per token over all tokens."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def answer_loss(self) -> float:
        """Nats per token over the answers' tokens."""
        return self.answer_nats / self.answer_tokens if self.answer_tokens else math.nan


def field_of(row: Any, name: str) -> Any:
    """Return the value of a dotted field name.

    Raises:
        UsageError: the row has no such field.
    """
    value = row
    for part in name.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise UsageError(f"A row has no field {name!r}; its fields are {', '.join(row)}.") from error
    return value


def read_sets(file: Path) -> dict[str, EvaluationSet]:
    """Read a TOML file of evaluation sets: domain -> set.

    Raises:
        UsageError: it cannot be read, or a table has an unknown or missing key.
    """
    try:
        tables = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"The evaluation sets {file} cannot be read ({error}).") from error
    for name, table in tables.items():
        if not isinstance(table, dict) or "file" not in table:
            raise UsageError(f"The evaluation set {name!r} in {file} names no 'file'.")
    return {name: options_from(EvaluationSet, table, f"evaluation set {name!r}") for name, table in tables.items()}


def encoded(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[bool], int]]:
    """Yield ids, which of them are an answer's, and the number of UTF-8 bytes, for every document."""
    for document in documents:
        yield *encode(document, tokenizer), sum(len(content.encode()) for _, content in document.parts)


def held_out_documents(stream: np.ndarray[Any, Any], end: int = 0) -> Iterator[tuple[list[int], list[bool], int]]:
    """Cut a held-out token stream, uint16[tokens], at its ends; no token is marked an answer's, no byte counted."""
    for ids in np.split(np.asarray(stream, np.int64), np.flatnonzero(stream == end) + 1):
        if len(ids):
            yield ids.tolist(), [False] * len(ids), 0


@torch.inference_mode()
def domain_loss(
    model: torch.nn.Module,
    documents: Iterable[tuple[list[int], list[bool], int]],
    *,
    window: int = 512,
    max_tokens: int = 200_000,
    batch: int = 8,
    end: int = 0,
) -> DomainLoss:
    """Measure `model` on documents, in their order, until `max_tokens` have been read.

    The last document is read to its end. Every document is measured alone: it is preceded by the end token, as in
    training, and longer ones are cut into windows that do not see one another.

    Args:
        model: on any device; its logits are compared in float32.
        documents: ids ended by the end token, which of them are an answer's, UTF-8 bytes.
        window: ids that the model sees at once.
        max_tokens: stop after so many.
        batch: windows calculated at once.
        end: id of the end token.
    """
    device = next(model.parameters()).device
    pieces: list[tuple[list[int], list[int], list[bool]]] = []
    count = tokens = size = 0
    for ids, answers, length in documents:
        if tokens >= max_tokens:
            break
        inputs = [end, *ids[:-1]]
        for start in range(0, len(ids), window):
            cut = slice(start, start + window)
            pieces.append((inputs[cut], ids[cut], answers[cut]))
        count, tokens, size = count + 1, tokens + len(ids), size + length
    pieces.sort(key=lambda piece: len(piece[0]), reverse=True)  # rows of a batch are padded to its longest
    nats = answer_nats = 0.0
    for start in range(0, len(pieces), batch):
        losses, answer = _losses(model, pieces[start : start + batch], device)
        nats, answer_nats = nats + float(losses.sum()), answer_nats + float(losses[answer].sum())
    return DomainLoss(count, tokens, nats, sum(sum(answer) for _, _, answer in pieces), answer_nats, size)


def _losses(
    model: torch.nn.Module, pieces: list[tuple[list[int], list[int], list[bool]]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, float64[rows, longest] (0 on padding), and which of it is an answer's, bool[rows, longest]."""
    longest = max(len(inputs) for inputs, _, _ in pieces)
    ids = torch.zeros(len(pieces), longest, dtype=torch.long)
    targets = torch.full((len(pieces), longest), IGNORED)
    answer = torch.zeros(len(pieces), longest, dtype=torch.bool)
    for row, (inputs, wanted, answers) in enumerate(pieces):
        ids[row, : len(inputs)] = torch.tensor(inputs)
        targets[row, : len(wanted)] = torch.tensor(wanted)
        answer[row, : len(answers)] = torch.tensor(answers)
    # Padding stands on the right, where a causal model's earlier rows cannot see it: no mask is needed.
    logits = model(input_ids=ids.to(device), use_cache=False).logits.float()
    losses = cross_entropy(logits.transpose(1, 2), targets.to(device), ignore_index=IGNORED, reduction="none")
    return losses.double().cpu(), answer
