"""Writes tests/data/speculators.json: what the library `speculators` scores with the untrained drafters of the tests.

The tests compare foredraft's scores with it. Needs the library, and the tests' folder on the path:

    PYTHONPATH=src:tests python scripts/speculators_logits.py
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel

from support.families import prompt_of
from support.speculators import (
    CASES,
    DFLASH,
    LENGTH,
    ROOTS,
    WIDTH,
    drafter_files,
    states_of,
    target_of,
)

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


@torch.inference_mode()
def eagle3_scores(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[list[float]]:
    """Return the scores after each root and after the two tokens of the text that follow it."""
    model = loaded(Eagle3SpeculatorConfig, Eagle3DraftModel, config, tensors)
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: found.append(logits[0]))
    ids = torch.from_numpy(prompt_of(LENGTH))[None, 1:]
    model(states_of(3)[None, :-1], ids, torch.zeros_like(ids), ttt_steps=3)
    return [found[step][root - 1].tolist() for root in ROOTS for step in range(3)]


@torch.inference_mode()
def dflash_scores(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[list[float]]:
    """Return the scores of the block after each root."""
    verifier = target_of("llama").model
    whole = {"embed_tokens.weight": verifier.get_input_embeddings().weight, **tensors}
    whole.setdefault("lm_head.weight", verifier.get_output_embeddings().weight)
    model, rows = loaded(DFlashSpeculatorConfig, DFlashDraftModel, config, whole), []
    ids = torch.from_numpy(prompt_of(LENGTH))[None]
    for root in ROOTS:
        chosen = torch.zeros_like(ids)
        chosen[0, root] = 1
        last = torch.zeros(1, LENGTH, WIDTH)
        logits = model._backbone_forward(states_of(3)[None], ids, chosen, last, torch.zeros_like(ids), max_anchors=1)[1]  # noqa: SLF001  # the public method returns no scores
        rows += logits[0, 1:].tolist()
    return rows


def main() -> None:
    """Write the file."""
    scores = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            config, tensors = drafter_files(case, Path(folder) / case)
            found = (dflash_scores if case in DFLASH else eagle3_scores)(config, tensors)
            scores[case] = [[round(value, 5) for value in row] for row in found]
    OUT.write_text(json.dumps(scores) + "\n")


if __name__ == "__main__":
    main()
