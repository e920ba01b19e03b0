"""A GGUF file, whole or in parts, as a folder with its configuration and tokenizer, and as a model of transformers.

The folder holds no weights: they are read from the file whenever the model is loaded. Joins what the tables of this
package say. Does not know where folders are kept.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import UnsupportedModelError, UsageError, told
from foredraft.model.gguf.architectures import DRAFTERS
from foredraft.model.gguf.configuration import configuration
from foredraft.model.gguf.files import INSTALL_READERS
from foredraft.model.gguf.metadata import Keys, Metadata, read_header
from foredraft.model.gguf.tensors import Tensors
from foredraft.model.gguf.tokenizers import write_tokenizer
from foredraft.model.gguf.weights import state_of
from foredraft.model.mapped import keeper

_ALL_F32, _MOSTLY_F16 = 0, 1
"""Values of GGUF's `general.file_type`."""


def opened(parts: Sequence[Path]) -> tuple[Metadata, Tensors]:
    """Return the header of the first part, and the tensors of all.

    Raises UsageError for a damaged file, and without the package `gguf`.
    """
    if find_spec("gguf") is None:
        raise UsageError(f"Reading a GGUF file needs gguf; run: {INSTALL_READERS}.")
    headers = [read_header(part) for part in parts]
    metadata = headers[0][0]
    if (count := metadata.get("split.count", 1)) not in (0, len(parts)):
        raise UsageError(
            f"{parts[0]} is one of {count} parts of a model, but its name does not say so; give the parts the names "
            "that they were published with, as NAME-00001-of-00002.gguf."
        )
    found = zip(parts, (places for _, places in headers), strict=True)
    return metadata, Tensors({name: (part, place) for part, places in found for name, place in places.items()})


def write_folder(parts: Sequence[Path], folder: Path) -> None:
    """Write the configuration and the tokenizer of a file to a new folder.

    Raises UsageError for a damaged file, or one that is no language model, and UnsupportedModelError for what the
    file says and no table knows.
    """
    from transformers import GenerationConfig

    metadata, tensors = opened(parts)
    if lack := _lack(metadata, tensors):
        raise UsageError(f"{parts[0]} {lack}; give a GGUF file of a language model, or a transformers folder.")
    config = configuration(metadata, tensors.shapes, tensors.sample)
    config.dtype = _dtype(metadata, tensors)
    folder.mkdir(parents=True)
    try:
        vocabulary = write_tokenizer(metadata, folder)
        bos, padding = (vocabulary.roles.get(role) for role in ("bos", "padding"))
        config.update({"bos_token_id": bos, "pad_token_id": padding, "eos_token_id": list(vocabulary.ends)})
        config.save_pretrained(folder)
        generation = GenerationConfig.from_model_config(config)
        suppressed = metadata.get("tokenizer.ggml.suppress_tokens")
        generation.suppress_tokens = None if suppressed is None else list(suppressed)
        generation.save_pretrained(folder)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # of a key that has another type, or is odd
        raise UnsupportedModelError(
            f"The keys of the tokenizer in {parts[0]} do not fit together ({told(error)}); download it again, or give "
            "the model as a transformers folder or a hub id."
        ) from error
    if unread := [key for key in metadata.unread() if key.startswith("tokenizer.")]:
        raise UnsupportedModelError(
            f"This GGUF file says {', '.join(unread)} of its tokenizer, which foredraft does not know, so its tokens "
            "could be others. Give the model as a transformers folder or a hub id, and report the key."
        )


def _lack(metadata: Metadata, tensors: Tensors) -> str:
    """Return what keeps a file from being a language model; nothing if it is one."""
    if (kind := metadata.get("general.type", "model")) != "model":
        return f"is no language model (type {kind})"
    if metadata.architecture in DRAFTERS:
        return f"is no language model but a drafter ({metadata.architecture}), which methods take as their option model"
    if "tokenizer.ggml.tokens" not in metadata:
        return "holds no tokenizer"
    if not tensors.shapes:
        return "holds a vocabulary and no weights"
    return "" if "token_embd.weight" in tensors else "has no tensor token_embd.weight"


def _dtype(metadata: Metadata, tensors: Tensors) -> str:
    """Return the dtype that has the numbers of a file's matrices: float32, or bfloat16 if that is enough.

    It is enough for what was quantised, and for F16 made from bfloat16. Some families overflow in float16.
    """
    kind, formats = metadata.get("general.file_type"), tensors.formats()
    if kind is None and formats <= {"F32", "F16"}:  # a file need not say it
        kind = _ALL_F32 if formats == {"F32"} else _MOSTLY_F16
    if kind != _MOSTLY_F16:
        return "float32" if kind == _ALL_F32 else "bfloat16"
    halves = (name for name in tensors if tensors.stored(name)[1].name == "F16")
    numbers = (torch.from_numpy(tensors.sample(name)) for name in halves)  # of each: an adapter changes some of them
    return "bfloat16" if all(torch.equal(each, each.to(torch.bfloat16).float()) for each in numbers) else "float32"


def load_gguf(folder: Path, parts: Sequence[Path], dtype: torch.dtype | str, **options: Any) -> Any:
    """Return the model of a folder that `write_folder` made, with the weights of its file, in `dtype` or "auto".

    Options are those of transformers' `from_pretrained`. Raises UnsupportedModelError if the file and the model do not
    have the same weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    metadata, tensors = opened(parts)
    config = AutoConfig.from_pretrained(folder)
    chosen: torch.dtype = config.dtype if isinstance(dtype, str) else dtype
    with torch.device("meta"):
        wanted = AutoModelForCausalLM.from_config(config)
    names = dict(wanted.state_dict())
    if config.tie_word_embeddings:
        names.pop("lm_head.weight", None)
    size = chosen.itemsize * sum(like.numel() for like in names.values())
    blocks = Keys(metadata).get("block_count")
    state = state_of(metadata.architecture, tensors, names, config, chosen, keeper(size), blocks)
    model = type(wanted).from_pretrained(None, config=config, state_dict=state, dtype=chosen, **options)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.name_or_path = model.config._name_or_path = str(folder)  # noqa: SLF001  # as `from_pretrained` of a folder sets it
    return model
