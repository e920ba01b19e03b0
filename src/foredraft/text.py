"""From ids to text as it grows: pieces that are whole characters, and stop strings that may span tokens.

Knows a tokenizer's `decode`; does not know models, drafts, or how the ids came about.
"""

from collections.abc import Callable, Sequence
from typing import Any

_INCOMPLETE = "\ufffd"


class TextStream:
    """Turns ids into text pieces one at a time.

    A piece is held back while its bytes do not make whole characters; the pieces joined are the text of all ids. The
    last few ids are decoded together with their predecessors, because a token's text may depend on what stands before
    it (leading spaces, merged marks).

    Args:
        tokenizer: with `decode(ids, skip_special_tokens=...)`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode: Callable[[Sequence[int]], str] = lambda ids: decode(tokenizer, ids)
        self._ids: list[int] = []
        self._shown_from = 0
        self._read = 0

    def push(self, token: int) -> str:
        """Add an id and return the text that it completes, perhaps none."""
        self._ids.append(token)
        before = self._decode(self._ids[self._shown_from : self._read])
        after = self._decode(self._ids[self._shown_from :])
        if after.endswith(_INCOMPLETE) or len(after) <= len(before):
            return ""
        self._shown_from, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        """Return what was held back, with replacement characters where bytes are missing."""
        before = self._decode(self._ids[self._shown_from : self._read])
        after = self._decode(self._ids[self._shown_from :])
        self._shown_from = self._read = len(self._ids)
        return after[len(before) :]


class StopStrings:
    """Says after which token the text holds one of some strings.

    Args:
        tokenizer: decodes.
        strings: none of them empty.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer)
        self._strings = tuple(strings)
        self._longest = max(len(string) for string in strings)
        self._tail = ""

    def __call__(self, token: int) -> bool:
        """Take the next token; True when the text so far holds a stop string that it did not hold before."""
        piece = self._stream.push(token)
        window = self._tail + piece
        found = any(string in window for string in self._strings)
        self._tail = window[-(self._longest - 1) :] if self._longest > 1 else ""
        return found


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of `ids` without special tokens; ids beyond the tokenizer's vocabulary have no text."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
