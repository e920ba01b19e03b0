"""What decides a pretraining run: the model's shape, the recipe, and the machine that calculates it.

Knows values and what is wrong with them. Does not train, and knows no text.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from transformers import LlamaConfig

from foredraft.errors import UsageError
from foredraft.options import nearest, options_from

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a Llama: grouped-query attention, SwiGLU, tied embeddings."""

    layers: int = 8
    width: int = 384
    heads: int = 6
    kv_heads: int = 2
    intermediate: int = 1024
    positions: int = 2048

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together."""
        if min(asdict(self).values()) < 1:
            raise UsageError("Every size of a shape must be at least 1.")
        if self.width % self.heads or (self.width // self.heads) % 2 or self.heads % self.kv_heads:
            raise UsageError(
                f"width {self.width}, heads {self.heads} and kv_heads {self.kv_heads} do not fit: heads must divide "
                "width into even parts, and kv_heads must divide heads."
            )

    def config(self, vocabulary: int) -> LlamaConfig:
        """Return transformers' configuration for this shape; id 0 begins and ends texts."""
        return LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=self.width,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.positions,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )


SHAPES: Mapping[str, Shape] = {
    "demo": Shape(),
    "demo-draft": Shape(layers=2, width=160, heads=4, kv_heads=2, intermediate=432),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything about the training that decides the weights, beside shape and text.

    Attributes:
        steps: optimiser steps; one sees `micro_batch * accumulation * window` tokens.
        micro_batch: windows of one forward and backward pass.
        accumulation: passes whose gradients are averaged into a step.
        window: tokens that the model sees at once.
        matrix_rate: peak learning rate of Muon.
        embedding_rate: peak learning rate of AdamW (embedding and norms).
        warmup: steps in which the rates rise from 0.
        decay: "linear" or "cosine", from the peak after the warmup down to `floor`.
        floor: share of the peak that is left at the last step.
        momentum: of Muon.
        weight_decay: of the matrices, decoupled.
        clip: the gradient's largest norm; 0 for any.
        precision: "bfloat16" (autocast; the weights stay float32) or "float32".
        seed: of the first weights and the order of windows.
    """

    steps: int = 1830
    micro_batch: int = 16
    accumulation: int = 1
    window: int = 512
    matrix_rate: float = 0.02
    embedding_rate: float = 3e-3
    warmup: int = 100
    decay: str = "linear"
    floor: float = 0.0
    momentum: float = 0.95
    weight_decay: float = 0.0
    clip: float = 1.0
    precision: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if min(self.steps, self.micro_batch, self.accumulation, self.window) < 1:
            raise UsageError("steps, micro_batch, accumulation and window must be at least 1.")
        for name, allowed in (("decay", ("linear", "cosine")), ("precision", ("bfloat16", "float32"))):
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(f"{name} is {value!r}; it may be {' or '.join(allowed)}.{nearest(value, allowed)}")

    @property
    def tokens_per_step(self) -> int:
        """Return how many tokens an optimiser step sees."""
        return self.micro_batch * self.accumulation * self.window

    def rate(self, step: int) -> float:
        """Return the share of the peak learning rates for `step`, counted from 0."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        falling = 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.floor + (1 - self.floor) * falling


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and how a run is calculated; may change when it is resumed (another rounding, the same recipe).

    Attributes:
        device: "cpu", "cuda", "cuda:1", ...
        compile: use torch.compile; slower to begin, faster after.
        checkpoint_every: steps between checkpoints.
        report_every: steps between lines of progress.
        stop_after: stop with a checkpoint after this step, 0 for never; for machines that are lent by the hour.
    """

    device: str = "cpu"
    compile: bool = False
    checkpoint_every: int = 100
    report_every: int = 20
    stop_after: int = 0


def named(pairs: Iterable[str]) -> dict[str, str]:
    """Split strings such as `steps=500` at their first equals sign.

    Raises:
        UsageError: a string without one, or a name given twice.
    """
    given: dict[str, str] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise UsageError(f"{pair!r} is not of the form NAME=VALUE.")
        if name in given:
            raise UsageError(f"{name} is given twice. Give it once.")
        given[name] = value
    return given


def named_paths(pairs: Iterable[str]) -> dict[str, Path]:
    """Read strings such as `chat=chat.jsonl.gz`."""
    return {name: Path(value) for name, value in named(pairs).items()}


def named_numbers(pairs: Iterable[str]) -> dict[str, float]:
    """Read strings such as `chat=0.5`.

    Raises:
        UsageError: a value is no number.
    """
    return {name: _value(float, name, value) for name, value in named(pairs).items()}


def assigned(kind: type[T], pairs: Iterable[str], what: str) -> T:
    """Build the options `kind`, whose fields all have defaults, from strings such as `steps=500`.

    Raises:
        UsageError: an unknown name, or a value of the wrong kind.
    """
    types = {field.name: type(field.default) for field in fields(kind)}  # type: ignore[arg-type]  # T is a dataclass
    given = {name: _value(types.get(name, str), name, value) for name, value in named(pairs).items()}
    return options_from(kind, given, what)


def _value(kind: type[Any], name: str, value: str) -> Any:
    """Convert a value, or raise `UsageError`."""
    try:
        return kind(value)
    except ValueError as error:
        raise UsageError(f"{name} is {value!r}, which is no {kind.__name__}.") from error
