"""Trained heads as files and as modules: early exits (EESD), predictors of agreement (Cali-TS), Medusa.

A head is a folder with `head.json`, which says whose it is, and `head.safetensors`. Where the file holds `lm_head.ids`,
the head scores those tokens only (model/ranked.py); where it holds no weight of an LM head, the target's own rows are
used. Knows states, weights and files; not how a head drafts or how it is trained.
"""

import copy
import json
from collections.abc import Iterator, Mapping
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
from foredraft.model.ranked import ranked_head

CONFIG_FILE, WEIGHTS_FILE = "head.json", "head.safetensors"

SHIPPED = Path(__file__).parents[3] / "models"
"""Heads that come with a checkout of the repository, MODEL/METHOD each; they are not in the wheel."""

POSITIONS = 10
"""Levels of a draft that a predictor of agreement tells apart."""
INT8 = "int8"
_LARGEST, _MATRIX, _SCALE = 127.0, 2, ".scale"
_LM_HEAD = "lm_head."
IDS = "lm_head.ids"
"""The tensor of a file that says which tokens a head scores."""
FOLDER = "agreement"
"""Where, in a head's folder, its predictor lies."""
_LEAST = 1e-4  # estimates are kept so far from 0 and 1


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
        dtype: of its weights, "bfloat16" for instance; "int8" rounds matrices by row in the file only.
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


def new_exit_head(model: Any, ids: torch.Tensor | None = None) -> ExitHead:
    """Return a head that begins as the model's last layer, final norm and LM head; nothing is shared with the model.

    Args:
        model: the target.
        ids: int64[N], the tokens that the head scores; None for all.

    Raises:
        UnsupportedModelError: the model's layers are no plain list.
        UsageError: ids that the model does not have.
    """
    parts = model_parts(model)
    layer, norm = (
        copy.deepcopy(each) for each in (model.get_submodule(parts.layers)[-1], model.get_submodule(parts.norm))
    )
    return ExitHead(layer, norm, new_lm_head(model, ids)).requires_grad_(requires_grad=False)


def new_lm_head(model: Any, ids: torch.Tensor | None) -> nn.Module:
    """Return a copy of the model's LM head, or of its rows for the tokens `ids`, int64[N].

    Raises:
        UsageError: ids that the model does not have.
    """
    return copy.deepcopy(model.get_output_embeddings()) if ids is None else ranked_head(model, ids)


def weights_of(head: nn.Module) -> dict[str, torch.Tensor]:
    """Return a head's weights as its file holds them: a frozen LM head is the target's, and only its ids are kept."""
    frozen = {
        name for name, weight in head.named_parameters() if name.startswith(_LM_HEAD) and not weight.requires_grad
    }
    return {name: weight for name, weight in head.state_dict().items() if name not in frozen}


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
    tensors = {name: weight.contiguous() for name, weight in _stored(weights, card.dtype)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / WEIGHTS_FILE, save_tensors(tensors, {"format": "pt"}))
        write_file(folder / CONFIG_FILE, (json.dumps(asdict(card), indent=2) + "\n").encode())
    except OSError as error:
        raise StoreError(f"No head can be written to {folder} ({error.strerror}). Check its free space.") from error


def _stored(weights: Mapping[str, torch.Tensor], dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a file; in eight bits each row of a matrix is whole numbers and a scale; ids stay."""
    for name, weight in weights.items():
        values = weight.detach().cpu()
        if not values.is_floating_point():
            yield name, values
        elif dtype != INT8:
            yield name, values.to(getattr(torch, dtype))
        elif values.dim() < _MATRIX:
            yield name, values.to(torch.bfloat16)
        else:
            scale = (values.float().abs().amax(-1, keepdim=True) / _LARGEST).clamp_min(1e-30)
            yield name, (values.float() / scale).round().to(torch.int8)
            yield name + _SCALE, scale


def _loaded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights that a file's tensors stand for."""
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith(_SCALE)}
    return {
        name: weight.float() * scales[name + _SCALE] if name + _SCALE in scales else weight
        for name, weight in tensors.items()
    }


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
        return card, _loaded(load_tensors((folder / WEIGHTS_FILE).read_bytes()))
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
    head = new_exit_head(model, weights.get(IDS))
    fill(head, weights, location)
    return card, head


