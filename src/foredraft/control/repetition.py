"""How long a text has been repeating itself: each token against what last followed the two before it.

Knows token ids, at well under a microsecond each; not what is made of the answer.
"""

from collections.abc import Sequence

from foredraft.contracts import TokenIds

_MOST_READ = 8192
"""Tokens of the prompt's end that are read."""


class Repetition:
    """Watches a text as it grows.

    Args:
        prompt: int64[n], token ids before the first one that is watched; None where there are none.

    Attributes:
        run: tokens in a row, up to the last one, that followed the same two tokens when these last occurred.
    """

    def __init__(self, prompt: TokenIds | None = None) -> None:
        self._followed: dict[tuple[int, int], int] = {}
        self._pair = (-1, -1)
        self.run = 0
        if prompt is not None:
            self.read(prompt[-_MOST_READ:].tolist())
            self.run = 0

    def read(self, tokens: Sequence[int]) -> int:
        """Go on to the end of `tokens`; return `run`."""
        followed, pair, run = self._followed, self._pair, self.run
        for token in tokens:
            run = run + 1 if followed.get(pair) == token else 0
            followed[pair] = token
            pair = (pair[1], token)
        self._pair, self.run = pair, run
        return run
