"""A checkpoint whose weights are rounded to GGUF's blocks of 4 or 8 bits, as a transformers folder in the cache.

The folder holds the rounded weights in bfloat16, and beside them the integers that compiled forwards read, as a folder
made from a GGUF file does. Says which folder to load; does not load it.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foredraft.cache_folder import cache_folder
from foredraft.errors import UsageError
from foredraft.model.compiled.blocks import DEPTH
from foredraft.model.compiled.experts import by_rows, expert_matrices
from foredraft.model.fingerprint import files_identity
from foredraft.model.gguf.files import INSTALL_READERS, SOURCE, filled_folder

KINDS = ("q8_0", "q4_0")
"""Dtypes as `--dtype` takes them: GGUF's formats, in lower case."""

_OF_SCORES = "q8_0"  # for the output matrix, to which llama.cpp too gives more bits than to the others
_FORMAT = 2  # part of a folder's name; raised when the content changes


def rounded_folder(location: str, kind: str, revision: str | None, read: Callable[[], Any]) -> Path:
    """Return the folder of a checkpoint's weights rounded to one of `KINDS`, as `filled_folder` writes it.

    The checkpoint is a transformers folder or a hub id; `read` loads it in bfloat16, and its errors are passed on.
    Raises UsageError if the package that rounds is missing, or the weights are quantised already, such as a GGUF
    file's, and StoreError if the cache folder cannot be written to, or there is no room.
    """
    from transformers.utils.hub import cached_file

    if find_spec("gguf") is None:
        raise UsageError(f"dtype {kind} needs the package gguf; run: {INSTALL_READERS}.")
    if Path(location, SOURCE).exists():
        raise UsageError(f"dtype {kind} rounds a checkpoint; a GGUF file is read with the blocks it has: leave it out.")
    config = cached_file(location, "config.json", revision=revision)
    digest = hashlib.sha256(repr((kind, *files_identity(Path(str(config)).parent))).encode()).hexdigest()[:20]
    place = cache_folder("rounded") / f"{digest}-{_FORMAT}"
    if place.is_dir():
        return place
    # outside of `filled_folder`, for which an OSError means that the place cannot be written
    model = read().eval()
    if getattr(model, "is_quantized", False):
        raise UsageError(f"The weights of {location} are quantised already; leave the dtype out.")
    return filled_folder(place, partial(_round, model, kind))


@torch.no_grad()
def _round(model: Any, kind: str, folder: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    folder.mkdir()
    writer = GGUFWriter(folder / SOURCE, "weights")
    scores = model.get_output_embeddings()
    linear = [layer for layer in model.modules() if type(layer) is nn.Linear]
    rounded = [(layer.weight, _OF_SCORES if layer is scores else kind) for layer in linear]
    rounded += [(by_rows(module, matrices), kind) for module, _, matrices in expert_matrices(model)]
    for number, (weight, chosen) in enumerate(rounded):
        if weight.shape[-1] % DEPTH == 0:
            form = GGMLQuantizationType[chosen.upper()]
            integers = quants.quantize(weight.float().numpy(), form)
            weight.copy_(torch.from_numpy(quants.dequantize(integers, form)))
            writer.add_tensor(str(number), integers, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.save_pretrained(folder)
