"""A target in two parts: its first layers draft through an early exit, and verification goes on where they stopped.

Liu et al., "Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling Control Mechanism"
(EESD, ACL Findings 2024), section 3.1: what the first N layers have computed for a drafted token is not computed again.
Each part has a cache of its own. Rows that were drafted are held in the first one; a verification takes their states
from there, puts the rows that are missing through the first layers, and all of them through the rest. Knows a target
and a head; neither how drafts grow nor what is accepted.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from foredraft.contracts import Scores, TokenIds
from foredraft.errors import ForedraftWarning, UnsupportedModelError
from foredraft.graph.layout import Layout, lay_out, lay_out_text
from foredraft.graph.tree import BoolArray
from foredraft.model.heads import ExitHead
from foredraft.model.kv_cache import TreeCache
from foredraft.model.layers import ModelParts, model_parts, standing_in, with_layers
from foredraft.model.ranked import ids_of
from foredraft.model.rounding import relative_error, within_rounding
from foredraft.model.target import PREFILL_ROWS, TorchTarget

_ROOT_ROW = 0


class SplitCache:
    """One sequence's memory of a split target.

    Attributes:
        first: of the layers up to the exit, and of the head's own layer.
        rest: of the layers behind it; holds the root only once it is verified.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.first = TreeCache(windows)
        self.rest = TreeCache(windows)
        self._states: list[torch.Tensor] = []  # of the root and then of the rows held, [r, D] each
        self._row_of: dict[tuple[int, int], int] = {}  # by the row above (-1 above the root) and the token
        self._positions: list[int] = []
        self._verified: list[int] = []  # the row of each row of the last verification

    @property
    def length(self) -> int:
        """How many tokens are committed."""
        return self.rest.length

    def begin(self, layout: Layout, states: torch.Tensor) -> None:
        """Take note of the root's states, float[1, D], its row being 0."""
        self._states, self._row_of, self._verified = [states], {(-1, int(layout.token_ids[0])): _ROOT_ROW}, []
        self._positions = [int(layout.positions[0])]

    def add(self, layout: Layout, states: torch.Tensor) -> None:
        """Take note of the states, float[R, D], of rows that are now held."""
        start = len(self._positions)
        self._positions += layout.positions.tolist()
        for row, (above, token) in enumerate(zip(_rows_above(layout), layout.token_ids.tolist(), strict=True)):
            self._row_of[above + 1, token] = start + row  # a layout behind the root counts from the root's child on
        self._states.append(states)

    def knows_root(self, layout: Layout) -> bool:
        """Say whether the root has been put through the first layers already.

        Raises:
            ValueError: another root was.
        """
        if self.first.length == layout.at:
            return False
        if self.first.length != layout.at + 1 or (-1, int(layout.token_ids[0])) not in self._row_of:
            raise ValueError(
                f"The first layers hold {self.first.length} tokens, not those before or up to the root at {layout.at}."
            )
        return True

    def missing(self, layout: Layout) -> Layout | None:
        """Find the rows of a verification among those known; lay out those that are not, behind the root."""
        known = len(self._positions)
        rows: list[int] = []
        new: list[int] = []
        for row, (above, token) in enumerate(zip(_rows_above(layout), layout.token_ids.tolist(), strict=True)):
            found = self._row_of.get((rows[above] if above >= 0 else -1, token))
            if found is None:
                found = known + len(new)
                new.append(row)
            rows.append(found)
        self._verified = rows
        if not new:
            return None
        sees: BoolArray = np.zeros((len(new), known - 1 + len(new)), np.bool_)
        for i, row in enumerate(new):
            behind_root = np.ones(row) if layout.ancestors is None else layout.ancestors[row, 1 : row + 1]
            sees[i, [rows[other + 1] - 1 for other in np.flatnonzero(behind_root)]] = True
        held = np.array(self._positions[1:], np.int64)
        return Layout(layout.token_ids[new], layout.positions[new], sees, layout.at + 1, held)

    def verified_states(self) -> torch.Tensor:
        """Return the exit's states of the verification's rows, float[R, D]."""
        states = torch.cat(self._states)
        return states if self._verified == list(range(len(states))) else states[self._verified]

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last verification, root first, in both parts, and forget all others.

        Raises:
            ValueError: the root is not among them, or they are not ascending.
        """
        rows = list(rows)
        if rows[:1] != [_ROOT_ROW]:
            raise ValueError(f"Rows {rows} must begin with the root, row 0.")
        self.rest.commit(rows)
        self.first.commit([self._verified[row] - 1 for row in rows[1:]])
        self._states, self._row_of, self._positions, self._verified = [], {}, [], []


class SplitTarget:
    """A target whose first layers are run apart.

    Args:
        target: whole.
        layers: how many layers lie before the exit (N).
        head: drafts from the exit's states; None takes the target's own norm and LM head, without a layer.

    Attributes:
        vocabulary: how many ids it scores.
        window: the most tokens a sequence may have, or None.
        drafted_ids: int32[N], the tokens that the head scores; None for all.
        exit_hidden: float[R, D], what the head's LM head scored in its last pass.

    Raises:
        UsageError: N out of range.
        UnsupportedModelError: a model that does not come apart.
    """

    def __init__(self, target: TorchTarget, layers: int, head: ExitHead | None) -> None:
        parts = model_parts(target.model)
        parts.check_exit(layers)
        if target.compiled is not None:
            warnings.warn(
                "An early exit runs the model in two parts as they are; what was compiled of the whole is not used, so "
                f"each pass will take about {target.compiled.gain:.1f} times as long.",
                ForedraftWarning,
                stacklevel=2,
            )
        self.vocabulary, self.window = target.vocabulary, target.window
        self.drafted_ids = None if head is None else ids_of(head.lm_head)
        self._windows = target.support.windows
        self._left = self._taken = torch.empty(0)
        self._hidden = self.exit_hidden = torch.empty(0)
        drafting = self._first_part(target.model, parts, layers, head)
        self._drafting = target.with_model(drafting)
        self._first = target.with_model(drafting.base_model)
        self._rest = target.with_model(self._second_part(target.model, parts, layers))
        self._probe(target)

    def new_cache(self) -> SplitCache:
        """Return an empty cache for one sequence."""
        return SplitCache(self._windows)

    @torch.inference_mode()
    def prefill(self, token_ids: TokenIds, cache: SplitCache) -> None:
        """Put `token_ids`, int64[n], into both parts behind what they hold, and commit them."""
        for start in range(0, len(token_ids), PREFILL_ROWS):
            chunk = token_ids[start : start + PREFILL_ROWS]
            self._taken = self.leave(lay_out_text(chunk, cache.length), cache.first)
            cache.first.commit(range(len(chunk)))
            self._rest.prefill(chunk, cache.rest)

    @torch.inference_mode()
    def leave(self, layout: Layout, first: TreeCache) -> torch.Tensor:
        """Put rows through the first layers and the head's; return the exit's states, float[R, D]."""
        self._first.run(layout, first)
        return self._left[0]

    @torch.inference_mode()
    def draft(self, layout: Layout, first: TreeCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what `leave` does; return the states and the head's scores, float[R, V], or [R, N] of `drafted_ids`."""
        logits = self._drafting.forward(layout, first).logits
        return self._left[0], logits

    @torch.inference_mode()
    def forward(self, layout: Layout, cache: SplitCache, *, hidden: bool = False) -> Scores:
        """Score every row of `layout`, starting from what the drafting left; nothing is committed until `commit`."""
        if not cache.knows_root(layout):
            root = lay_out_text(layout.token_ids[:1], layout.at)
            states = self.leave(root, cache.first)
            cache.first.commit([0])
            cache.begin(root, states)
        missing = cache.missing(layout)
        if missing is not None:
            states = self.leave(missing, cache.first)
            cache.first.hold()
            cache.add(missing, states)
        self._taken = cache.verified_states()
        logits = self._rest.forward(layout, cache.rest).logits
        return Scores(logits, self._hidden if hidden else None)

    def _first_part(self, model: Any, parts: ModelParts, layers: int, head: ExitHead | None) -> Any:
        """Return the model that ends in the exit: N layers, the head's in the place of the last one, its scores."""

        def leave(hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            self._left = hidden
            if head is None:
                return hidden
            output = head.layer(hidden, *args, **kwargs)
            return output[0] if parts.tuples else output  # type: ignore[no-any-return]  # a layer's output is Any

        own = model.get_submodule(parts.layers)
        replaced: dict[str, nn.Module] = {}
        lm_head = model.get_output_embeddings() if head is None else head.lm_head
        if head is not None:
            replaced[parts.norm] = head.norm

        def score(hidden: torch.Tensor) -> torch.Tensor:
            self.exit_hidden = hidden[0]
            return lm_head(hidden)  # type: ignore[no-any-return]  # a module's output is Any

        replaced[parts.lm_head] = standing_in(lm_head, score, tuples=False)
        return with_layers(model, parts, {**dict(enumerate(own[:layers])), parts.count - 1: leave}, replaced)

    def _second_part(self, model: Any, parts: ModelParts, layers: int) -> Any:
        """Return the model that begins behind the exit: its N-th layer gives what the first part left."""

        def go_on(_hidden: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
            return self._taken[None]

        own, lm_head = model.get_submodule(parts.layers), model.get_output_embeddings()

        def score(hidden: torch.Tensor) -> torch.Tensor:
            self._hidden = hidden[0]
            return lm_head(hidden)  # type: ignore[no-any-return]  # a module's output is Any

        rest = dict(enumerate(own[layers:], layers))
        replaced = {parts.lm_head: standing_in(lm_head, score, tuples=False)}
        return with_layers(model, parts, {layers - 1: go_on, **rest}, replaced)

    @torch.inference_mode()
    def _probe(self, target: TorchTarget) -> None:
        """Compare the two parts with the whole on a few tokens: what one layer hands another besides may be missing.

        Raises:
            UnsupportedModelError: the scores differ.
        """
        ids = np.arange(1, 6, dtype=np.int64) % self.vocabulary
        layout = lay_out(int(ids[3]), np.array([0, ids[4]], np.int32), np.array([-1, -1], np.int32), at=3)
        logits = []
        for each in (target, self):
            cache: Any = each.new_cache()
            each.prefill(ids[:3], cache)
            logits.append(each.forward(layout, cache).logits.float())
        error = relative_error(logits[1], logits[0])
        if not within_rounding(error, target.model):
            raise UnsupportedModelError(
                f"This {target.support.family} model scores tokens differently when its first layers are run apart "
                f"(relative error {error:.1e}), so it cannot exit early; draft with another method."
            )


class ExitModel:
    """The first part as one sequence's draft model: what a rollout grows a tree in.

    Args:
        target: both parts.
        cache: the sequence's.

    Attributes:
        vocabulary: how many ids it scores.
        window: the most tokens a sequence may have, or None.
    """

    def __init__(self, target: SplitTarget, cache: SplitCache) -> None:
        self.vocabulary, self.window = target.vocabulary, target.window
        self._target, self._cache = target, cache

    def new_cache(self) -> TreeCache:
        """Return the cache of the first part, which is there already."""
        return self._cache.first

    def prefill(self, token_ids: TokenIds, cache: TreeCache) -> None:
        """Do nothing: what is committed went through the first layers, drafted or not.

        Raises:
            ValueError: there are tokens that did not.
        """
        if len(token_ids):
            raise ValueError(
                f"{len(token_ids)} tokens behind the {cache.length} known were not put through the first layers."
            )

    def forward(self, layout: Layout, cache: TreeCache, *, hidden: bool = False) -> Scores:
        """Score rows, and keep the exit's states of each for the verification."""
        states, logits = self._target.draft(layout, cache)
        if cache.held or layout.ancestors is not None:
            self._cache.add(layout, states)
        else:
            self._cache.begin(layout, states)
        return Scores(logits, self._target.exit_hidden if hidden else None)


def _rows_above(layout: Layout) -> list[int]:
    """Return the row that each row follows, those held counted first; -1 where none of them does."""
    if layout.ancestors is None:
        return list(range(-1, layout.rows - 1))
    positions: npt.NDArray[np.int64] = np.concatenate([layout.held, layout.positions])
    above = layout.ancestors & (positions[None, :] == layout.positions[:, None] - 1)
    return [int(row.argmax()) if row.any() else -1 for row in above]
