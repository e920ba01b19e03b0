"""One sequence while it is decoded: its ids, its cache, how its tokens are chosen, and when it ends.

Knows ids only: a stop string is somebody's function that says whether a token ends the text.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from foredraft.contracts import (
    Chooser,
    Control,
    Draft,
    DraftContext,
    Drafter,
    KeyValueCache,
    Scores,
    SequenceView,
    TokenIds,
    Verdict,
    Verification,
)
from foredraft.sampling import LogitsProcessor, Probabilities, SamplingOptions
from foredraft.sampling.chooser import Sampler
from foredraft.sampling.rejection import Chance, SeededChance, rejection_chooser

FinishReason = Literal["eos", "stop", "length", "window", "memory"]


class SequenceState:
    """A sequence, its root being the last of its ids, which the cache does not hold yet.

    Args:
        prompt: int64[n], at least one id.
        cache: the target's, empty.
        sampling: how tokens are chosen.
        max_new_tokens: the text ends after this many, with reason "length".
        window: the most tokens the sequence may have, with reason "window"; None for no limit.
        eos: ids that end the text, with reason "eos".
        processors: transformers' logits processors.
        stop: called once for every emitted token, in order; True ends the text, with reason "stop".
        verification: "matched" draws the tokens of plain decoding, "rejection" tokens of the same law.
        chance: what decides about a position under rejection; None takes the sampling's seed.
    """

    def __init__(
        self,
        prompt: TokenIds,
        cache: KeyValueCache,
        sampling: SamplingOptions,
        *,
        max_new_tokens: int,
        window: int | None = None,
        eos: Iterable[int] = (),
        processors: Sequence[LogitsProcessor] = (),
        stop: Callable[[int], bool] | None = None,
        verification: Verification = "matched",
        chance: Callable[[int], Chance] | None = None,
    ) -> None:
        self.cache = cache
        self.prompt_length = len(prompt)
        self.length = len(prompt)
        self.finish: FinishReason | None = None
        self._ending: FinishReason | None = None  # becomes `finish` once its token is committed
        self._limit = len(prompt) + max_new_tokens
        self._limit_reason: FinishReason = "length"
        if window is not None and window < self._limit:
            self._limit, self._limit_reason = window, "window"
        self._ids: npt.NDArray[np.int64] = np.empty(len(prompt) + min(max_new_tokens, 1024), np.int64)
        self._ids[: len(prompt)] = prompt
        self._eos = frozenset(eos)
        self._stop = stop
        # a sampler that held its sequence would keep it, and with it the cache, until Python looks for cycles
        own = weakref.proxy(self)
        self._sampler = Sampler(sampling, processors, lambda: own.view().ids)
        self._verification = verification
        self._chance = chance if chance is not None else partial(SeededChance, sampling.seed)
        if self.length >= self._limit:
            self.finish = self._limit_reason

    @property
    def root(self) -> int:
        """The last emitted token."""
        return int(self._ids[self.length - 1])

    @property
    def useful_depth(self) -> int:
        """How deep a draft can be of use: the last token before the limit need not be drafted."""
        return self._limit - self.length - 1

    @property
    def emitted(self) -> TokenIds:
        """The ids after the prompt, int64[n]."""
        return self._ids[self.prompt_length : self.length].copy()

    def view(self) -> SequenceView:
        """Return what a drafter may read."""
        ids = self._ids[: self.length]
        ids.flags.writeable = False
        return SequenceView(ids, self.prompt_length)

    def chooser(self, scores: Scores, at: int, draft: Draft) -> Chooser:
        """Prepare to choose tokens after the rows of one verification (the policy's half that chooses)."""
        if self._verification == "matched":
            return self._sampler.chooser(scores, at)

        def law(row: int, path: Sequence[int]) -> Probabilities:
            return self._sampler.distribution(scores.logits[row], at, path)

        return rejection_chooser(draft, at, law, self._chance)

    def ends(self, tokens: Sequence[int]) -> bool:
        """Say whether the text ends with the last of `tokens`; called once for every token, in order."""
        token = tokens[-1]
        stopped = self._stop is not None and self._stop(token)
        if token in self._eos:
            self._ending = "eos"
        elif stopped:
            self._ending = "stop"
        elif self.length + len(tokens) >= self._limit:
            self._ending = self._limit_reason
        return self._ending is not None

    def commit(self, verdict: Verdict) -> None:
        """Append the verdict's tokens; the cache keeps the root and the accepted path, up to the new root."""
        rows = [0, *(node + 1 for node in verdict.path)][: len(verdict.tokens)]
        self.cache.commit(rows)
        stop = self.length + len(verdict.tokens)
        if stop > len(self._ids):
            self._ids = np.concatenate([self._ids[: self.length], np.empty(max(stop, 1024), np.int64)])
        self._ids[self.length : stop] = verdict.tokens
        self.length = stop
        self.finish = self._ending


@dataclass(frozen=True, slots=True)
class Prepared:
    """A text that was checked and is not begun.

    Attributes:
        prompt: int64[n].
        begin: makes its sequence, from a cache.
        drafter: drafts for it.
        control: says how much, where the text is written alone.
        shared: whether a batch may decide for all of its sequences together how much they draft.
        context: what the drafter is told, but for the cache.
    """

    prompt: TokenIds
    begin: Callable[[Any], SequenceState]
    drafter: Drafter
    control: Control
    shared: bool
    context: DraftContext
