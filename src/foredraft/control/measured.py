"""The measured control: as many nodes as the measured cost of verifying them repays.

Does not know the drafter or the model; sees drafts with scores, verdicts, and seconds.
"""

from dataclasses import dataclass

import numpy as np

from foredraft.contracts import Budget, CostCurve, Draft, Verdict
from foredraft.control.cutting import cut
from foredraft.graph.tree import FloatArray, IntArray, depths

MOST_NODES = 64
"""The largest draft that a measured budget asks for."""

_KEEP = 0.98  # what a step's evidence is worth one drafted step later
_SCORE_BINS = 12  # by powers of two: [1/2, 1], [1/4, 1/2), ...
_BIN_NODES = 8.0  # nodes of each bin seen before the first step, as it were, accepted as those of all bins are
_USUAL_SCORES = 0.7 * 0.5 ** np.arange(_SCORE_BINS)  # of a bin that has not been seen
_PRIOR_RATIO, _PRIOR_PROMISED = 0.8, 3.0  # accepted nodes / the sum of scores, and the sum that this is worth
_MOST_NODES_SEEN = 400.0
_ENOUGH_TOKENS = 40.0  # of recent drafted steps, before they are compared with plain ones
_FADE = 0.8  # what is left of the evidence against drafting after a rest
_REFERENCE_EVERY, _FIRST_REFERENCE = 64, 4  # drafted steps between plain ones taken for reference, and before the first
_MOST_WORTHLESS = 8  # drafts in a row without a node worth verifying, before drafting rests
_MOST_WORTHLESS_AGAIN = 2  # the same after a rest, until drafting has paid
_SHORTEST_REST, _LONGEST_REST = 8, 128  # plain steps before drafting is tried again
_FEWEST_ASKED = 16  # nodes asked for at least: fewer would hardly be drafted quicker
_MOST_BESIDE = 16  # plain passes that the rest of a step may take before it is put down to something else


@dataclass(frozen=True, slots=True)
class MeasuredOptions:
    """The measured control has no options; `num_speculative_tokens` caps its number."""


