"""The files of trained heads: written, read, and checked against the model that they are loaded for.

A head is a folder with `head.json`, which names its model, and `head.safetensors`. With `lm_head.ids` it scores only
those tokens, and without LM head weights it uses the target's own. Does not depend on the modules
that the weights belong to.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from foredraft.atomic_file import store_file
from foredraft.errors import ForedraftError, StoreError, UsageError, told
from foredraft.model.fingerprint import fingerprint
from foredraft.model.hub import named_gguf
from foredraft.options import user_path, whole_number

M = TypeVar("M", bound=nn.Module)

CONFIG_FILE, WEIGHTS_FILE = "head.json", "head.safetensors"
_FILES = (f"**{CONFIG_FILE}", f"**{WEIGHTS_FILE}")  # that a head is made of, for the hub
SHIPPED = Path(__file__).parents[3] / "models"  # heads in a checkout, MODEL/METHOD each; the wheel has none
INT8 = "int8"
IDS = "lm_head.ids"  # the tensor in a file that holds the ids of the tokens that the head scores
_LM_HEAD = "lm_head."
_SCALE = ".scale"  # suffix of a matrix's row scales in an int8 file


@dataclass(frozen=True, slots=True)
class HeadCard:
    """Metadata of a head."""

    kind: str  # "eesd", "cali", "draft" or "medusa"
    base_model: str  # the name under which its model was loaded for training
    fingerprint: str  # of that model's weights
    vocabulary: int  # number of ids that the model scores
    width: int  # of the hidden states
    layers: int  # layers before the exit (N), or of the draft model; 0 for Medusa
    dtype: str  # of its weights, such as "bfloat16"; "int8" rounds matrices by row, in the file only
    count: int = 1  # number of heads; more for Medusa


def weights_of(head: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights to save. A frozen LM head is the target's: only its ids are saved."""
    frozen = {name for name, weight in head.named_parameters() if not weight.requires_grad}
    own = head.state_dict().items()
    return {name: weight for name, weight in own if name not in frozen or not name.startswith(_LM_HEAD)}


def card_for(
    model: Any, kind: str, base_model: str, *, layers: int = 0, dtype: str = "bfloat16", count: int = 1
) -> HeadCard:
    """Return the card of a new head of `model`, which was loaded under the name `base_model`."""
    vocabulary, width = model.get_output_embeddings().weight.shape
    return HeadCard(kind, base_model, fingerprint(model), vocabulary, width, layers, dtype, count)


def save_head(folder: Path, card: HeadCard, weights: Mapping[str, torch.Tensor]) -> None:
    """Write a head; raises StoreError if the folder cannot be written. Each complete file replaces an old one."""
    tensors = {name: weight.contiguous() for name, weight in _encoded(weights, card.dtype)}
    store_file(folder / WEIGHTS_FILE, save_tensors(tensors, {"format": "pt"}))
    store_file(folder / CONFIG_FILE, (json.dumps(asdict(card), indent=2) + "\n").encode())


