"""Incremental decoding: token ids to text in whole characters, and stop strings that may span tokens.

Uses a tokenizer's `decode`. Does not depend on models or drafts.
"""

from collections.abc import Callable, Sequence
from typing import Any

_INCOMPLETE = "\ufffd"


class TextStream:
    """Turns ids into pieces of text, one id at a time; the joined pieces are the text of all ids.

    A piece is held back until its bytes form whole characters. The last few ids are decoded together with the ids
    before them, because a token's text can depend on its predecessor (leading spaces, combining marks).

    Args:
        tokenizer: with `decode(ids, skip_special_tokens=...)`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode: Callable[[Sequence[int]], str] = lambda ids: decode(tokenizer, ids)
        self._ids: list[int] = []
        self._shown_from = 0
        self._read = 0

    def push(self, token: int) -> str:
        """Add an id and return the text that it completes, which may be empty."""
        self._ids.append(token)
        before = self._decode(self._ids[self._shown_from : self._read])
        after = self._decode(self._ids[self._shown_from :])
        if after.endswith(_INCOMPLETE) or len(after) <= len(before):
            return ""
        self._shown_from, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        """Return the text held back, with replacement characters for incomplete bytes."""
        before = self._decode(self._ids[self._shown_from : self._read])
        after = self._decode(self._ids[self._shown_from :])
        self._shown_from = self._read = len(self._ids)
        return after[len(before) :]


class StopStrings:
    """Detects the token that completes a stop string.

    Args:
        tokenizer: with `decode`.
        strings: stop strings, none of them empty.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer)
        self._strings = tuple(strings)
        self._longest = max(len(string) for string in strings)
        self._tail = ""

    def __call__(self, token: int) -> bool:
        """Add the next token; True if it completes a stop string."""
        piece = self._stream.push(token)
        window = self._tail + piece
        found = any(string in window for string in self._strings)
        self._tail = window[-(self._longest - 1) :] if self._longest > 1 else ""
        return found


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of `ids` without special tokens; ids outside the tokenizer's vocabulary decode to nothing."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