class MeasuredControl:
    """As many nodes as maximise expected tokens per second under a measured cost curve.

    The expected tokens of the best n nodes are 1 plus the sum of their chances, where a node's chance is the share of
    nodes with a like score that the target accepted so far. It starts at the score times a ratio that is learned from
    all nodes, quickly and with caution: texts are short, and a draft that is too large costs time. The seconds of n
    nodes are the curve's, scaled by how fast passes have been running of late, plus what drafting costs beside the
    pass. A plain step now and then shows what plain steps cost today. As drafting more takes longer, about twice as
    many nodes are asked for as were worth it of late, and more again once all of them were. When drafted steps have
    been giving fewer tokens per second, or draft after draft is worth no node, steps are plain, and drafting is tried
    again at growing intervals, so that trying costs little.

    Args:
        curve: the target's cost by rows.
        most_nodes: never ask for more.
    """

    def __init__(self, curve: CostCurve, most_nodes: int = MOST_NODES) -> None:
        self._cost = curve.table(most_nodes + 1)
        self._most_nodes = most_nodes
        self._seen, self._accepted, self._promised = (np.zeros(_SCORE_BINS) for _ in range(3))
        self._worth = float(most_nodes)  # nodes worth verifying, smoothed
        self._pace = 1.0  # seconds of a drafted pass / those of the curve, smoothed
        self._plain_pace: float | None = None  # the same of plain passes, once there was one
        self._since_plain = _REFERENCE_EVERY - _FIRST_REFERENCE
        self._worthless = 0  # drafts in a row of which no node was worth verifying
        self._beside_drafted = self._beside_plain = 0.0  # seconds of a step beside its pass, smoothed
        self._tokens = self._seconds = 0.0  # of recent drafted steps
        self._rest = 0
        self._next_rest = _SHORTEST_REST

    def budget(self, depth: int) -> Budget:
        """Return the largest draft worth proposing; none while drafting rests."""
        if depth <= 0 or self._rest > 0 or self._since_plain >= _REFERENCE_EVERY:
            return Budget(0, max(depth, 0))
        return Budget(min(self._most_nodes, max(_FEWEST_ASKED, int(2 * self._worth))), depth)

    def trim(self, draft: Draft, budget: Budget) -> Draft:
        """Cut a draft to the number of nodes with the best expected tokens per second."""
        if len(draft) == 0:
            return draft
        if draft.q is not None:  # drawn: scores, and even how many were drawn, may tell what; only the budget may cut
            return cut(draft, budget)
        score = draft.score if draft.score is not None else _guessed_scores(draft.parents)
        chances = self._chances()[_score_bin(np.sort(score)[::-1][: self._most_nodes])]
        tokens = 1.0 + np.minimum(np.cumsum(chances), budget.depth)
        seconds = self._pace * self._cost[2 : len(chances) + 2] + self._beside_drafted
        rates = np.concatenate([[1.0 / self._plain_seconds()], tokens / seconds])
        best = int(np.argmax(rates))
        self._worth = min(2.0 * best, self._most_nodes) if best >= budget.nodes else 0.9 * self._worth + 0.1 * best
        self._worthless = self._worthless + 1 if best == 0 else 0
        if self._worthless >= (_MOST_WORTHLESS if self._next_rest == _SHORTEST_REST else _MOST_WORTHLESS_AGAIN):
            self._give_up_for_now()
        return cut(draft, Budget(min(best, budget.nodes), budget.depth), score)

    def observe(
        self,
        verdict: Verdict,
        forward_seconds: float,
        other_seconds: float,
        draft_seconds: float = 0.0,  # noqa: ARG002  # the protocol's; what drafting costs is in other_seconds
    ) -> None:
        """Compare what the step gave with what its scores promised, and its time with what the curve says."""
        drafted = len(verdict.draft)
        if 0 < forward_seconds < np.inf and 0 <= other_seconds < np.inf:  # a clock may jump
            self._observe_time(drafted, len(verdict.tokens), forward_seconds, other_seconds)
        if drafted:
            score = verdict.draft.score
            score = score if score is not None else _guessed_scores(verdict.draft.parents)
            bins = _score_bin(score)
            np.add.at(self._seen, bins, 1.0)
            np.add.at(self._promised, bins, score)
            np.add.at(self._accepted, bins[list(verdict.path)], 1.0)
            crowded = self._seen > _MOST_NODES_SEEN  # older evidence counts for less
            for evidence in (self._seen, self._promised, self._accepted):
                evidence[crowded] *= 0.5
            if self._tokens > _ENOUGH_TOKENS:
                self._consider_resting()
        elif self._rest > 0:
            self._rest -= 1

    def _observe_time(self, drafted: int, emitted: int, forward_seconds: float, other_seconds: float) -> None:
        # a pass that stalled, or a step that compiled something, says little about the next
        other_seconds = min(other_seconds, _MOST_BESIDE * self._cost[1])
        if drafted:
            expected = self._cost[min(drafted + 1, len(self._cost) - 1)]
            forward_seconds = min(forward_seconds, 4 * self._pace * expected)
            self._pace += 0.05 * (forward_seconds / expected - self._pace)
            self._beside_drafted += 0.1 * (other_seconds - self._beside_drafted)
            self._tokens = self._tokens * _KEEP + emitted
            self._seconds = self._seconds * _KEEP + forward_seconds + other_seconds
            self._since_plain += 1
        else:
            known = self._pace if self._plain_pace is None else self._plain_pace
            ratio = min(forward_seconds / self._cost[1], 4 * known)
            self._plain_pace = known + 0.2 * (ratio - known)
            self._beside_plain += 0.1 * (other_seconds - self._beside_plain)
            self._since_plain = 0

    def _chances(self) -> FloatArray:
        """Return how likely a node of each bin is accepted, float64[12]."""
        ratio = (self._accepted.sum() + _PRIOR_PROMISED * _PRIOR_RATIO) / (self._promised.sum() + _PRIOR_PROMISED)
        scores = np.where(self._seen > 0, self._promised / np.maximum(self._seen, 1e-9), _USUAL_SCORES)
        chances: FloatArray = (self._accepted + _BIN_NODES * np.minimum(ratio * scores, 1)) / (self._seen + _BIN_NODES)
        return chances

    def _plain_seconds(self) -> float:
        pace = self._pace if self._plain_pace is None else self._plain_pace
        return float(pace * self._cost[1] + self._beside_plain)

    def _give_up_for_now(self) -> None:
        """Rest, and let what spoke against drafting fade: without drafts it would be believed for ever."""
        self._begin_rest()
        self._seen, self._promised, self._accepted = (
            _FADE * evidence for evidence in (self._seen, self._promised, self._accepted)
        )
        self._beside_drafted *= _FADE

    def _begin_rest(self) -> None:
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        self._tokens = self._seconds = 0.0
        self._worthless = 0

    def _consider_resting(self) -> None:
        if self._seconds / self._tokens > 1.02 * self._plain_seconds():  # within noise, drafting stays
            self._begin_rest()
        else:
            self._next_rest = _SHORTEST_REST


def _guessed_scores(parents: IntArray) -> FloatArray:
    """Return scores for a draft whose drafter gave none: a typical guess's rate, to the power of the depth."""
    return np.power(np.float32(0.6), depths(parents)).astype(np.float32)


def _score_bin(score: FloatArray) -> IntArray:
    """Return the bin of each score, int32[N]."""
    halvings = -np.log2(np.maximum(score, np.float32(1e-6)))
    return np.clip(np.floor(halvings), 0, _SCORE_BINS - 1).astype(np.int32)
