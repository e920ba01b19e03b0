"""A cell: one method and plain decoding measured on one prompt, with the environment; and the file of cells.

A cell is identified by its place. A run skips cells that the file has, so a killed run can be resumed. Does not depend
on how texts are generated.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from foredraft.atomic_file import unwritable
from foredraft.engine.statistics import Statistics
from foredraft.errors import UsageError, told
from foredraft.model.fingerprint import architecture, fingerprint
from foredraft.model.machine import processor_lines
from foredraft.model.rounding import dtype_name
from foredraft.model.target import TorchTarget

CELLS_FILE, COST_FILE = "cells.jsonl", "verification.json"
VERSION = 4  # of the format of the lines of the file of cells

Environment = Mapping[str, Mapping[str, str]]
"""The conditions of a measurement: part (`machine`, `versions`, `model`, `code`) -> name -> value."""

_PACKAGES = ("foredraft", "torch", "transformers", "numpy", "numba")


@dataclass(frozen=True, slots=True)
class Writing:
    """One text and its measurements; for the peer, steps are forward passes, and decoding includes prefill."""

    token_ids: tuple[int, ...]  # emitted
    prompt_tokens: int
    statistics: Statistics  # without stalls
    total_seconds: float  # wall-clock, with stalls
    parts: Mapping[str, float]  # seconds of draft, forward, verify, commit, other, without stalls; empty for the peer
    stalled_seconds: float = 0.0  # excess time of passes that other load on the machine delayed; 0 for the peer


@dataclass(frozen=True, slots=True)
class Place:
    """The identity of a cell."""

    model: str
    dtype: str
    settings: str  # from `settings_name`
    task: str  # with its category if it has several: `spec_bench/qa`
    method: str
    number: int  # index of the prompt in its file
    turn: int = 1  # number of the question in a conversation, from 1

    def __str__(self) -> str:
        return f"{self.task}[{self.number}] turn {self.turn}, {self.method}, {self.settings}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One prompt written by a method, `own`, and by plain decoding in the same process, `base`; None for a failure."""

    place: Place
    settings: Mapping[str, Any]  # generation arguments, including the seed
    prompt_hash: str  # detects another prompt under the same number
    environment: Environment
    base: Writing | None
    own: Writing | None
    failure: str = ""  # the error's type and message

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "Cell":
        """Restore a cell from JSON of its `asdict`."""
        restored: dict[str, Any] = {"place": Place(**body["place"])}
        for name in ("base", "own"):
            if given := body[name]:
                parts = {"token_ids": tuple(given["token_ids"]), "statistics": Statistics(**given["statistics"])}
                restored[name] = Writing(**given | parts)
        return cls(**body | restored)


def settings_name(settings: Mapping[str, Any]) -> str:
    """Return a name for generation arguments, such as `greedy-128-seed0` or `temperature0.7-128-seed0`."""
    sampled = [f"{name}{settings[name]:g}" for name in ("temperature", "top_p", "top_k", "min_p") if name in settings]
    return "-".join([*(sampled or ["greedy"]), str(settings["max_new_tokens"]), f"seed{settings['seed']}"])


def prepare_folder(folder: Path) -> None:
    """Create the folder, and end a line that a killed run left incomplete; UsageError if it is not writable."""
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
    """Append a cell to a folder's file, or raise StoreError; a later cell replaces an earlier one of the same place."""
    path = folder / CELLS_FILE
    try:
        with path.open("ab") as file:
            file.write(json.dumps({"version": VERSION, **asdict(cell)}).encode() + b"\n")
    except OSError as error:
        raise unwritable(path, error) from error


def read_cells(folder: Path) -> tuple[dict[Place, Cell], list[str]]:
    """Return the cells by place and a message for each damaged line; UsageError for an unreadable or other format."""
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
            damaged.append(
                f"Line {number} of {path} is damaged ({told(error)}); its cell is measured again by `bench run`."
            )
            continue
        if cell is None:
            raise UsageError(
                f"Line {number} of {path} has version {found}, and this foredraft reads version {VERSION}; give "
                "another folder, or measure again."
            )
        cells[cell.place] = cell
    return cells, damaged


# --- the environment


def describe_environment(target: TorchTarget, model: str) -> Environment:
    """Return the environment of measurements with `target`; `model` is the name given by the user."""
    device, root = target.device, Path(__file__).resolve().parents[3]
    described = f"{architecture(target.outline.config)} {fingerprint(target.model)}"
    model_hash = hashlib.sha256(described.encode()).hexdigest()[:16]
    names = (line.partition(":")[2].strip() for line in processor_lines("model name"))
    processor = next(names, platform.processor())
    forward = "compiled" if target.compiled is not None else "as it is"
    return {
        "machine": {
            "host": platform.node(), "system": f"{platform.system()} {platform.machine()}", "processor": processor,
            "cores": str(os.cpu_count()), "threads": str(torch.get_num_threads()),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        },
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "model": {
            "name": model, "dtype": dtype_name(target.outline), "hash": model_hash,
            "forward": "recorded" if target.recordings is not None else forward,
        },
        "code": {"commit": _commit(root) if (root / ".git").exists() else ""},
    }  # fmt: skip


def differences(one: Environment, other: Environment) -> str:
    """Return up to three differences of two environments, such as `torch 2.6.0 and 2.7.0`; commits may differ."""
    found = [
        f"{name} {one[part].get(name)} and {other[part].get(name)}"
        for part in ("machine", "versions", "model")
        for name in sorted({*one[part], *other[part]})
        if one[part].get(name) != other[part].get(name)
    ]
    return "; ".join(found[:3])


def _commit(root: Path) -> str:
    """Return the commit of the source tree, with `-dirty` for uncommitted changes; "" if git does not know."""
    try:
        return subprocess.run(  # noqa: S603  # fixed arguments, no user input
            [shutil.which("git") or "git", "-C", root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, check=True, timeout=10,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