def fill(module: nn.Module, weights: Mapping[str, torch.Tensor], location: str | Path) -> None:
    """Put a head's weights into `module`; an LM head of which the file holds no weight stays as it is.

    Raises:
        StoreError: a weight is missing, unknown, of another shape, or not finite.
    """
    bad = [name for name, weight in weights.items() if not torch.isfinite(weight).all()]
    own = {name: weight for name, weight in module.state_dict().items() if name.startswith(_LM_HEAD) and name != IDS}
    try:
        module.load_state_dict({**({} if own.keys() & weights.keys() else own), **weights})
    except RuntimeError as error:
        raise StoreError(f"The head in {location} is damaged: {str(error).splitlines()[-1].strip()}") from error
    if bad:
        raise StoreError(f"The head in {location} is damaged: {bad[0]} holds NaN or infinity.")


def shipped_head(method: str, model: Any) -> Path | None:
    """Return the folder of the head that this checkout holds for a method and exactly this model; None without one."""
    cards = sorted(SHIPPED.glob(f"*/{method}/{CONFIG_FILE}"))
    own = fingerprint(model) if cards else ""
    return next((card.parent for card in cards if json.loads(card.read_text())["fingerprint"] == own), None)


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


class AgreementPredictor(nn.Module):
    """How likely the target is to agree with a drafted token: Cali-TS's theta_M.

    EESD (Liu et al. 2024), equation 5: Sigmoid(W_p (W^i H_T, H_D)), with H_T the target's last hidden state at the
    token that gave the root, H_D the head's at the i-th drafted one, and i at most 10. W_p and W^i are both linear, so
    only their product counts: a vector for each i is kept here, instead of ten matrices. Beside the states, the head's
    own estimate of its token is looked at (ours): apart for greedy texts, where it is the token's probability, and for
    sampled ones, where it is known which noise the target will add.

    Args:
        width: of the hidden states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.target = nn.Linear(width, POSITIONS)
        self.draft = nn.Linear(width, 1, bias=False)
        self.estimate = nn.Linear(3, 1, bias=False)  # its logit when greedy, its logit when sampled, whether sampled
        for weight in (self.target.weight, self.target.bias, self.draft.weight):
            nn.init.zeros_(weight)
        with torch.no_grad():
            self.estimate.weight.copy_(torch.tensor([[1.0, 1.0, 0.0]]))  # begins as the head's own estimate

    def forward(
        self,
        target: torch.Tensor,
        draft: torch.Tensor,
        level: torch.Tensor,
        estimate: torch.Tensor,
        sampled: torch.Tensor,
    ) -> torch.Tensor:
        """Return the logits of agreement, float[R].

        Args:
            target: float[R, D], the target's last hidden states.
            draft: float[R, D], the head's.
            level: int64[R], how deep each token is drafted, 1 for the first.
            estimate: float[R], how likely the head holds its token to be, 0 to 1.
            sampled: float[R], 1 where the target samples and 0 where it is greedy.
        """
        place = level.clamp(1, POSITIONS) - 1
        seen = self.target(target).gather(1, place[:, None])[:, 0] + self.draft(draft)[:, 0]
        own = torch.logit(estimate, eps=_LEAST)
        looked_at = torch.stack([own * (1 - sampled), own * sampled, sampled], dim=-1)
        return seen + self.estimate(looked_at)[:, 0]  # type: ignore[no-any-return]  # a module's output is Any

    @torch.inference_mode()
    def chances(
        self, target: torch.Tensor, draft: torch.Tensor, level: int, estimate: torch.Tensor, *, sampled: bool
    ) -> torch.Tensor:
        """Return theta_M of each row of one level, float[R], for one state of the target's, float[D]."""
        levels = torch.full((len(draft),), level, device=draft.device)
        estimate = estimate.to(draft.device)
        how = torch.full_like(estimate, float(sampled))
        logits = self(target.float().expand(len(draft), -1), draft.float(), levels, estimate, how)
        return torch.sigmoid(logits)


def load_predictor(head: Path, model: Any) -> AgreementPredictor | None:
    """Read the predictor of a head, or return None where it has none.

    Raises:
        UsageError: it was trained for another model.
        StoreError: its files are damaged.
    """
    folder = head / FOLDER
    if not (folder / CONFIG_FILE).is_file():
        return None
    card: HeadCard
    card, weights = read_head(folder, "cali")
    check_card(card, model, folder)
    predictor = AgreementPredictor(card.width)
    fill(predictor, {name: weight.float() for name, weight in weights.items()}, folder)
    return predictor.to(model.get_input_embeddings().weight.device).requires_grad_(requires_grad=False)
