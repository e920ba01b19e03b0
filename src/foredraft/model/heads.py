"""Trained heads as files: an early-exit head (EESD), which belongs to one model and one exit.

A head is a folder with `head.json`, which says whose it is, and `head.safetensors`. Knows weights and files; not how a
head drafts or how it is trained.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from foredraft.atomic_file import write_file
from foredraft.errors import StoreError, UsageError
from foredraft.model.fingerprint import fingerprint
from foredraft.model.layers import model_parts

CONFIG_FILE, WEIGHTS_FILE = "head.json", "head.safetensors"


@dataclass(frozen=True, slots=True)
class HeadCard:
    """Whose head it is.

    Attributes:
        kind: "eesd", "cali" or "medusa".
        base_model: the name under which its model was loaded when it was trained.
        fingerprint: of that model's weights, see `fingerprint`.
        vocabulary: ids that it scores.
        width: of the hidden states.
        layers: layers before the exit (N); 0 for heads on the last one.
        dtype: of its weights, "bfloat16" for instance.
        count: how many heads; 1 but for Medusa.
    """

    kind: str
    base_model: str
    fingerprint: str
    vocabulary: int
    width: int
    layers: int
    dtype: str
    count: int = 1


class ExitHead(nn.Module):
    """An early exit: one layer of the target's own kind, its final norm, and an LM head of its own.

    Args:
        layer: takes the exit's states and whatever the model gives a layer.
        norm: takes the layer's output.
        lm_head: scores it.
    """

    def __init__(self, layer: nn.Module, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm, self.lm_head = layer, norm, lm_head


def new_exit_head(model: Any) -> ExitHead:
    """Return a head that begins as the model's last layer, final norm and LM head; nothing is shared with the model.

    Raises:
        UnsupportedModelError: the model's layers are no plain list.
    """
    parts = model_parts(model)
    layer, norm = model.get_submodule(parts.layers)[-1], model.get_submodule(parts.norm)
    head = ExitHead(*(copy.deepcopy(each) for each in (layer, norm, model.get_output_embeddings())))
    return head.requires_grad_(requires_grad=False)


def card_for(
    model: Any, kind: str, base_model: str, *, layers: int = 0, dtype: str = "bfloat16", count: int = 1
) -> HeadCard:
    """Return the card of a new head of `model`, loaded under the name `base_model`."""
    vocabulary, width = model.get_output_embeddings().weight.shape
    return HeadCard(kind, base_model, fingerprint(model), vocabulary, width, layers, dtype, count)


def save_head(folder: Path, card: HeadCard, weights: Mapping[str, torch.Tensor]) -> None:
    """Write a head; the files that were there stay until the new ones are complete.

    Raises:
        StoreError: the folder cannot be written.
    """
    dtype = getattr(torch, card.dtype)
    tensors = {name: weight.detach().to(dtype).contiguous().cpu() for name, weight in weights.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / WEIGHTS_FILE, save_tensors(tensors, {"format": "pt"}))
        write_file(folder / CONFIG_FILE, (json.dumps(asdict(card), indent=2) + "\n").encode())
    except OSError as error:
        raise StoreError(f"No head can be written to {folder} ({error.strerror}). Check its free space.") from error


def read_head(location: str | Path, kind: str) -> tuple[HeadCard, dict[str, torch.Tensor]]:
    """Read a head from a folder or the hub.

    Raises:
        UsageError: there is none, or it is of another kind.
        StoreError: its files are damaged.
    """
    folder = head_folder(str(location))
    try:
        data = json.loads((folder / CONFIG_FILE).read_text())
        card = HeadCard(**{field.name: data[field.name] for field in fields(HeadCard) if field.name in data})
        if card.kind != kind:
            raise UsageError(f"{location} is a head for {card.kind}, not for {kind}.")
        return card, load_tensors((folder / WEIGHTS_FILE).read_bytes())
    except FileNotFoundError as error:
        raise UsageError(f"{location} holds no trained head: {Path(error.filename).name} is missing.") from error
    except UsageError:  # which is a ValueError too
        raise
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise StoreError(f"The head in {location} is damaged ({error}). Train it again, or copy it again.") from error


def check_card(card: HeadCard, model: Any, location: str | Path) -> None:
    """Refuse a head that was trained for another model.

    Raises:
        UsageError: naming both.
    """
    vocabulary, width = model.get_output_embeddings().weight.shape
    for name, theirs, ours in (("vocabulary", card.vocabulary, vocabulary), ("width", card.width, width)):
        if theirs != ours:
            raise UsageError(
                f"The head in {location} was trained for {card.base_model}, with a {name} of {theirs}; this model's is "
                f"{ours}. Train one for it: foredraft train {card.kind}."
            )
    if card.fingerprint != fingerprint(model):
        raise UsageError(
            f"The head in {location} was trained for {card.base_model}, whose weights are not this model's. Train one "
            f"for it: foredraft train {card.kind}."
        )


def load_exit_head(location: str | Path, model: Any) -> tuple[HeadCard, ExitHead]:
    """Read an early-exit head, in the model's dtype and on its device.

    Raises:
        UsageError: there is none, or it was trained for another model.
        StoreError: its files are damaged.
        UnsupportedModelError: the model's layers are no plain list.
    """
    card, weights = read_head(location, "eesd")
    check_card(card, model, location)
    head = new_exit_head(model)
    fill(head, weights, location)
    return card, head


def fill(module: nn.Module, weights: Mapping[str, torch.Tensor], location: str | Path) -> None:
    """Put a head's weights into `module`.

    Raises:
        StoreError: a weight is missing, unknown, of another shape, or not finite.
    """
    bad = [name for name, weight in weights.items() if not torch.isfinite(weight).all()]
    try:
        module.load_state_dict(dict(weights))
    except RuntimeError as error:
        raise StoreError(f"The head in {location} is damaged: {str(error).splitlines()[-1].strip()}") from error
    if bad:
        raise StoreError(f"The head in {location} is damaged: {bad[0]} holds NaN or infinity.")


def head_folder(location: str) -> Path:
    """Return the folder of a head: as it is named, or fetched from the hub.

    Raises:
        UsageError: it cannot be fetched.
    """
    path = Path(location).expanduser()
    if path.exists() or location.startswith((".", "/", "~")) or location.count("/") != 1:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(location, allow_patterns=[f"**{CONFIG_FILE}", f"**{WEIGHTS_FILE}"]))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UsageError(
            f"There is no folder {location}, and no head of that name could be fetched from the hub: {first}"
        ) from error
