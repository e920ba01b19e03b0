"""The measured control: as many nodes as the measured cost of verifying them repays.

Does not know the drafter or the model; sees drafts with scores, verdicts, and seconds.
"""

from dataclasses import dataclass

import numpy as np

from foredraft.contracts import NO_BUDGET, Budget, CostCurve, Draft, TokenIds, Verdict
from foredraft.control.beside import Beside
from foredraft.control.cutting import cut
from foredraft.control.evidence import USUAL_SCORE, best_count, credit, empty_evidence, guessed_scores
from foredraft.control.quick import QuickControl
from foredraft.control.repetition import Repetition

MOST_NODES = 64
"""The largest draft that a measured budget asks for."""

_KEEP = 0.98  # what a step's evidence is worth one drafted step later
_ENOUGH_TOKENS = 20.0  # of recent steps in which the drafter was asked, before they are compared with plain ones
_ENOUGH_TOKENS_AGAIN = 10.0  # the same after a rest, until drafting has paid
_FADE = 0.8  # what is left of the evidence against drafting after a rest
_REFERENCE_EVERY, _FIRST_REFERENCE = 64, 4  # drafted steps between plain ones taken for reference, and before the first
_FEWEST_WORTHLESS, _MOST_WORTHLESS = 2, 8  # drafts in a row without a node worth verifying, before drafting rests
_MOST_WORTHLESS_AGAIN = 1  # the same after a rest, until drafting has paid
_ENOUGH_ASKED = 4  # steps in which the drafter was asked, before a text speaks against drafting in those after it
_SHORTEST_REST, _LONGEST_REST = 8, 64  # plain steps before drafting is tried again
_MOST_FIRST_REST = 3  # doublings of the shortest rest with which a text begins
_TRYING = 0.005  # of the time of plain steps, what trying in vain may take once rests are as long as they double to
_MOST_REST = 256  # plain steps, however long that makes a rest
_READ_EVERY, _TIMED_EVERY = 4, 16  # steps of a rest
_REPEATED_TOKENS, _COPIED_TOKENS = 4, 8  # in a row end a rest: these where quick drafts copy them meanwhile
_FEWEST_ASKED = 4  # nodes asked for at least: fewer would hardly be drafted quicker
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
    pass. Drafted steps come in runs, the first of which takes longer; behind a plain step, its share of that is added.
    A plain step now and then shows what plain steps cost today. As drafting more takes longer, about twice as many
    nodes are asked for as were worth it of late, and more again once all of them were. When steps in which the drafter
    was asked have been giving fewer tokens per second, those included whose draft was worth no node, or draft after
    draft is worth none, steps are plain, and drafting is tried again at growing intervals, so that trying costs little.
    Until drafting has paid again, less is enough to rest once more: one worthless draft, or half the tokens. A text
    behind one in which drafting did not pay begins with a rest, and the more such texts, the longer. The longest rests
    follow what trying took, the first reading of a long prompt included, and go on in the text behind. A text that
    begins to repeat itself, or its prompt, ends a rest.

    A drafter that answers quick budgets is given them in rests, see `foredraft.control.quick`. What they save of plain
    steps is what asking the drafter in earnest has to beat.

    Args:
        curve: the target's cost by rows.
        most_nodes: never ask for more.
        beside: what earlier sequences told; kept up to date. None begins with nothing known.
        prompt: int64[n], token ids; None where they are not known.
        quick: whether the drafter answers quick budgets.
    """

    def __init__(
        self,
        curve: CostCurve,
        most_nodes: int = MOST_NODES,
        beside: Beside | None = None,
        prompt: TokenIds | None = None,
        *,
        quick: bool = False,
    ) -> None:
        self._cost = curve.table(most_nodes + 1)
        self._plain_pass = float(self._cost[1])
        self._most_nodes = most_nodes
        self._evidence = empty_evidence()
        typical = (USUAL_SCORE / np.arange(1, most_nodes + 1)).astype(np.float32)
        usual = best_count(typical, self._evidence, self._cost, 1.0, 0.0, self._plain_pass, most_nodes)
        self._worth = float(usual)  # nodes worth verifying, smoothed
        self._since_plain = _REFERENCE_EVERY - _FIRST_REFERENCE
        self._worthless = 0  # drafts in a row of which no node was worth verifying
        self._beside = Beside() if beside is None else beside
        self._repetition = Repetition(prompt)
        self._quick = QuickControl(self._cost, most_nodes, self._beside, self._repetition) if quick else None
        self._enough_repeated = _COPIED_TOKENS if quick else _REPEATED_TOKENS
        self._wakes_at = self._enough_repeated  # repeated tokens in a row
        self._unread: tuple[int, ...] = ()  # tokens of a rest
        self._asks = False  # whether the drafter was asked in this step
        self._times_asked = 0  # in this text
        self._tokens = self._seconds = 0.0  # of recent steps in which it was
        self._runs = False  # whether the last step was drafted
        first_rest = _SHORTEST_REST << min(self._beside.unpaid, _MOST_FIRST_REST) if self._beside.unpaid else 0
        self._rest = self._beside.rest = self._beside.rest or first_rest
        self._next_rest = min(max(_SHORTEST_REST, 2 * first_rest), _LONGEST_REST)
        self._is_judged = False  # whether drafting was found to pay in this text, or not to

    def budget(self, depth: int) -> Budget:
        """Return the largest draft worth proposing; none while drafting rests."""
        self._asks = depth > 0 and self._rest == 0 and self._since_plain < _REFERENCE_EVERY
        if not self._asks:
            copies = self._rest > 0 and not self._unread and self._repetition.occurred
            return self._quick.budget(depth) if copies and self._quick is not None else NO_BUDGET
        self._times_asked += 1
        return Budget(min(self._most_nodes, max(_FEWEST_ASKED, int(2 * self._worth))), depth)

    def trim(self, draft: Draft, budget: Budget) -> Draft:
        """Cut a draft to the number of nodes with the best expected tokens per second."""
        if len(draft) == 0 or budget.quick:
            return draft
        if draft.q is not None:  # drawn: scores, and even how many were drawn, may tell what; only the budget may cut
            return cut(draft, budget)
        score = draft.score if draft.score is not None else guessed_scores(draft.parents)
        beside = self._beside
        begins = 0.0 if self._runs else beside.cold * (1.0 - beside.goes_on)
        seconds = (beside.drafted_pace, beside.drafted + begins, self._plain_seconds())
        best = best_count(score, self._evidence, self._cost, *seconds, budget.depth)
        self._worth = min(2.0 * best, self._most_nodes) if best >= budget.nodes else 0.9 * self._worth + 0.1 * best
        self._worthless = self._worthless + 1 if best == 0 else 0
        return cut(draft, Budget(min(best, budget.nodes), budget.depth), score)

    def observe(
        self,
        verdict: Verdict,
        forward_seconds: float,
        other_seconds: float,
        draft_seconds: float = 0.0,
    ) -> None:
        """Compare what the step gave with what its scores promised, and its time with what the curve says."""
        if self._rest > 0 and not self._asks:
            self._go_on_resting(verdict, forward_seconds, other_seconds)
            return
        drafted = len(verdict.draft)
        self._observe_time(drafted, len(verdict.tokens), forward_seconds, other_seconds, draft_seconds)
        if drafted:
            score = verdict.draft.score
            score = score if score is not None else guessed_scores(verdict.draft.parents)
            credit(self._evidence, score, np.array(verdict.path, np.int32))
        enough = _ENOUGH_TOKENS_AGAIN if self._has_rested else _ENOUGH_TOKENS
        if self._worthless and self._worthless >= self._patience():
            self._give_up_for_now()
        elif self._asks and self._tokens > enough:
            self._consider_resting()
        if self._repeats(verdict.tokens) and self._rest > 0:
            self._wake()

    def _observe_time(
        self, drafted: int, emitted: int, forward_seconds: float, other_seconds: float, draft_seconds: float
    ) -> None:
        if not (0 < forward_seconds < np.inf and 0 <= other_seconds < np.inf):  # a clock may jump
            return
        # a pass that stalled, or a step that compiled something, says little about the next
        other_seconds = min(other_seconds, _MOST_BESIDE * self._plain_pass)
        if drafted:
            self._since_plain += 1
            expected = float(self._cost[min(drafted + 1, len(self._cost) - 1)])
            forward_seconds = self._beside.see_drafted(expected, forward_seconds, other_seconds, runs=self._runs)
        else:
            forward_seconds = self._observe_plain(forward_seconds, other_seconds, draft_seconds)
        if self._runs and (self._asks or self._rest > 0):  # a plain step for reference interrupts a run, but ends none
            self._beside.goes_on += 0.05 * ((drafted > 0) - self._beside.goes_on)
        self._runs = drafted > 0
        if self._asks:  # also where no node was worth verifying: asking takes time
            self._tokens = self._tokens * _KEEP + emitted
            self._seconds = self._seconds * _KEEP + forward_seconds + other_seconds

    def _observe_plain(self, forward_seconds: float, other_seconds: float, draft_seconds: float) -> float:
        """Learn from the time of a plain step; return its pass's, without what it stalled."""
        beside = self._beside
        # a draft of which no node was worth verifying is no part of a plain step
        plain_seconds = max(other_seconds - draft_seconds, 0.0)
        forward_seconds = beside.see_plain(self._plain_pass, forward_seconds, plain_seconds, runs=self._runs)
        self._since_plain = 0 if beside.knows_plain else _REFERENCE_EVERY - _FIRST_REFERENCE
        if self._asks:
            beside.see_in_vain(self._plain_pass, other_seconds)
        return forward_seconds

    def _go_on_resting(self, verdict: Verdict, forward_seconds: float, other_seconds: float) -> None:
        """Read on, at each step only where that tells much; in few lines, as each takes time where nothing pays."""
        self._rest -= 1
        if self._beside.rest > 0:
            self._beside.rest = self._rest
        self._unread += verdict.tokens
        if self._rest % _READ_EVERY == 0 or self._runs or (self._quick is not None and self._quick.looks):
            self._look_out(verdict, forward_seconds, other_seconds)

    def _look_out(self, verdict: Verdict, forward_seconds: float, other_seconds: float) -> None:
        """Read on, and end the rest where the text repeats itself; take the time of a step now and then."""
        wakes, timed = self._repeats(self._unread), self._rest % _TIMED_EVERY == 0
        self._unread = ()
        if self._quick is not None:
            self._quick.observe(verdict, forward_seconds + other_seconds, _TIMED_EVERY * timed)
        if wakes:
            self._wake()
        elif (timed or self._runs) and not len(verdict.draft):
            self._observe_time(0, 1, forward_seconds, other_seconds, 0.0)

    def _repeats(self, tokens: tuple[int, ...]) -> bool:
        """Read on, and say whether the text has been repeating itself for long enough to end a rest."""
        run = self._repetition.read(tokens)
        if run < len(tokens):  # a text that repeats itself again ends a rest as soon as one that never did
            self._wakes_at = self._enough_repeated
        return run >= self._wakes_at

    def _wake(self) -> None:
        """End a rest where the text repeats itself, and in vain only ever more rarely while it goes on repeating."""
        self._rest = self._beside.rest = 0
        self._wakes_at = 2 * self._repetition.run

    @property
    def _has_rested(self) -> bool:
        """Whether drafting rested since it last paid."""
        return self._next_rest > _SHORTEST_REST

    def _plain_seconds(self) -> float:
        return self._beside.plain_seconds(self._plain_pass)

    def _patience(self) -> int:
        """Return how many worthless drafts in a row end in a rest: one more for each plain step saved of late."""
        if self._has_rested:
            return _MOST_WORTHLESS_AGAIN
        saved = self._tokens - self._seconds / self._plain_seconds()
        return int(min(max(_FEWEST_WORTHLESS + saved, _FEWEST_WORTHLESS), _MOST_WORTHLESS))

    def _give_up_for_now(self) -> None:
        """Rest, and let what spoke against drafting fade: without drafts it would be believed for ever."""
        self._begin_rest()
        for each in self._evidence:
            np.multiply(each, _FADE, out=each)

    def _begin_rest(self) -> None:
        if self._times_asked >= _ENOUGH_ASKED or self._beside.unpaid:
            self._beside.unpaid += not self._is_judged
            self._is_judged = True
        self._rest = self._next_rest
        if self._next_rest == _LONGEST_REST:
            lost = self._seconds / self._plain_seconds() - self._tokens  # plain steps
            self._rest = int(min(max(lost / _TRYING, _LONGEST_REST), _MOST_REST))
            self._beside.rest = self._rest if self._rest > _LONGEST_REST and self._beside.unpaid else 0
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        self._tokens = self._seconds = 0.0
        self._worthless = 0

    def _consider_resting(self) -> None:
        rested = self._plain_seconds() * (1.0 - max(self._beside.saves, 0.0))  # a token of a rest
        if self._seconds / self._tokens > 1.02 * rested:  # within noise, drafting stays
            self._begin_rest()
        else:
            self._beside.unpaid = 0
            self._is_judged = True
            self._next_rest = _SHORTEST_REST
