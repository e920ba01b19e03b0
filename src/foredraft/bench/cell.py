"""A cell: one method on one prompt, beside plain decoding of the same prompt in one process; and the file of cells.

Knows records and JSON. A cell's place is its identity, so what the file holds need not be measured again, and a run
that was killed goes on where it was. Does not know how texts are written.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.atomic_file import store_file
from foredraft.bench.drafts import DraftCounts
from foredraft.bench.environment import Environment, differences
from foredraft.bench.metrics import repeated_share
from foredraft.contracts import CostCurve
from foredraft.engine.statistics import Statistics
from foredraft.errors import StoreError, UsageError
from foredraft.model.cost import sound_curve

CELLS_FILE, COST_FILE = "cells.jsonl", "verification.json"
VERSION = 3
"""Of the lines of the file of cells."""


@dataclass(frozen=True, slots=True)
class Writing:
    """One text, and what it took.

    Attributes:
        token_ids: emitted.
        prompt_tokens: of the prompt.
        statistics: counts, and the times of prefill and of steps without those stalled. For the peer, steps are all its
            forwards, of which the first reads the prompt too, and `decode_seconds` are all its seconds.
        total_seconds: by the clock, those stalled included.
        parts: seconds of draft, forward, verify, commit, other, without those stalled; empty for the peer.
        stalled_seconds: of passes that the machine held up, beyond what such a pass takes; 0 for the peer.
    """

    token_ids: tuple[int, ...]
    prompt_tokens: int
    statistics: Statistics
    total_seconds: float
    parts: Mapping[str, float]
    stalled_seconds: float = 0.0

    @property
    def repeated(self) -> float:
        """The share of repeated 8-grams."""
        return repeated_share(self.token_ids)

    @property
    def seconds_per_token(self) -> float:
        """Decode time of a token; for the peer, whole time."""
        return self.statistics.decode_seconds / max(len(self.token_ids), 1)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Writing":
        """Return the writing that `dataclasses.asdict` and JSON made dictionaries and lists of."""
        return cls(**{**body, "token_ids": tuple(body["token_ids"]), "statistics": Statistics(**body["statistics"])})


@dataclass(frozen=True, slots=True)
class Place:
    """What a cell is a measurement of: its identity.

    Attributes:
        model: as the user calls it.
        dtype: of the weights.
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

    def __str__(self) -> str:
        """Return the place as messages name it."""
        return f"{self.task}[{self.number}] turn {self.turn}, {self.method}, {self.settings}"


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
    learned_texts: int = 0
    failure: str = ""

    @property
    def whole(self) -> tuple[Writing, Writing] | None:
        """Plain decoding and the method, where both were written."""
        return (self.base, self.own) if self.base is not None and self.own is not None else None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Cell":
        """Return the cell that `dataclasses.asdict` and JSON made dictionaries and lists of."""
        base, own = (None if body[name] is None else Writing.from_json(body[name]) for name in ("base", "own"))
        counts = None if body["counts"] is None else DraftCounts.from_json(body["counts"])
        return cls(**{**body, "place": Place(**body["place"]), "base": base, "own": own, "counts": counts})


def settings_name(settings: Mapping[str, Any]) -> str:
    """Word generation arguments for a heading: `greedy-128-seed0`, `temperature0.7-128-seed0`."""
    sampled = [f"{name}{settings[name]:g}" for name in ("temperature", "top_p", "top_k", "min_p") if name in settings]
    return "-".join([*(sampled or ["greedy"]), str(settings["max_new_tokens"]), f"seed{settings['seed']}"])


def prepare_folder(folder: Path) -> None:
    """Make the folder, and end a line of its cells that a killed run left unfinished.

    Raises:
        UsageError: it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / CELLS_FILE).open("ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read() != b"\n":
                    file.write(b"\n")
    except OSError as error:
        raise UsageError(f"Results cannot be written to {folder} ({error.strerror}); give another folder.") from error


def append_cell(folder: Path, cell: Cell) -> None:
    """Add a cell to the file of a folder; of two cells of one place, the later one counts.

    Raises:
        StoreError: it cannot be written.
    """
    line = json.dumps({"version": VERSION, **dataclasses.asdict(cell)}) + "\n"
    try:
        with (folder / CELLS_FILE).open("ab") as file:
            file.write(line.encode())
    except OSError as error:
        raise StoreError(
            f"The results in {folder} cannot be written ({error.strerror}); give another folder."
        ) from error


def read_cells(folder: Path) -> tuple[dict[Place, Cell], list[str]]:
    """Return the cells of a folder by place, and a sentence on each line of its file that is damaged.

    Raises:
        UsageError: the file cannot be read, or another version of foredraft wrote it.
    """
    path, cells, damaged = folder / CELLS_FILE, dict[Place, Cell](), list[str]()
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); give another folder.") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            body = json.loads(line)
            version = body.pop("version")
            if version == VERSION:
                cell = Cell.from_json(body)
                cells[cell.place] = cell
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            damaged.append(f"Line {number} of {path} is damaged ({reason}); its cell is measured again by `bench run`.")
            continue
        if version != VERSION:
            raise UsageError(
                f"Line {number} of {path} is of version {version}, and this foredraft reads version {VERSION}; give "
                "another folder, or measure again."
            )
    return cells, damaged


def check_alike(cells: list[Cell]) -> None:
    """Refuse cells whose figures must not be compared.

    Raises:
        UsageError: naming what differs.
    """
    for cell in cells[1:]:
        unlike = differences(cells[0].environment, cell.environment)
        if unlike:
            raise UsageError(
                f"The cells {cells[0].place} and {cell.place} are of unlike environments ({'; '.join(unlike[:3])}), so "
                "they are not compared; report each folder by itself."
            )


def keep_cost(curve: CostCurve, folder: Path) -> None:
    """Write what a pass costs by its rows beside the cells.

    Raises:
        StoreError: it cannot be written.
    """
    store_file(folder / COST_FILE, json.dumps(dataclasses.asdict(curve)).encode() + b"\n")


def read_cost(folder: Path) -> CostCurve | None:
    """Return what a pass costs by its rows; None where there is no file of it that can be read."""
    try:
        body = json.loads((folder / COST_FILE).read_text(encoding="utf-8"))
        return sound_curve(body["rows"], body["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
