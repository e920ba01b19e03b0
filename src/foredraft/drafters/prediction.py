"""Drafts from an expected text, such as a file to be edited (OpenAI's `prediction`), added to another drafter's drafts.

After a deviation from the expected text, drafting resumes after the edit. The output is the target's in any case. Does
not depend on text or models.
"""

from bisect import bisect
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from foredraft.contracts import NO_BUDGET, Budget, Draft, DraftContext, Drafter, SequenceView, TokenIds, Verdict
from foredraft.control.payoff import cut, scores_of

PREDICTION = "prediction"
"""Name of the source."""

# chosen
_LONGEST = 64  # tokens of a chain; in larger passes each row costs as much as a pass of its own
_COMPARED = 16  # tokens before a place that are compared with the end of the text
# prior counts: tokens as expected, of tokens compared; with 19 of 20 a wrong text costs SmolLM2 6 % of the time, not 3
_AGREED, _ASKED = 3.8, 4.0
_EDITED = 4  # tokens after an edit in which its end is guessed, as long as no two tokens locate it
_AHEAD = 64  # expected tokens searched for a single token after an edit, and places of a pair around it compared
_LEAST = 0.01  # a chain is halved until its last token scores as much; at a rate of 0.5 it has 4 tokens
_SURE = 0.9  # first score above which a chain is drafted alone; the other drafter takes 3 % of a pass


class Chain(NamedTuple):
    """Possible next tokens, and the probability of each path up to a token."""

    tokens: Sequence[int]
    scores: Sequence[float]


ChainSource = Callable[[SequenceView], list[Chain]]
"""Returns possible continuations of a text, the most probable first."""


class Prediction:
    """An expected text, int64[m], and the current place in it."""

    def __init__(self, expected: TokenIds) -> None:
        self._expected: list[int] = expected.tolist()
        self._places: dict[tuple[int, int], list[int]] = {}  # after each pair of tokens
        for place in range(2, len(self._expected) + 1):
            pair = self._expected[place - 2], self._expected[place - 1]
            self._places.setdefault(pair, []).append(place)
        self._place = 0  # of the next token, -1 if unknown
        self._edit, self._since = 0, _EDITED  # place of the last edit, and tokens since
        self._read = -1
        self._agreed, self._asked = _AGREED, _ASKED

    def chains(self, view: SequenceView) -> list[Chain]:
        """Return one chain if the current place is known, some shorter ones in an edit, else none."""
        ids, first = view.ids, view.prompt_length if self._read < 0 else self._read
        for end in range(first + 1, len(ids) + 1):
            self._follow(ids[max(end - _COMPARED, view.prompt_length) : end])
        self._read = len(ids)
        rate = self._agreed / self._asked
        if self._place >= 0:
            return [self._chain(self._place, rate, rate, _LONGEST)]
        if self._since >= _EDITED:
            return []
        last = int(ids[-1])
        ahead = self._expected[self._edit : self._edit + _AHEAD]
        guesses = [(self._edit + self._since, 0.4), (self._edit, 0.2)]  # equally many tokens replaced; tokens inserted
        if last in ahead:
            guesses.insert(0, (self._edit + ahead.index(last) + 1, 0.4))  # tokens deleted
        return [self._chain(place, score * rate, rate, _EDITED) for place, score in guesses]

    def _chain(self, place: int, score: float, rate: float, longest: int) -> Chain:
        while longest > 1 and score * rate ** (longest - 1) < _LEAST:
            longest //= 2
        tokens = self._expected[place : place + longest]
        return Chain(tokens, [score * rate**depth for depth in range(len(tokens))])

    def _follow(self, recent: TokenIds) -> None:
        """Update the place by the last token of `recent`, the end of the text."""
        token = int(recent[-1])
        if self._place >= 0:
            came = self._place < len(self._expected) and self._expected[self._place] == token
            self._asked, self._agreed = self._asked + 1, self._agreed + came
            if came:
                self._place += 1
                return
            self._edit, self._since = self._place, 0
        self._since += 1
        places = self._places.get((int(recent[-2]), token), []) if len(recent) > 1 else []
        first = max(bisect(places, self._edit) - _AHEAD // 2, 0)
        near = places[first : first + _AHEAD]
        self._place = max(near, key=lambda at: (self._agreement(at, recent), -abs(at - self._edit)), default=-1)

    def _agreement(self, place: int, recent: TokenIds) -> int:
        """Return how many tokens before a place match the end of the text."""
        count = 0
        while count < min(len(recent), place) and self._expected[place - 1 - count] == recent[-1 - count]:
            count += 1
        return count


class ChainDrafter:
    """A drafter to whose drafts chains are added, and its drafting, for one sequence.

    `drafted` counts the verified nodes of chains.
    """

    name: ClassVar[str] = "chains"

    def __init__(self, drafter: Drafter, chains: ChainSource, source: str = PREDICTION) -> None:
        self.name = drafter.name  # type: ignore[misc]  # warnings about a failure must name the wrapped drafter
        self._drafter, self._chains = drafter, chains
        self.needs = drafter.needs
        self.source_names: Sequence[str] = (*drafter.source_names, source)
        self.drafted = 0

    def open(self, context: DraftContext) -> "ChainDrafter":
        self._drafting = self._drafter.open(context)
        return self

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Return the chains, and the other drafter's nodes unless the first chain is almost certain."""
        chains = self._chains(view) if budget.nodes > 0 and budget.depth > 0 else []
        sure = bool(chains) and len(chains[0].tokens) > _EDITED and chains[0].scores[0] > _SURE
        alone = sure and not self.needs.every_step
        draft = self._drafting.propose(view, NO_BUDGET if alone else budget)
        return cut(self._joined(draft, chains, budget.depth), budget) if chains else draft

    def observe(self, verdict: Verdict) -> None:
        """Count the chains' nodes, and pass the verdict to the other drafter."""
        if verdict.draft.source is not None:
            self.drafted += int((verdict.draft.source == len(self.source_names) - 1).sum())
        self._drafting.observe(verdict)

    def close(self) -> None:
        self._drafting.close()

    def _joined(self, draft: Draft, chains: list[Chain], depth: int) -> Draft:
        child_of, score, own = draft.child_of(), scores_of(draft).tolist(), len(self.source_names) - 1
        source = [0] * len(draft) if draft.source is None else draft.source.tolist()
        for chain in chains:
            node = -1
            for token, chance in zip(chain.tokens[:depth], chain.scores[:depth], strict=True):
                node = child_of.setdefault((node, token), len(score))
                if node == len(score):
                    score.append(chance)
                    source.append(own)
                score[node], source[node] = max(score[node], chance), own
        parents, tokens = np.array(list(child_of), np.int32).reshape(-1, 2).T.copy()  # in the order of the nodes
        return Draft(tokens, parents, np.array(score, np.float32), source=np.array(source, np.uint8))
