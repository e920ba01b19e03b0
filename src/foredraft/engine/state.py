"""The state of one sequence during decoding: its ids, its cache, how its tokens are chosen, and when it ends.

Does not depend on text: stop strings are a callback.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from foredraft.contracts import Chooser, Scores, SequenceView, TokenIds, Verdict
from foredraft.graph.tree import MOST_IDS
from foredraft.sampling import LogitsProcessor, SamplingOptions
from foredraft.sampling.chooser import Sampler

if TYPE_CHECKING:
    import torch

FinishReason = Literal["eos", "stop", "length", "window", "memory"]


class SequenceState:
    """A sequence. Its root is its last id, which is not in the cache yet."""

    def __init__(
        self,
        prompt: TokenIds,  # int64[n], at least one id
        sampling: SamplingOptions,
        *,
        max_new_tokens: int,  # limit of emitted tokens, with reason "length"
        window: int | None = None,  # limit of all tokens, with reason "window"
        eos: Iterable[int] = (),  # ids that end the text, with reason "eos"
        processors: Sequence[LogitsProcessor] = (),  # transformers'
        stop: Callable[[int], bool] | None = None,  # called once per emitted token; True ends with reason "stop"
    ) -> None:
        self.cache: Any = None  # the target's KV cache, set when decoding begins
        self.prompt_length = self.length = len(prompt)
        self.finish: FinishReason | None = None
        self._ending: FinishReason | None = None  # becomes `finish` once its token is committed
        # float[m, W] with room at the end, of the tokens before `_stated`: what a drafter reads in the view
        self._states: torch.Tensor | None = None
        self._begun = self._stated = 0  # positions: of the first token with states, and after the last one
        self.limit = len(prompt) + max_new_tokens  # of tokens, the prompt's included
        self._limit_reason: FinishReason = "length"
        if window is not None and window < self.limit:
            self.limit, self._limit_reason = window, "window"
        self._ids: TokenIds = np.empty(len(prompt) + min(max_new_tokens, 1024), np.int64)
        self._ids[: len(prompt)] = prompt
        self._eos, self._stop = frozenset(eos), stop
        self._sampler = Sampler(sampling, processors)
        if self.length >= self.limit:
            self.finish = self._limit_reason

    @property
    def root(self) -> int:
        """The last emitted token."""
        return int(self._ids[self.length - 1])

    @property
    def useful_depth(self) -> int:
        """The greatest useful depth of a draft: the last token before the limit need not be drafted."""
        return min(self.limit - self.length - 1, MOST_IDS)  # compiled code takes no larger number than int64

    @property
    def emitted(self) -> TokenIds:
        """The ids after the prompt, int64[n]."""
        return self._ids[self.prompt_length : self.length].copy()

    def view(self) -> SequenceView:
        """Return a read-only view for drafters."""
        ids = self._ids[: self.length]
        ids.flags.writeable = False
        states = None if self._states is None else self._states[: self._stated - self._begun]
        return SequenceView(ids, self.prompt_length, states)

    def keep_states(self, states: "torch.Tensor | None", end: int) -> None:
        """Keep the target's states, float[m, W], of the m tokens before position `end`, for drafters.

        Those known before are not changed. States that begin later than the known ones end take their place.
        """
        if states is None or end <= self._stated:
            return
        if self._states is None or end - len(states) > self._stated:
            self._states, self._begun, self._stated = states, end - len(states), end
            return
        known, count = self._stated - self._begun, end - self._begun
        if count > len(self._states):
            larger = states.new_empty(count + max(count // 4, 64), states.shape[1])
            larger[:known] = self._states[:known]
            self._states = larger
        self._states[known:count] = states[len(states) - (end - self._stated) :]
        self._stated = end

    def fill(self, rows: int, states: "torch.Tensor | None") -> None:
        """Commit all rows of a pass over a piece of the prompt, and keep the target's states of its last rows."""
        self.cache.commit(range(rows))
        self.keep_states(states, int(self.cache.length))

    def chooser(self, scores: Scores) -> Chooser:
        """Return the chooser for one verification of a draft after this sequence."""
        prefix = self._ids[: self.length] if self._sampler.needs_prefix else None
        return self._sampler.chooser(scores, self.length - 1, prefix)

    def ends(self, tokens: Sequence[int]) -> bool:
        """Return whether the text ends with the last of `tokens`, the tokens emitted so far in this step."""
        token = tokens[-1]
        stopped = self._stop is not None and self._stop(token)
        if token in self._eos:
            self._ending = "eos"
        elif stopped:
            self._ending = "stop"
        elif self.length + len(tokens) >= self.limit:
            self._ending = self._limit_reason
        return self._ending is not None

    def commit(self, verdict: Verdict, states: "torch.Tensor | None" = None) -> None:
        """Append the verdict's tokens; the cache keeps the root and the accepted path, without the new root.

        So are the target's states of the rows kept, float[N + 1, W], if a drafter needs them.
        """
        rows = [0, *(node + 1 for node in verdict.path)][: len(verdict.tokens)]
        self.cache.commit(rows)
        stop = self.length + len(verdict.tokens)
        if states is not None:
            first = rows[-1] == len(rows) - 1  # a list as an index takes 1 % of a small model's pass
            self.keep_states(states[: len(rows)] if first else states[rows], stop - 1)
        if stop > len(self._ids):
            self._ids = np.concatenate([self._ids[: self.length], np.empty(max(stop, 1024), np.int64)])
        self._ids[self.length : stop] = verdict.tokens
        self.length = stop
        self.finish = self._ending
