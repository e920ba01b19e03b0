"""A cell: one method on one prompt, beside plain decoding of the same prompt in the same process; and its file.

Knows records and JSON. A cell's place in a folder is its identity, so what exists need not be measured again, and a
run that was killed goes on where it was. Does not know how texts are written.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.atomic_file import write_file
from foredraft.bench.drafts import DraftCounts, Guesses
from foredraft.bench.environment import Environment
from foredraft.bench.metrics import repeated_share
from foredraft.errors import StoreError, UsageError

FORMAT = "foredraft bench cell"
VERSION = 2


@dataclass(frozen=True, slots=True)
class Writing:
    """One text, and what it took.

    Attributes:
        token_ids: emitted.
        prompt_tokens: of the prompt.
        steps: target forwards after prefill; for the peer all its forwards, of which the first reads the prompt too.
        drafting_steps: steps that drafted something.
        drafted: nodes verified.
        accepted: drafted tokens emitted.
        prefill_seconds: before the first step; 0 for the peer, which does not tell it apart.
        decode_seconds: in steps, without those stalled; the peer's are all its seconds.
        stalled_seconds: in passes that the machine held up, beyond what such a pass takes; 0 for the peer.
        total_seconds: by the clock, those stalled included.
        parts: seconds of draft, forward, verify, commit, other, without those stalled; empty for the peer.
    """

    token_ids: tuple[int, ...]
    prompt_tokens: int
    steps: int
    drafting_steps: int
    drafted: int
    accepted: int
    prefill_seconds: float
    decode_seconds: float
    total_seconds: float
    parts: Mapping[str, float]
    stalled_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """How many were emitted."""
        return len(self.token_ids)

    @property
    def repeated(self) -> float:
        """The share of repeated 8-grams."""
        return repeated_share(self.token_ids)


@dataclass(frozen=True, slots=True)
class Place:
    """What a cell is a measurement of; as a path, its identity.

    Attributes:
        model: as the user calls it.
        dtype: the weights'.
        settings: the generation arguments, as `settings_name` words them.
        task: the task, with its category where it has several: `spec_bench/qa`.
        method: the method's label.
        number: the prompt's place in its file.
        turn: which question of a conversation, from 1.
    """

    model: str
    dtype: str
    settings: str
    task: str
    method: str
    number: int
    turn: int = 1

    def path(self) -> Path:
        """Return the identity as a relative path."""
        named = [self.model, self.dtype, self.settings, self.task]
        folders = [_safe(part) for name in named for part in name.split("/") if part] + [_safe(self.method)]
        return Path(*folders, f"{self.number:05d}-{self.turn}.json")


@dataclass(frozen=True, slots=True)
class Cell:
    """One method on one prompt, and plain decoding on it in the same process.

    Attributes:
        place: the identity.
        settings: generation arguments, the seed among them.
        prompt_hash: of the questions, so that another prompt under the same number is noticed.
        environment: what it is true of.
        base: plain decoding.
        own: the method's; None where it failed.
        counts: what became of the drafts; None for the peer and for a failure.
        example: every step, in the first prompt of each task.
        learned_texts: how many texts a warm drafter had read before.
        failure: what it raised, as a sentence; empty where it did not.
    """

    place: Place
    settings: Mapping[str, Any]
    prompt_hash: str
    environment: Environment
    base: Writing | None
    own: Writing | None
    counts: DraftCounts | None = None
    example: tuple[Guesses, ...] = ()
    learned_texts: int = 0
    failure: str = ""

    @property
    def whole(self) -> tuple[Writing, Writing] | None:
        """Plain decoding and the method, where both were written."""
        return (self.base, self.own) if self.base is not None and self.own is not None else None

    def as_json(self) -> bytes:
        """Return the file's bytes: a line of JSON with its format, its version and a hash of its content."""
        body = json.dumps(dataclasses.asdict(self), sort_keys=True)
        digest = hashlib.sha256(body.encode()).hexdigest()
        return f'{{"format": "{FORMAT}", "version": {VERSION}, "sha256": "{digest}", "cell": {body}}}\n'.encode()


