"""Incremental decoding: token ids to text in whole characters, and stop strings that may span tokens.

Does not depend on models or drafts.
"""

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"


class TextStream:
    """Turns ids into pieces of text, one id at a time; the joined pieces are the text of all ids.

    A piece is held back until its bytes form whole characters. The last few ids are decoded together with the ids
    before them, because a token's text can depend on its predecessor (leading spaces, combining marks). Special tokens
    are left out unless they are `special`.
    """

    def __init__(self, tokenizer: Any, *, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._ids: list[int] = []
        self._shown_from = self._read = 0
        self.held = ""  # whole characters that are held back, as they precede incomplete ones

    def push(self, token: int) -> str:
        """Add an id and return the text that it completes, which may be empty."""
        self._ids.append(token)
        text = self._unread()
        is_incomplete = text.endswith(_INCOMPLETE)
        self.held = text.rstrip(_INCOMPLETE) if is_incomplete else ""
        if not text or is_incomplete:
            return ""
        self._shown_from, self._read = self._read, len(self._ids)
        return text

    def finish(self) -> str:
        """Return the text held back, with replacement characters for incomplete bytes; to be called last."""
        return self._unread()

    def _unread(self) -> str:
        before = decode(self._tokenizer, self._ids[self._shown_from : self._read], special=self._special)
        return decode(self._tokenizer, self._ids[self._shown_from :], special=self._special)[len(before) :]


class StopStrings:
    """Detects the token that completes one of the stop strings, none of which is empty.

    If one contains a special token, they all are looked for in the text with special tokens.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = any(each.special and each.content in string for each in added for string in strings)
        self._stream, self._strings, self._tail = TextStream(tokenizer, special=special), tuple(strings), ""
        self._longest = max(map(len, strings))

    def __call__(self, token: int) -> bool:
        """Add the next token; True if it completes a stop string."""
        window = self._tail + self._stream.push(token)
        self._tail = window[-(self._longest - 1) :] if self._longest > 1 else ""
        seen = window + self._stream.held
        return any(string in seen for string in self._strings)


def decode(tokenizer: Any, ids: Sequence[int], *, special: bool = False) -> str:
    """Return the text of `ids`, with or without special tokens; ids outside of the vocabulary decode to nothing."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    return text
