"""Finds marks, such as `<tool_call>` or a stop string, in a text that comes in pieces.

Does not know what a mark means.
"""

from collections.abc import Sequence


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