class CellFolder:
    """The cells under a folder.

    Args:
        folder: made if need be by `write`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check_writable(self) -> None:
        """Make the folder, and write and remove a file in it.

        Raises:
            UsageError: it cannot be written to.
        """
        trial = self.folder / "trial.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            trial.write_bytes(b"")
            trial.unlink()
        except OSError as error:
            raise UsageError(
                f"Results cannot be written to {self.folder} ({error.strerror}); give another folder."
            ) from error

    def read(self, place: Place) -> Cell | None:
        """Return the cell at a place; None where there is none.

        Raises:
            StoreError: it is damaged.
            UsageError: another version of foredraft wrote it.
        """
        path = self.folder / place.path()
        return read_cell(path) if path.exists() else None

    def write(self, cell: Cell) -> None:
        """Put a cell in its place, whole or not at all.

        Raises:
            StoreError: it cannot be written.
        """
        write_result(self.folder / cell.place.path(), cell.as_json())

    def paths(self) -> Iterator[Path]:
        """Yield the files that are named as cells, in order."""
        yield from sorted(path for path in self.folder.rglob("*.json") if _CELL_NAME.fullmatch(path.name))


def read_cell(path: Path) -> Cell:
    """Read a cell's file.

    Raises:
        StoreError: it is damaged.
        UsageError: another version of foredraft wrote it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        outer = json.loads(text)
        if outer["format"] != FORMAT:
            raise ValueError(f"its format is {outer['format']!r}")
        if outer["version"] != VERSION:
            raise UsageError(
                f"The cell {path} is of version {outer['version']}, and this foredraft reads version {VERSION}; give "
                "another folder, or measure again."
            )
        body = json.dumps(outer["cell"], sort_keys=True)
        if hashlib.sha256(body.encode()).hexdigest() != outer["sha256"]:
            raise ValueError("its hash is not that of its content")
        return _cell(outer["cell"])
    except UsageError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise StoreError(f"The cell {path} is damaged ({reason}); run the benchmark again to replace it.") from error


def write_result(path: Path, data: bytes) -> None:
    """Put `data` in the place of `path`, whose folder is made if need be; the old file stays until it is done.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)
    except OSError as error:
        raise StoreError(f"The results {path} cannot be written ({error.strerror}); give another folder.") from error


def settings_name(settings: Mapping[str, Any]) -> str:
    """Word generation arguments for a path and a heading: `greedy-128-seed0`, `temperature0.7-128-seed0`."""
    sampled = [f"{name}{settings[name]:g}" for name in ("temperature", "top_p", "top_k", "min_p") if name in settings]
    return "-".join([*(sampled or ["greedy"]), str(settings["max_new_tokens"]), f"seed{settings['seed']}"])


_CELL_NAME = re.compile(r"\d{5,}-\d+\.json")


def _cell(body: dict[str, Any]) -> Cell:
    writings = [None if body[name] is None else _writing(body[name]) for name in ("base", "own")]
    steps = tuple(Guesses(**{name: tuple(values) for name, values in step.items()}) for step in body["example"])
    counts = None if body["counts"] is None else _counts(body["counts"])
    given = {**body, "place": Place(**body["place"]), "base": writings[0], "own": writings[1]}
    return Cell(**{**given, "example": steps, "counts": counts})


def _writing(body: dict[str, Any]) -> Writing:
    return Writing(**{**body, "token_ids": tuple(body["token_ids"])})


def _counts(body: dict[str, Any]) -> DraftCounts:
    by_depth = {name: tuple(body[name]) for name in ("drafted_by_depth", "accepted_by_depth")}
    estimated = tuple(map(tuple, body.get("estimated", ())))  # older cells have none
    return DraftCounts(**{**body, **by_depth, "estimated": estimated})


def _safe(text: str) -> str:
    """Return `text` as the name of a folder; what had to be changed gets a hash, so that no two texts share a name."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._")[:80]
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
