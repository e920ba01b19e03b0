"""A toy target without weights, whose passes take microseconds.

Has its own cache. Does not depend on drafters or the engine.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from foredraft.contracts import Scores, TokenIds
from foredraft.graph.layout import Layout, lay_out_text

VOCABULARY = 32  # default number of ids of `ToyTarget`; `check_drafter` uses it


class ToyCache:
    """Token ids by slot, written and committed as a model's keys and values are."""

    def __init__(self) -> None:
        self.slots: TokenIds = np.empty(0, np.int64)
        self.length = 0
        self._rows = 0

    def write(self, token_ids: TokenIds) -> None:
        """Write the rows of one pass after the committed ones."""
        self.slots = np.concatenate([self.slots[: self.length], token_ids])
        self._rows = len(token_ids)

    def commit(self, rows: Sequence[int]) -> None:
        """Commit these rows of the last pass; ValueError if they are not ascending or do not exist."""
        kept = list(rows)
        if kept != sorted(set(kept)) or any(not 0 <= row < self._rows for row in kept):
            raise ValueError(f"Rows {kept} must be ascending and below {self._rows}, the rows of the last pass.")
        self.slots = np.concatenate([self.slots[: self.length], self.slots[self.length :][kept]])
        self.length += len(kept)
        self._rows = 0


class ToyTarget:
    """A target whose logits are random numbers, seeded with the last three tokens of a row's own path.

    The path is read through the cache and the ancestor mask, so a wrong commit or a wrong mask changes the logits. One
    successor of each token is favoured, so that texts can be drafted. Another seed gives another target; `window` is
    the maximum number of tokens of a sequence, or None.
    """

    most_rows = 512
    _FAVOUR = 4.0
    _ORDER = 3

    def __init__(self, vocabulary: int = VOCABULARY, window: int | None = None, seed: int = 0) -> None:
        self.vocabulary, self.window, self._seed = vocabulary, window, seed

    def new_cache(self, _tokens: int = 0) -> ToyCache:
        return ToyCache()

    def run(self, layout: Layout, cache: ToyCache, _hidden: tuple[int, ...] = ()) -> None:
        cache.write(layout.token_ids)

    def forward(self, layout: Layout, cache: ToyCache, *, hidden: tuple[int, ...] = ()) -> Scores:
        """Score every row: logits float32[R, V], states float32[R, 8 K] on request; ValueError for a wrong position."""
        cache.write(layout.token_ids)
        mask = np.tri(layout.rows, dtype=np.bool_) if layout.ancestors is None else layout.ancestors
        rows = np.empty((layout.rows, self.vocabulary), np.float32)
        for row in range(layout.rows):
            seen = np.flatnonzero(mask[row])
            if layout.at != cache.length or layout.positions[row] != cache.length + len(seen) - 1:
                raise ValueError(
                    f"Row {row} is at {layout.positions[row]}, not after rows {seen}, which it attends to."
                )
            visible = np.concatenate([cache.slots[: cache.length], cache.slots[cache.length + seen]])
            rows[row] = self._row(visible[-self._ORDER :])
        states = torch.from_numpy(np.tile(rows[:, :8], len(hidden))) if hidden else None
        return Scores(torch.from_numpy(rows), states)

    def greedy(self, prefix: TokenIds, count: int) -> list[int]:
        """Return the `count` most probable tokens after `prefix`, one by one, without using the engine."""
        ids: list[int] = prefix.tolist()
        for _ in range(count):
            scores = self.forward(lay_out_text(np.array(ids, np.int64), 0), self.new_cache())
            ids.append(int(scores.logits[-1].argmax()))
        return ids[len(prefix) :]

    def _row(self, last: TokenIds) -> npt.NDArray[np.float32]:
        logits = np.random.default_rng([self._seed, *(last + 1)]).gumbel(size=self.vocabulary)
        logits[(5 * int(last[-1]) + 1) % self.vocabulary] += self._FAVOUR
        return logits.astype(np.float32)
