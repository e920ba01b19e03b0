"""Incremental decoding: token ids to text in whole characters, and stop strings that may span tokens.

Does not depend on models or drafts.
"""

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"
_CONTEXT = 4  # ids of a prompt that are decoded with what follows; more where they begin within a character


class TextStream:
    """Turns the ids after a prompt into pieces of text, one id at a time; the joined pieces continue its text.

    A piece is held back until its bytes form whole characters. The last few ids are decoded together with the ids
    before them, because a token's text can depend on its predecessor (leading spaces, combining marks). Special tokens
    are left out unless they are `special`.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), *, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._ids = _context(tokenizer, prompt)
        self._read = len(self._ids)  # how many ids have given their text
        # where decoding begins now, and after the next piece: a prompt may end within a character, which no text begins
        self._shown_from = self._next_from = 0
        self.held = ""  # whole characters that are held back, as they precede incomplete ones

    def push(self, token: int) -> str:
        """Add an id and return the text that it completes, which may be empty."""
        self._ids.append(token)
        text = self._unread()
        is_incomplete = text.endswith(_INCOMPLETE)
        self.held = text.rstrip(_INCOMPLETE) if is_incomplete else ""
        if not text or is_incomplete:
            return ""
        self._shown_from, self._next_from, self._read = self._next_from, len(self._ids), len(self._ids)
        return text

    def finish(self) -> str:
        """Return the text held back, with replacement characters for incomplete bytes; to be called last."""
        return self._unread()

    def _unread(self) -> str:
        known = self._read - self._shown_from
        return _addition(self._tokenizer, self._ids[self._shown_from :], known, special=self._special)


class StopStrings:
    """Detects the token after a prompt that completes one of the stop strings, none of which is empty.

    If one contains a special token, they all are looked for in the text with special tokens.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], prompt: Sequence[int] = ()) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = any(each.special and each.content in string for each in added for string in strings)
        self._stream, self._strings, self._tail = TextStream(tokenizer, prompt, special=special), tuple(strings), ""
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


def continuation(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of `ids` after a prompt, without special tokens: what `TextStream` joins."""
    context = _context(tokenizer, prompt)
    return _addition(tokenizer, [*context, *ids], len(context))


def _addition(tokenizer: Any, ids: Sequence[int], known: int, *, special: bool = False) -> str:
    """Return what the text of `ids` has more than that of the first `known` of them, whose last character may grow."""
    before, text = (decode(tokenizer, part, special=special) for part in (ids[:known], ids))
    if not text.startswith(before):
        before = before.rstrip(_INCOMPLETE)
    return text[len(before) :]


def _context(tokenizer: Any, prompt: Sequence[int]) -> list[int]:
    """Return the last ids of a prompt, on which the text of the next ones can depend.

    A text begins anew after a special token: tokenizers that put a space before a text put it there too, and their
    decoders take it away.
    """
    count = _CONTEXT
    while True:
        tail = list(prompt[-count:])
        for at, token in reversed(list(enumerate(tail))):
            if not decode(tokenizer, [token]) and decode(tokenizer, [token], special=True):
                return tail[at + 1 :]
        if count >= len(prompt) or decode(tokenizer, tail).strip(_INCOMPLETE):
            return tail
        count *= 2
