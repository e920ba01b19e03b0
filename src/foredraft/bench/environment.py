"""What a measurement is true of: the machine, the versions, the model's weights, and the commit of this code.

Knows where to ask for each. Figures of unlike environments are not compared; the commit alone may differ, and is told.
"""

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from foredraft.model.rounding import dtype_name
from foredraft.model.target import TorchTarget

Environment = Mapping[str, Mapping[str, str]]
"""Part (`machine`, `versions`, `model`, `code`) -> name -> value."""

_PACKAGES = ("foredraft", "torch", "transformers", "numpy", "numba")
_SAMPLE = 1024
"""How many values of each parameter go into the model's hash: enough to tell two trainings apart, and quick."""


def describe_environment(target: TorchTarget, model: str) -> Environment:
    """Return what a measurement with `target`, which the user calls `model`, is true of."""
    device = target.device
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
            "hash": model_hash(target.model),
            "forward": _forward(target),
        },
        "code": {"commit": code_commit()},
    }


def _forward(target: TorchTarget) -> str:
    if target.recordings is not None:
        return "recorded"
    return "compiled" if target.compiled is not None else "as it is"


def differences(one: Environment, other: Environment) -> list[str]:
    """Return what makes two environments unlike, each as `torch 2.6.0 and 2.7.0`; the commit is left out."""
    return [
        f"{name} {one.get(part, {}).get(name)} and {other.get(part, {}).get(name)}"
        for part in ("machine", "versions", "model")
        for name in sorted({*one.get(part, {}), *other.get(part, {})})
        if one.get(part, {}).get(name) != other.get(part, {}).get(name)
    ]


def model_hash(model: Any) -> str:
    """Return a hash of a model's configuration and weights, 16 hexadecimal digits.

    Of each parameter its name, shape, dtype and first values are read, not all of them.
    """
    digest = hashlib.sha256(repr(sorted(model.config.to_diff_dict().items())).encode())
    for name, parameter in model.named_parameters():
        values = parameter.detach().reshape(-1)[:_SAMPLE].float().cpu().numpy()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()[:16]


def code_commit() -> str:
    """Return the commit of the source tree that this package runs from, with `-dirty` after it, or an empty text."""
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
    """Return the processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
