"""Neighbours taken together up to a size: parts into shards, texts into batches, segments into larger ones.

Knows sizes. Does not know what is grouped.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def grouped(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Yield neighbours together as long as their sizes add up to at most `most`; a larger one comes alone."""
    group: list[Item] = []
    total = 0
    for item in items:
        if group and total + size(item) > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group
