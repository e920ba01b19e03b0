"""How far a text repeats itself: each token against what followed the two before it when they last occurred.

Knows token ids, at about half a microsecond each; not what is made of the answer.
"""

from collections.abc import Sequence

from foredraft.contracts import TokenIds

_MOST_READ = 8192
"""Tokens of the prompt's end that are read."""
_MOST_WATCHED, _MOST_PROMISED = 256, 8.0
"""Tokens: beyond them half of what was seen is forgotten, as texts change."""
_RATES = tuple((run + 2) / (run + 6) for run in range(64))
"""How often the next token, too, is what it was: behind n tokens in common about n / (n + 4), and n is `run` + 2."""


class Repetition:
    """Watches a text as it grows.

    Args:
        prompt: int64[n], token ids before the first one that is watched; None where there are none.

    Attributes:
        run: tokens in a row, up to the last one, that followed the same two tokens when these last occurred.
        occurred: whether the last two tokens have occurred before, with something behind them.
        watched: tokens, those long ago forgotten by and by.
        promised: how many of them were to repeat what followed, by the usual rates.
        kept: how many did.
    """

    def __init__(self, prompt: TokenIds | None = None) -> None:
        self._followed: dict[tuple[int, int], int] = {}
        self._pair = (-1, -1)
        self.run = self.watched = 0
        self.promised = self.kept = 0.0
        self.occurred = False
        if prompt is not None:
            self.read(prompt[-_MOST_READ:].tolist())
            self.run = self.watched = 0
            self.promised = self.kept = 0.0

    def read(self, tokens: Sequence[int]) -> int:
        """Go on to the end of `tokens`; return `run`."""
        followed, pair, run = self._followed, self._pair, self.run
        for token in tokens:
            known = followed.get(pair)
            if known is not None:
                self.promised += usual_rate(run)
                if known == token:
                    self.kept += 1.0
                    run += 1
                else:
                    run = 0
            else:
                run = 0
            followed[pair] = token
            pair = (pair[1], token)
        self._pair, self.run, self.occurred = pair, run, pair in followed
        self.watched += len(tokens)
        if self.promised > _MOST_PROMISED or self.watched > _MOST_WATCHED:
            self.watched, self.promised, self.kept = self.watched // 2, self.promised / 2, self.kept / 2
        return run


def usual_rate(run: int) -> float:
    """Return how often a token is what it was before, where `run` in a row have been."""
    return _RATES[run] if run < len(_RATES) else 1.0
