"""Marks, such as `<tool_call>` or a stop string, and the texts between them, in answers and in llguidance's grammars.

Finds the first mark of a text that comes in pieces; writes the expressions of literal texts that may hold special
tokens, of free text up to a mark, and of JSON by a schema. Does not know what a mark means.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

WHITE = {"whitespace_pattern": " "}
"""One space at most between the tokens of JSON. With any white space, weak models write it until the limit; with none,
they close arrays and strings early, because the tokens that they prefer begin with a space."""


def first_mark(text: str, marks: Sequence[str], *, last: bool = False) -> tuple[int, str | None]:
    """Return how much of a text precedes its first mark, and the mark: the longest of those at its place.

    Without a mark, or while a longer one may have begun, it is what precedes any beginning of a mark, and None. `last`
    says that no more text comes.
    """
    place, _, mark = min(
        ((text.find(each), -len(each), each) for each in marks if each in text), default=(len(text), 0, None)
    )
    if not last:
        longest = max(map(len, marks), default=0)
        for at in range(max(len(text) - longest + 1, 0), min(place + 1, len(text))):
            if any(len(each) > len(text) - at and each.startswith(text[at:]) for each in marks):
                return at, None
    return place, mark


class Notation:
    """Makes expressions, and keeps the `rules` that they name. `specials` are the ids of the special tokens."""

    def __init__(self, specials: Mapping[str, int]) -> None:
        self.rules = ["TEXT: /(.|\\n)*/"]
        self._specials = specials
        self._any = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"\b\B")

    def text(self, text: str) -> str:
        """Return the expression for a text; the special tokens in it are themselves, and not their letters."""
        parts, at = [], 0
        for found in self._any.finditer(text):
            parts += [json.dumps(text[at : found.start()]), f"<[{self._specials[found[0]]}]>"]
            at = found.end()
        parts.append(json.dumps(text[at:]))
        return " ".join(part for part in parts if part != '""')

    def until(self, mark: str) -> str:
        """Return the expression for any text up to the first such mark, and the mark."""
        end, name = self.text(mark), f"until-{len(self.rules)}"
        self.rules.append(f"{name}: TEXT {end}" if end.startswith("<") else f"{name}[lazy]: TEXT {end}")
        return name

    def json(self, schema: Any, root: Mapping[str, Any] | None = None) -> str:
        """Return the expression for JSON of a schema, which may refer to definitions of another, its root."""
        kept = {name: root[name] for name in ("$defs", "definitions") if root is not None and name in root}
        return f"%json {json.dumps({**schema, **kept, 'x-guidance': WHITE} if isinstance(schema, Mapping) else schema)}"

    def separated(self, rules: Mapping[str, str], required: Sequence[str], separator: str) -> str:
        """Return the expression for values in order, of which those that are not required may be missing."""
        then = self.text(separator)
        needed = [rule for key, rule in rules.items() if key in required]
        others = [rule for key, rule in rules.items() if key not in required]
        optional = [f"({then} {rule})?" for rule in others]
        if needed:
            return " ".join([f" {then} ".join(needed), *optional])
        starts = [" ".join([rule, *optional[number + 1 :]]) for number, rule in enumerate(others)]
        return f"({' | '.join(starts)})?" if starts else ""
