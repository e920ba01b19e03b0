"""A target in two parts: its first layers draft through an early exit, and verification continues from their states.

Liu et al., "Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling Control Mechanism"
(EESD, ACL Findings 2024), section 3.1. Each part has its own KV cache, and drafted rows are held in the first one. A
verification reuses their states, runs the missing rows through the first layers, and all rows through the rest. Does
not depend on how drafts grow or which tokens are accepted.
"""

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from foredraft.contracts import Scores, TokenIds
from foredraft.errors import ForedraftWarning, UnsupportedModelError
from foredraft.graph.layout import Layout, lay_out_text
from foredraft.graph.tree import I64, BoolArray
from foredraft.model.compiled.package import MOST_ROWS
from foredraft.model.heads import ExitHead
from foredraft.model.kv_cache import TreeCache
from foredraft.model.layers import Passage, model_parts, shorter
from foredraft.model.mask import seen_rows
from foredraft.model.rounding import error_beyond_rounding
from foredraft.model.target import TorchTarget, fork_scores


class SplitCache:
    """One sequence's caches in a split target, and the exit's states of its uncommitted rows."""

    def __init__(self, first: TreeCache, rest: TreeCache) -> None:
        self.first = first  # of the layers up to the exit, and of the head's own layer
        self.rest = rest  # of the layers after the exit; holds the root only after verification
        self._states: list[torch.Tensor] = []  # float[r, D] each: of the root, which is row 0, then of the held rows
        self._row_of: dict[tuple[int, ...], int] = {}  # by the tokens from the root to the row, in the rows' order
        self._verified: I64 = np.empty(0, np.int64)  # the row of each row of the last verification

    @property
    def length(self) -> int:
        return self.rest.length

    def begin(self, layout: Layout, states: torch.Tensor) -> None:
        """Store the root's states, float[1, D]."""
        self._states, self._row_of = [states], {tuple(layout.token_ids.tolist()): 0}

    def add(self, layout: Layout, states: torch.Tensor) -> None:
        """Store the states, float[R, D], of rows after the root that are now held."""
        self._states.append(states)
        root, *held = self._row_of
        tokens = np.array([*(path[-1] for path in held), *layout.token_ids])
        for seen in seen_rows(layout):
            self._row_of[*root, *tokens[seen].tolist()] = len(self._row_of)

    def knows_root(self, layout: Layout) -> bool:
        """Return whether the root was run through the first layers already."""
        if self.first.length == layout.at:
            return False
        assert self.first.length == layout.at + 1, "the first layers hold what is before the root, or up to it"
        assert tuple(layout.token_ids[:1]) in self._row_of, "the draft had the same root"
        return True

    def missing(self, layout: Layout) -> Layout | None:
        """Match a verification's rows with the stored ones; return a layout of the missing rows, or None."""
        seen, known = seen_rows(layout), len(self._row_of)
        found = [self._row_of.get(tuple(layout.token_ids[own].tolist()), -1) for own in seen]
        new = np.flatnonzero(np.array(found) < 0)
        self._verified = np.array(found)
        self._verified[new] = known + np.arange(len(new))
        if not len(new):
            return None
        sees: BoolArray = np.zeros((len(new), known - 1 + len(new)), np.bool_)
        for i, row in enumerate(new):
            sees[i, self._verified[seen[row]][1:] - 1] = True
        held = np.array([layout.at + len(path) - 1 for path in self._row_of][1:], np.int64)
        return Layout(layout.token_ids[new], layout.positions[new], sees, layout.at + 1, held)

    def verified_states(self) -> torch.Tensor:
        """Return the exit's states of the verification's rows, float[R, D]."""
        return torch.cat(self._states)[torch.from_numpy(self._verified)]

    def commit(self, rows: Sequence[int]) -> None:
        """Commit these rows of the last verification, root first and ascending, in both parts; discard all others."""
        if list(rows[:1]) != [0]:
            raise ValueError(f"Rows {list(rows)} must begin with the root, row 0.")
        self.rest.commit(rows)
        self.first.commit((self._verified[list(rows[1:])] - 1).tolist())


