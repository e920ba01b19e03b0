"""What a corpus is cut into: shards of about equal size, each with a name that says what is made of it.

Knows the files' sizes and the Parquet files' row groups. Does not read text; the same files give the same shards on
every machine that has them in the same place.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tokenizers

from foredraft.corpus.documents import row_group_bytes
from foredraft.corpus.inputs import Part, input_kind, is_packed, whole_part
from foredraft.corpus.words import Words
from foredraft.errors import UsageError

SHARD_BYTES = 64 << 20
_RECIPE = 1
"""Raised whenever the same text would become other ids, so that nothing finished before is taken for finished."""


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """Which documents of a shard are taken, and what is done about broken ones.

    Attributes:
        hold_out: the share of documents held out, 0 to 1; which ones depends on their text alone.
        keep: what is taken: the rest, or the held-out documents.
        strict: stop at the first line, row or document that cannot be used, instead of counting it.

    Raises:
        UsageError: a share out of range.
    """

    hold_out: float = 0.0
    keep: Literal["rest", "held_out"] = "rest"
    strict: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.hold_out <= 1:
            raise UsageError(f"hold_out is {self.hold_out}; give the share of documents to hold out, 0 to 1.")


ALL_DOCUMENTS = ShardOptions()
"""Nothing is held out, and what is broken is counted."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Some of the inputs, in order: files, or ranges of them."""

    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """How many bytes of the inputs, as they lie on disk, the shard stands for."""
        return sum(part.bytes for part in self.parts)

    def identity(self, words: Words, options: ShardOptions) -> str:
        """Return 32 hex digits that are others whenever the shard's ids might be."""
        parts = [[str(part.path), part.file_bytes, part.mtime_ns, part.start, part.stop] for part in self.parts]
        described = json.dumps([_RECIPE, tokenizers.__version__, words.digest, asdict(options), parts])
        return hashlib.sha256(described.encode()).hexdigest()[:32]


def plan_shards(files: Iterable[Path], shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """Cut the files into shards, in order.

    Files of .jsonl are cut into ranges of bytes and .parquet into ranges of row groups; a file of any other kind lies
    in one shard, however large. Small files share a shard.

    Args:
        files: from `find_inputs`.
        shard_bytes: about how large a shard may be, in bytes on disk (.parquet: unpacked).

    Raises:
        UsageError: a file that cannot be read, or a size below 1.
    """
    if shard_bytes < 1:
        raise UsageError(f"shard_bytes is {shard_bytes}; give the size of a shard in bytes, at least 1.")
    shards: list[Shard] = []
    parts: list[Part] = []
    size = 0
    for part in (part for file in files for part in _parts(whole_part(file.absolute()), shard_bytes)):
        if parts and size + part.bytes > shard_bytes:
            shards.append(Shard(tuple(parts)))
            parts, size = [], 0
        parts.append(part)
        size += part.bytes
    return [*shards, Shard(tuple(parts))] if parts else shards


def _parts(whole: Part, shard_bytes: int) -> Iterator[Part]:
    """Cut a file into parts of about `shard_bytes`, where its kind allows that."""
    kind, size = input_kind(whole.path), whole.file_bytes
    if kind == ".jsonl" and not is_packed(whole.path):
        count = max(1, -(-size // shard_bytes))
        bounds, total = [size * i // count for i in range(count + 1)], size
    elif kind == ".parquet":
        bounds, total = _group_bounds(row_group_bytes(whole.path), shard_bytes)
    else:
        bounds, total = [0, size], size
    if len(bounds) <= 2:
        yield whole
        return
    for start, stop in itertools.pairwise(bounds):
        share = size * stop // total - size * start // total
        yield Part(whole.path, size, whole.mtime_ns, share, start, stop)


def _group_bounds(sizes: Sequence[int], limit: int) -> tuple[list[int], int]:
    """Return where ranges of items of at most `limit` together begin and end, and the number of items."""
    bounds, size = [0], 0
    for number, item in enumerate(sizes):
        if number > bounds[-1] and size + item > limit:
            bounds.append(number)
            size = 0
        size += item
    return [*bounds, len(sizes)], len(sizes)
