"""Writes tests/data/speculators.json: what the library `speculators` scores with the untrained drafters of the tests.

The tests compare foredraft's scores with it. Needs the library, and the tests' folder on the path:

    PYTHONPATH=src:tests python scripts/speculators_logits.py
"""

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dflash2.config import DFlash2SpeculatorConfig
from speculators.models.dflash2.core import DFlash2DraftModel
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3 import core as eagle3
from speculators.models.mtp import MTPSpeculatorConfig
from speculators.models.mtp.core import MTPDraftModel
from speculators.models.peagle import PEagleSpeculatorConfig
from speculators.models.peagle import core as peagle
from torch import nn

from support.families import prompt_of
from support.speculators import (
    CASES,
    LENGTH,
    LEVELS,
    ROOTS,
    SPAN,
    WIDTH,
    drafter_files,
    states_of,
    target_of,
)

LOSS = resolve_loss_config("kl_div", "eager")  # needed to call a model; unused
extend = eagle3.extend_dense_mask_for_draft_tokens
CLASSES = {
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel), "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
    "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel),
}  # fmt: skip
OUT = Path(__file__).parents[1] / "tests" / "data" / "speculators.json"


def loaded(config_class: Any, model_class: Any, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """Return the library's model with these weights; what belongs to the verifier stays untouched."""
    own = config_class(**config)
    own.transformer_layer_config._attn_implementation = "eager"  # noqa: SLF001  # the library reads it there
    model = model_class(own)
    found = model.load_state_dict(tensors, strict=False)
    lacking = [name for name in found.missing_keys if not name.startswith("verifier")]
    if lacking or found.unexpected_keys:
        raise ValueError(f"missing {lacking}, unexpected {found.unexpected_keys}")
    return model.eval()


def leaving_the_window(mask: torch.Tensor, rows: int) -> torch.Tensor:
    """Extend the mask of a level, and hide what leaves its window, as vLLM does; training keeps the root's for all."""
    extended = extend(mask, rows)
    if mask[0, 0, -1, 0] < 0:  # of layers that slide
        level, row = mask.shape[-1] // rows, torch.arange(rows)
        extended[0, 0, :, :rows].masked_fill_(row <= row[:, None] + level - SPAN, -torch.inf)
    return extended


@torch.inference_mode()
def eagle3_scores(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[list[float]]:
    """Return the scores after each root and after the two tokens of the text that follow it."""
    model = loaded(Eagle3SpeculatorConfig, eagle3.Eagle3DraftModel, config, tensors)
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: found.append(logits[0]))
    ids = torch.from_numpy(prompt_of(LENGTH))[None, 1:]
    with patch.object(eagle3, "extend_dense_mask_for_draft_tokens", leaving_the_window):
        model(states_of(3)[None, :-1], ids, torch.zeros_like(ids), ttt_steps=3, loss_config=LOSS)
    return [found[step][root - 1].tolist() for root in ROOTS for step in range(3)]


@torch.inference_mode()
def peagle_scores(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[list[float]]:
    """Return the scores of all levels after each root."""
    model = loaded(PEagleSpeculatorConfig, peagle.PEagleDraftModel, config, tensors)
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: found.append(logits[0]))
    ids, count = torch.from_numpy(prompt_of(LENGTH))[None, 1:], LENGTH - 1
    # rows: the text's, and the placeholders behind each root, which training would choose at random
    behind = [(root - 1, level) for root in ROOTS for level in range(1, LEVELS)]
    anchors, depths = torch.tensor([*((row, 0) for row in range(count)), *behind]).unbind(1)
    with patch.object(peagle, "generate_cod_sample_indices", lambda **_given: (anchors, depths)):
        last = torch.zeros(1, count, WIDTH)
        model(
            states_of(3)[None, :-1], ids, torch.zeros_like(ids), verifier_last_hidden_states=last, num_depths=LEVELS,
            loss_config=LOSS,
        )  # fmt: skip
    (scores,) = found
    rows = [
        [root - 1, *(count + number * (LEVELS - 1) + each for each in range(LEVELS - 1))]
        for number, root in enumerate(ROOTS)
    ]
    return [scores[row].tolist() for each in rows for row in each]


@torch.inference_mode()
def block_scores(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[list[float]]:
    """Return the scores of the block after each root; of DSpark's and DFlash 2's, each after the text's own tokens.

    Those of tokens that DFlash 2 does not choose are -1e9.
    """
    verifier, method = target_of("llama").model, config["speculators_model_type"]
    whole = {"embed_tokens.weight": verifier.get_input_embeddings().weight, **tensors}
    whole.setdefault("lm_head.weight", verifier.get_output_embeddings().weight)
    model, rows = loaded(*CLASSES[method], config, whole), []
    ids = torch.from_numpy(prompt_of(LENGTH))[None]
    for root in ROOTS:
        chosen = torch.zeros_like(ids)
        chosen[0, root] = 1
        last = torch.zeros(1, LENGTH, WIDTH)
        hidden, logits, *_, places = model._backbone_forward(  # noqa: SLF001  # the public method returns no scores
            states_of(3)[None], ids, chosen, last, torch.zeros_like(ids), max_anchors=1
        )
        if method == "dspark":
            logits = logits + model.markov_head.block_bias(prev_token_ids=ids[:, places], hidden_states=hidden)
        if method == "dflash2":
            chosen, found = model.candidate_selector.select(logits, hidden, ids[:, places - 1])
            logits = torch.full_like(logits, -1e9).scatter(-1, chosen, found)
        rows += logits[0, 0 if method == "dspark" else 1 :].tolist()
    return rows


@torch.inference_mode()
def mtp_scores(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[list[float]]:
    """Return the scores after each root, and after the two tokens that follow it, which have the layer's own states.

    The library's own loop, which is for training, lets all rows of a step have states of that step.
    """
    target = target_of("llama").model
    embeddings, lm_head = target.get_input_embeddings().weight, target.get_output_embeddings()
    ends = {"embed_tokens.weight": embeddings, "lm_head.weight": lm_head.weight}
    model = loaded(MTPSpeculatorConfig, MTPDraftModel, config, ends | tensors)
    ids, found = torch.from_numpy(prompt_of(LENGTH))[None], []
    for root in ROOTS:
        states = target.model.norm(states_of(1)[None, :root])
        for _step in range(3):
            count = states.shape[1]
            positions, mask = torch.arange(count)[None], torch.full((count, count), -torch.inf).triu(1)[None, None]
            embedded, turns = (
                nn.functional.embedding(ids[:, 1 : count + 1], embeddings),
                model.rotary_emb(states, positions),
            )
            last = model.mtp_layers[0](states, embedded, mask, positions, position_embeddings=turns)[:, -1:]
            found.append(lm_head(last)[0, 0].tolist())
            states = torch.cat([states, last], dim=1)
    return found


SCORES = {"eagle3": eagle3_scores, "peagle": peagle_scores, **dict.fromkeys(CLASSES, block_scores), "mtp": mtp_scores}


def main() -> None:
    """Write the file."""
    scores = {}
    with tempfile.TemporaryDirectory() as folder:
        for method, cases in CASES.items():
            for case in cases:
                found = SCORES[method](*drafter_files(method, case, Path(folder) / case))
                scores[case] = [[round(value, 5) for value in row] for row in found]
    OUT.write_text(json.dumps(scores) + "\n")


if __name__ == "__main__":
    main()
