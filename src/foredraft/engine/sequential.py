"""Passes of one sequence each, where sequences cannot share them: of any target. Does not know how it runs them."""

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

from foredraft.contracts import PassResult, Rows, Scores, Target, TokenIds
from foredraft.errors import OutOfMemoryError
from foredraft.graph.layout import Layout


class SequentialPasses:
    """Runs a pass for each sequence; see `Passes`."""

    keeps_prefixes = False
    memory_use = 0.0

    def __init__(self, target: Target) -> None:
        self.target = target

    @property
    def most_rows(self) -> int:
        return self.target.most_rows

    def returns(self, _hidden: tuple[int, ...]) -> bool:
        return True

    def open(self, token_ids: TokenIds, _capacity: int, _owner: str) -> Any:
        return self.target.new_cache(len(token_ids))

    def close(self, _cache: Any) -> None:
        """Do nothing: the cache is freed with its sequence."""

    def reserve(self, _cache: Any, _layout: Layout) -> None:
        """Do nothing: the pass reserves its own room."""

    def forward(self, rows: Sequence[Rows]) -> list[PassResult]:
        return [self._pass(each) for each in rows]

    def _pass(self, rows: Rows) -> PassResult:
        start, states = perf_counter_ns(), None
        scores: Scores | OutOfMemoryError | None = None
        try:
            if rows.scored:
                scores = self.target.forward(rows.layout, rows.cache, hidden=rows.hidden)
            else:
                states = self.target.run(rows.layout, rows.cache, rows.hidden)
        except OutOfMemoryError as error:
            scores = error
        return PassResult(scores, perf_counter_ns() - start, states)
