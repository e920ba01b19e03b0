"""A cell: one method and plain decoding measured on one prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.engine.statistics import Statistics


@dataclass(frozen=True, slots=True)
class Writing:
    """One text and its measurements; for the peer, steps are forward passes, and decoding includes prefill."""

    token_ids: tuple[int, ...]  # emitted
    prompt_tokens: int
    statistics: Statistics  # without stalls
    total_seconds: float  # wall-clock, with stalls
    stalled_seconds: float | None = None  # excess time of passes that other load delayed; None for the peer


@dataclass(frozen=True, slots=True)
class Cell:
    """One prompt written by a method, `own`, and by plain decoding in the same process, `base`; None for a failure."""

    settings: str  # from `settings_name`
    task: str  # with its category if it has several: `spec_bench/qa`
    method: str  # the label
    number: int  # index of the prompt in its file
    turn: int  # number of the question in a conversation, from 1
    base: Writing | None
    own: Writing | None
    failure: str = ""  # the error's type and message


def settings_name(settings: Mapping[str, Any]) -> str:
    """Return a name for generation arguments, such as `greedy-128-seed0` or `temperature0.7-128-seed0`."""
    sampled = [
        f"{name}{str(settings[name]).removesuffix('.0')}"
        for name in ("temperature", "top_p", "top_k", "min_p")
        if name in settings
    ]
    return "-".join([*(sampled or ["greedy"]), str(settings["max_new_tokens"]), f"seed{settings['seed']}"])
