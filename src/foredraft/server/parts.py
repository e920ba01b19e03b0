"""Splits the text of an answer, as it comes, into thoughts, what is said, and tool calls.

The pieces in which the text comes do not matter. Does not know in which format the parts are sent.
"""

import uuid
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from foredraft.server.calls import Schemas
from foredraft.server.dialects import Dialect
from foredraft.server.notation import first_mark

Piece = tuple[str, str | None]  # a text, and the name of the source that drafted it, or None
Kind = Literal["text", "thought", "call"]
_MOST_CALLS = 128  # of an answer, as in OpenAI's API


@dataclass(slots=True, eq=False)
class Call:
    """A tool call."""

    name: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:9])  # as Mistral's templates want it


class Part(NamedTuple):
    """A part of an answer, or the next pieces of it: a thought, a text, or the arguments of a call, in JSON."""

    kind: Kind
    pieces: list[Piece]
    call: Call | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    def continues(self, other: "Part") -> bool:
        """Return whether it is of the same thought, text or call as the part before it."""
        return self.kind == other.kind and self.call is other.call


class Splitter:
    """Splits a text of a dialect. `schemas` are those of the tools if calls are looked for, and else None.

    The text begins within a thought if it is `thinking`. White space beside marks is left out, if there are any.
    """

    def __init__(
        self, dialect: Dialect, schemas: Schemas | None, *, thinking: bool = False, parallel: bool = True
    ) -> None:
        self.thinking, self._schemas, self._most = thinking, schemas or {}, _MOST_CALLS if parallel else 1
        self._thoughts, self._calls = dialect.thoughts, dialect.calls if schemas is not None else None
        self._dialect, self._outside = dialect, dialect.marks(called=schemas is not None)
        self._held: list[Piece] = []  # not split yet
        self._text = ""  # of these
        self._mark: str | None = None  # of the call that is being read; "" if it has none
        self._in_list = False  # whether a call has ended in a list
        self._call: Call | None = None  # that is being read, once its name is known
        self._sent = 0  # characters of its arguments
        self._count = 0  # calls so far
        self._begins, self._after_mark = True, thinking  # nothing was said yet; only white space since a mark
        self._white: list[Piece] = []  # held back, as a mark may follow

    def push(self, pieces: list[Piece], *, last: bool = False) -> list[Part]:
        """Add pieces and return the parts that can be sent; `last` says that no more come."""
        self._held += pieces
        self._text += "".join(text for text, _ in pieces)
        found: list[Part] = []
        while self._held or (last and self._mark is not None):
            if self._in_list:
                goes_on = self._read_separator()
            else:
                goes_on = self._read_text(found, last) if self._mark is None else self._read_call(found, last)
            if not goes_on:
                break
        if last and self._white and not self.thinking:
            found.append(Part("text", self._white))
        return found

    def _read_text(self, found: list[Part], last: bool) -> bool:
        """Take what precedes the next mark, and the mark; return whether there was one."""
        text = self._text
        if self._calls and self._begins and not self.thinking and text.strip()[:1] == self._calls.bare != "":
            self._begins, self._mark = False, ""
            return True
        closes = [self._thoughts.close] if self._thoughts else []
        passed, mark = first_mark(text, closes if self.thinking else self._outside, last=last)
        self._say(self._take(passed), found)
        if mark is None:
            return False
        self._take(len(mark))
        if self._calls and mark in self._calls.opens:
            self._mark = mark
            return True
        if self._thoughts and mark in (self._thoughts.open, self._thoughts.close):
            self.thinking = mark == self._thoughts.open
        self._white, self._after_mark = [], True
        return True

    def _read_call(self, found: list[Part], last: bool) -> bool:
        """Take what is known of a call; return whether it has ended, or is none."""
        assert self._calls is not None, "only calls have marks"
        reading = self._calls.style.read(self._text, self._schemas, last=last)
        if reading is None:  # what looked like a call is said, and so is what would have ended it
            if self._mark:
                self._say([(self._mark, None)], found)
            self._outside = [*self._calls.opens, *self._dialect.marks(called=False)]
            self._mark = None
            return True
        if reading.name:
            is_new = self._call is None
            if self._call is None:
                self._call, self._sent, self._count, self._white = Call(reading.name), 0, self._count + 1, []
            if (is_new or reading.arguments[self._sent :]) and self._count <= self._most:
                found.append(Part("call", [(reading.arguments[self._sent :], None)], self._call))
            self._sent = len(reading.arguments)
        if reading.end < 0:
            return False
        self._take(reading.end)
        self._call, self._mark, self._after_mark = None, None, True
        self._in_list, self._begins = self._calls.listed, False
        return True

    def _read_separator(self) -> bool:
        """Take what follows a call in a list; return whether it is there."""
        text = self._text.lstrip()
        if not text:
            return False
        self._in_list = False
        if text[0] in ",;]":
            self._mark = None if text[0] == "]" else ""
            self._take(len(self._text) - len(text) + 1)
        return True

    def _take(self, length: int) -> list[Piece]:
        """Remove so many characters of what is held, and return them."""
        taken, self._held = split(self._held, length)
        self._text = self._text[length:]
        return taken

    def _say(self, pieces: list[Piece], found: list[Part]) -> None:
        """Add pieces to the thought or the text, but for white space beside marks."""
        text = "".join(piece for piece, _ in pieces)
        if self._after_mark:
            _, pieces = split(pieces, len(text) - len(text.lstrip()))
            text = text.lstrip()
        if not text:
            return
        kind: Kind = "thought" if self.thinking else "text"
        self._after_mark = False
        said, self._white = [*self._white, *pieces], []
        if self._outside:
            whole = "".join(piece for piece, _ in said)
            said, self._white = split(said, len(whole.rstrip()))
        if said:
            found.append(Part(kind, said))
            self._begins = self._begins and self.thinking


def split(pieces: list[Piece], at: int) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces of the first `at` characters, and the others."""
    before: list[Piece] = []
    after: list[Piece] = []
    for text, source in pieces:
        for part, side in ((text[:at], before), (text[at:], after)):
            if part:
                side.append((part, source))
        at = max(at - len(text), 0)
    return before, after