def _encoded(weights: Mapping[str, torch.Tensor], dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a file. With "int8", each matrix row is stored as integers and one scale."""
    for name, weight in weights.items():
        values = weight.detach().cpu()
        if not values.is_floating_point():
            yield name, values
        elif dtype != INT8:
            yield name, values.to(getattr(torch, dtype))
        elif values.dim() < 2:
            yield name, values.to(torch.bfloat16)
        else:
            scale = (values.float().abs().amax(-1, keepdim=True) / 127.0).clamp_min(1e-30)
            yield name, (values.float() / scale).round().to(torch.int8)
            yield name + _SCALE, scale


def _decoded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name in [each for each in tensors if each.endswith(_SCALE)]:
        whole = name.removesuffix(_SCALE)
        if whole not in tensors:
            raise ValueError(f"{name} scales no tensor")
        tensors[whole] = tensors[whole].float() * tensors.pop(name)
    return tensors


def read_head(location: str | Path, kind: str, model: Any) -> tuple[HeadCard, dict[str, torch.Tensor]]:
    """Read a head for `model` from a folder.

    Raises UsageError for no head, or one of another kind or for another model, and StoreError for damaged files.
    """
    folder = Path(location)
    with damaged_unless_read("head", folder):
        data = json.loads((folder / CONFIG_FILE).read_text())
        given = {each: data[each.name] for each in fields(HeadCard) if each.name in data}
        if odd := [each.name for each, value in given.items() if not _is_of(each.type, value)]:
            raise ValueError(f"{odd[0]} is {data[odd[0]]!r}")
        card = HeadCard(**{each.name: value for each, value in given.items()})
        weights = _decoded(load_tensors((folder / WEIGHTS_FILE).read_bytes()))
    if card.kind != kind:
        raise UsageError(f"{location} is a head for {card.kind}, not for {kind}.")
    if card.fingerprint != fingerprint(model):
        raise UsageError(
            f"The head in {location} was trained for {card.base_model}, whose weights are not this model's. Train one "
            f"for it: foredraft train {card.kind}."
        )
    return card, weights


@contextmanager
def damaged_unless_read(what: str, folder: Path) -> Iterator[None]:
    """Raise StoreError for what a damaged file makes torch or transformers raise in the block; UsageError for none.

    What foredraft raises itself is passed on; `what` lies in the folder.
    """
    try:
        yield
    except ForedraftError:
        raise
    except FileNotFoundError as error:
        lack = f"{Path(error.filename).name} is missing" if error.filename else told(error)  # safetensors names no file
        raise UsageError(f"{folder} holds no {what}: {lack}.") from error
    except Exception as error:  # there is no list of what readers of files and configurations raise
        raise StoreError(f"The {what} in {folder} is damaged ({told(error)}). Copy or make it again.") from error


def _is_of(kind: Any, value: Any) -> bool:
    return isinstance(value, str) if kind is str else (number := whole_number(value)) is not None and number >= 0


def filled(module: M, weights: Mapping[str, torch.Tensor], location: str | Path) -> M:
    """Load weights into `module`, which keeps its own LM head's where there are none; raises StoreError for others."""
    for name, weight in weights.items():
        if not torch.isfinite(weight).all():
            raise StoreError(f"The head in {location} is damaged: {name} holds NaN or infinity.")
    own = {name: weight for name, weight in module.state_dict().items() if name.startswith(_LM_HEAD) and name != IDS}
    try:
        module.load_state_dict({**own, **weights})
    except RuntimeError as error:
        raise StoreError(f"The head in {location} is damaged: {str(error).splitlines()[-1].strip()}") from error
    return module


def shipped_head(method: str, model: Any) -> Path | None:
    """Return the folder of this checkout's head for a method and exactly this model, or None."""
    cards = sorted(SHIPPED.glob(f"*/{method}/*.json"))
    own = fingerprint(model) if cards else ""
    return next((card.parent for card in cards if json.loads(card.read_text()).get("fingerprint") == own), None)


def trained_head(
    method: str, named: str | None, model: Any, *, option: str = "head", files: tuple[str, ...] = _FILES
) -> Path:
    """Return the folder of the head `named`, or of this checkout's for a method and exactly this model.

    Of a GGUF file it is the file. It is downloaded, `files` of it, if `named` is of the hub. `option` is where the
    user names it. UsageError without a head, or if that fails.
    """
    if not named:
        if (shipped := shipped_head(method, model)) is None:
            raise UsageError(
                f"Method {method!r} needs heads trained for this model; train them with `foredraft train {method}`, "
                f'and give their folder: --speculative-config \'{{"{option}": "FOLDER"}}\'.'
            )
        return shipped
    if file := named_gguf(named):
        return file
    path = user_path(named)
    if path.exists() or named.startswith((".", "/", "~")) or named.count("/") != 1:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(named, allow_patterns=list(files)))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise UsageError(
            f"There is no folder {named}, and no head of that name could be fetched from the hub ({told(error)})."
        ) from error
