"""A cell: one method on one prompt beside plain decoding of it, what that is true of, and the file of cells.

A cell's place is its identity: what the file holds is not measured again, and a run that was killed goes on where it
was. Does not know how texts are written.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from foredraft.atomic_file import store_file
from foredraft.bench.drafts import DraftCounts
from foredraft.bench.metrics import repeated_share
from foredraft.contracts import CostCurve
from foredraft.engine.statistics import Statistics
from foredraft.errors import StoreError, UsageError
from foredraft.model.cost import sound_curve
from foredraft.model.rounding import dtype_name
from foredraft.model.target import TorchTarget

CELLS_FILE, COST_FILE = "cells.jsonl", "verification.json"
VERSION = 3
"""Of the lines of the file of cells."""

Environment = Mapping[str, Mapping[str, str]]
"""What a measurement is true of: part (`machine`, `versions`, `model`, `code`) -> name -> value."""

_PACKAGES = ("foredraft", "torch", "transformers", "numpy", "numba")
_SAMPLE = 1024  # values of each parameter that go into the model's hash: enough to tell two trainings apart


@dataclass(frozen=True, slots=True)
class Writing:
    """One text, and what it took.

    Attributes:
        token_ids: emitted.
        prompt_tokens: of the prompt.
        statistics: counts, and the times of prefill and of steps, without stalls. For the peer, steps are all its
            forwards, of which the first reads the prompt too, and `decode_seconds` are all its seconds.
        total_seconds: by the clock, stalls included.
        parts: seconds of draft, forward, verify, commit, other, without stalls; empty for the peer.
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
        """Return the writing that `asdict` and JSON made dictionaries and lists of."""
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
        base: plain decoding; None where it failed.
        own: the method's; None where it failed.
        counts: what became of the drafts; None for the peer and for a failure.
        learned_texts: how many texts a warm drafter had read before.
        failure: what was raised, as a sentence; else empty.
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
        """Return the cell that `asdict` and JSON made dictionaries and lists of."""
        base, own = (None if body[name] is None else Writing.from_json(body[name]) for name in ("base", "own"))
        counts = None if body["counts"] is None else DraftCounts.from_json(body["counts"])
        return cls(**{**body, "place": Place(**body["place"]), "base": base, "own": own, "counts": counts})


def settings_name(settings: Mapping[str, Any]) -> str:
    """Word generation arguments for a heading: `greedy-128-seed0`, `temperature0.7-128-seed0`."""
    sampled = [f"{name}{settings[name]:g}" for name in ("temperature", "top_p", "top_k", "min_p") if name in settings]
    return "-".join([*(sampled or ["greedy"]), str(settings["max_new_tokens"]), f"seed{settings['seed']}"])


# --- the file


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
    line = json.dumps({"version": VERSION, **asdict(cell)}) + "\n"
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
            found = body.pop("version")
            cell = Cell.from_json(body) if found == VERSION else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            damaged.append(f"Line {number} of {path} is damaged ({reason}); its cell is measured again by `bench run`.")
            continue
        if cell is None:
            raise UsageError(
                f"Line {number} of {path} is of version {found}, and this foredraft reads version {VERSION}; give "
                "another folder, or measure again."
            )
        cells[cell.place] = cell
    return cells, damaged


def keep_cost(curve: CostCurve, folder: Path) -> None:
    """Write what a pass costs by its rows beside the cells.

    Raises:
        StoreError: it cannot be written.
    """
    store_file(folder / COST_FILE, json.dumps(asdict(curve)).encode() + b"\n")


def read_cost(folder: Path) -> CostCurve | None:
    """Return what a pass costs by its rows; None where there is no file of it that can be read."""
    try:
        body = json.loads((folder / COST_FILE).read_text(encoding="utf-8"))
        return sound_curve(body["rows"], body["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- the environment


def describe_environment(target: TorchTarget, model: str) -> Environment:
    """Return what a measurement with `target`, which the user calls `model`, is true of."""
    device = target.device
    forward = "compiled" if target.compiled is not None else "as it is"
    return {
        "machine": {
            "host": platform.node(),
            "system": f"{platform.system()} {platform.machine()}",
            "processor": _processor(),
            "cores": str(os.cpu_count()),
            "threads": str(torch.get_num_threads()),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        },
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "model": {
            "name": model,
            "dtype": dtype_name(target.model),
            "hash": _model_hash(target.model),
            "forward": "recorded" if target.recordings is not None else forward,
        },
        "code": {"commit": _commit()},
    }


def differences(one: Environment, other: Environment) -> str:
    """Return what makes two environments unlike, `torch 2.6.0 and 2.7.0; ...`; empty if nothing but the commit."""
    unlike = [
        f"{name} {one.get(part, {}).get(name)} and {other.get(part, {}).get(name)}"
        for part in ("machine", "versions", "model")
        for name in sorted({*one.get(part, {}), *other.get(part, {})})
        if one.get(part, {}).get(name) != other.get(part, {}).get(name)
    ]
    return "; ".join(unlike[:3])


def check_alike(cells: Sequence[Cell]) -> None:
    """Refuse cells whose figures must not be compared.

    Raises:
        UsageError: naming what differs.
    """
    for cell in cells[1:]:
        unlike = differences(cells[0].environment, cell.environment)
        if unlike:
            raise UsageError(
                f"The cells {cells[0].place} and {cell.place} are of unlike environments ({unlike}), so they are not "
                "compared; report each folder by itself."
            )


def _model_hash(model: Any) -> str:
    """Return 16 hexadecimal digits of a model's configuration, and of each parameter's name, shape and first values."""
    digest = hashlib.sha256(repr(sorted(model.config.to_diff_dict().items())).encode())
    for name, parameter in model.named_parameters():
        values = parameter.detach().reshape(-1)[:_SAMPLE].float().cpu().numpy()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()[:16]


def _commit() -> str:
    """Return the commit of the source tree that this package runs from, `-dirty` after it if it is; "" for none."""
    git = shutil.which("git")
    root = Path(__file__).resolve().parents[3]
    if git is None or not (root / ".git").exists():
        return ""
    try:
        found = subprocess.run(  # noqa: S603  # fixed arguments; nothing of the user's
            [git, "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
