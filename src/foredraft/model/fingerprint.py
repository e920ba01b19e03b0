"""What identifies a model: its weights in any dtype, its architecture, or the state of the files that it is read from.

Does not depend on what it is identified for.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

LIBRARIES = ("foredraft", "transformers", "torch")  # whose code follows from the configuration
_NO_STATE = {*vars(nn.Module()), "_is_hf_initialized"}  # attributes of every module


def fingerprint(model: Any) -> str:
    """Return SHA-256, in hexadecimal, of each weight's name, its shape and 64 numbers spread over it, in bfloat16."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().reshape(-1)
        count = min(64, len(flat))
        indices = torch.arange(count) * max(len(flat) - 1, 0) // max(count - 1, 1)  # in integers, without rounding
        picked = flat[indices.to(flat.device)]
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(picked.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()


def architecture(config: Any) -> str:
    """Return a configuration as text, without the path that it was loaded from."""
    settings = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    return json.dumps(settings, sort_keys=True, default=str)


def code_of(model: Any) -> list[str]:
    """Return the classes of a model's modules, and the attributes of those that are not from torch or transformers.

    Such attributes may say what is computed: PEFT's say which adapters are active, and their scales. Of values that
    JSON cannot have, it is the type. Of a checkpoint's own code, a class's module names the version.
    """
    classes, states = set(), []
    for path, module in model.named_modules():
        kind = type(module)
        classes.add(f"{kind.__module__}.{kind.__qualname__}")
        if kind.__module__.partition(".")[0] not in LIBRARIES:
            state = {name: value for name, value in vars(module).items() if name not in _NO_STATE}
            states.append(path + json.dumps(state, skipkeys=True, default=lambda value: type(value).__qualname__))
    return [*sorted(classes), *states]


def files_identity(folder: Path) -> tuple[Any, ...]:
    """Return what tells a checkpoint from its earlier and later states: its place, and its files' sizes and times."""
    if folder.parent.name == "snapshots":  # of the hub's cache: named by the commit, and filled as files are needed
        return (str(folder),)
    files = sorted(file for file in folder.iterdir() if file.suffix in {".safetensors", ".bin", ".gguf", ".json"})
    return (str(folder.resolve()), *((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files))