class SplitTarget:
    """A target whose first `layers` layers run separately. Both parts are compiled if the target and they were.

    `first` has the head's layer, norm and LM head, or the target's own norm and LM head; `rest` starts from the exit's
    states. Raises UsageError for `layers` out of range, and UnsupportedModelError if the model cannot be split.
    """

    def __init__(self, target: TorchTarget, layers: int, head: ExitHead | None) -> None:
        parts = model_parts(target.model)
        parts.check_exit(layers)
        self.vocabulary, self.window = target.vocabulary, target.window
        self.exit_hidden = torch.empty(0)  # float[R, D], the inputs of the head's LM head in its last pass
        own = target.model.get_submodule(parts.layers)
        before, after = dict(enumerate(own[:layers])), dict(enumerate(own[layers:], layers))
        replaced: dict[str, nn.Module] = {}
        if head is not None:
            before[parts.count - 1] = head.layer
            replaced = {parts.norm: head.norm, parts.lm_head: head.lm_head}
        first, rest = shorter(target.model, parts, before, replaced), shorter(target.model, parts, after)
        self._exit = Passage(first.get_submodule(parts.layers)[layers - 1], enters=False)
        self._entry = Passage(rest.get_submodule(parts.layers)[0], enters=True)
        self.first, self.rest = target.with_model(first, self._exit), target.with_model(rest, self._entry)
        if target.compiled is not None and (self.first.compiled is None or self.rest.compiled is None):
            sentence = (
                "An early exit runs the model in two parts, which are not compiled, so each pass will take about "
                f"{target.compiled.gain:.1f} times as long as it could. `foredraft compile --method eesd` compiles "
                "both."
            )
            warnings.warn(sentence, ForedraftWarning, stacklevel=2)
        # layers may exchange more than the states
        if error := error_beyond_rounding(fork_scores(self), fork_scores(target), target.model):
            raise UnsupportedModelError(
                f"This {target.support.family} model scores tokens differently when its first layers are run apart "
                f"(relative error {error:.1e}), so it cannot exit early; draft with another method."
            )

    def new_cache(self) -> SplitCache:
        return SplitCache(self.first.new_cache(), self.rest.new_cache())

    @torch.inference_mode()
    def prefill(self, token_ids: TokenIds, cache: SplitCache) -> None:
        for start in range(0, len(token_ids), MOST_ROWS):
            chunk = token_ids[start : start + MOST_ROWS]
            layout = lay_out_text(chunk, cache.length)
            self._entry.states = self._exit_states(layout, cache.first)[None]
            cache.first.commit(range(len(chunk)))
            self.rest.run(layout, cache.rest)
            cache.rest.commit(range(len(chunk)))

    def _exit_states(self, layout: Layout, first: TreeCache) -> torch.Tensor:
        """Run rows through the first layers and the head; return the exit's states, float[R, D]."""
        self.first.run(layout, first)
        return self._exit.states[0]

    @torch.inference_mode()
    def draft(self, layout: Layout, cache: SplitCache) -> Scores:
        """Score the root, or rows after it, by the head, and store their exit states for the verification."""
        scores = self.first.forward(layout, cache.first, hidden=True)
        assert scores.hidden is not None, "requested with hidden=True"
        self.exit_hidden = scores.hidden
        store = cache.add if cache.first.held or layout.ancestors is not None else cache.begin
        store(layout, self._exit.states[0])
        return scores

    @torch.inference_mode()
    def forward(self, layout: Layout, cache: SplitCache, *, hidden: bool = False) -> Scores:
        """Score every row of `layout`, reusing the drafted rows' states; nothing is committed until `commit`."""
        if not cache.knows_root(layout):
            root = lay_out_text(layout.token_ids[:1], layout.at)
            cache.begin(root, self._exit_states(root, cache.first))
            cache.first.commit([0])
        missing = cache.missing(layout)
        if missing is not None:
            cache.add(missing, self._exit_states(missing, cache.first))
            cache.first.hold()
        self._entry.states = cache.verified_states()[None]
        return self.rest.forward(layout, cache.rest, hidden=hidden)


class ExitModel:
    """The first part as one sequence's draft model, in which a rollout grows a tree."""

    def __init__(self, target: SplitTarget, cache: SplitCache) -> None:
        self.vocabulary, self.window = target.vocabulary, target.window
        self._target, self._cache = target, cache

    def new_cache(self) -> TreeCache:
        """Return the existing cache of the first part."""
        return self._cache.first

    def prefill(self, token_ids: TokenIds, _cache: TreeCache) -> None:
        """Do nothing: committed tokens went through the first layers already, drafted or not."""
        assert not len(token_ids), "verification ran what was not drafted"

    def forward(self, layout: Layout, _cache: TreeCache, *, hidden: bool = False) -> Scores:
        scores = self._target.draft(layout, self._cache)
        return Scores(scores.logits, scores.hidden if hidden else None)
