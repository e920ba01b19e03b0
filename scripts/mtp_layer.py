"""Trains an MTP layer for a model that has none, of Qwen 3's kind, and writes it in the `speculators` format.

The layer starts as the model's last one, and learns as EAGLE-3's head does, from traces of `foredraft train traces`:

    python scripts/mtp_layer.py MODEL TRACES OUT --minutes 30
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3Config

import foredraft
from foredraft.model.layers import model_parts
from foredraft.model.mtp import TrainedMtpLayers
from foredraft.model.speculators import TYPE
from foredraft.training.eagle3 import Eagle3Task
from foredraft.training.loop import LoopOptions, train
from foredraft.training.traces import frequent_tokens, open_traces

FIELDS = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
    "rope_parameters", "vocab_size",
)  # fmt: skip
NAMES = {
    "fc.": "input_proj.",
    "norm.": "final_layernorm.",
    "hidden_norm.": "hidden_layernorm.",
    "token_norm.": "token_layernorm.",
}


def new_layer(model: Any, width: int) -> TrainedMtpLayers:
    """Return a layer with `width` numbers within its MLP, which starts as the last one of the model where it fits."""
    given = {name: getattr(model.config, name) for name in FIELDS}
    config, parts = Qwen3Config(num_hidden_layers=1, intermediate_size=width, **given), model_parts(model)
    layers = TrainedMtpLayers(config, model.get_submodule(parts.norm))
    known = model.get_submodule(parts.layers)[-1].state_dict()
    own = layers.layers[0].state_dict()
    with torch.no_grad():
        for name, weight in own.items():
            if name in known and known[name].shape == weight.shape:
                weight.copy_(known[name])
        nn.init.zeros_(layers.fc.weight)[:, -config.hidden_size :].fill_diagonal_(1)  # the state, not the token
    return layers


def save(folder: Path, layers: TrainedMtpLayers, base_model: str, vocabulary: int) -> None:
    """Write the layer in bfloat16."""
    tensors = {}
    for name, weight in layers.state_dict().items():
        theirs = next((new + name.removeprefix(old) for old, new in NAMES.items() if name.startswith(old)), name)
        tensors["mtp_layers.0." + theirs.removeprefix("layers.0.")] = weight.detach().to(torch.bfloat16).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    layer = {**layers.config.to_diff_dict(), "model_type": "qwen3", "vocab_size": vocabulary}
    config = {
        TYPE: "mtp", "architectures": ["MTPDraftModel"], "speculators_version": "0.9.0", "num_nextn_predict_layers": 1,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "mtp", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": base_model, "architectures": []},
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Train and write the layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("traces", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=30, help="of training")
    parser.add_argument("--mlp", type=int, help="numbers within the layer's MLP; those of the model's")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens of which it learns the probabilities")
    parser.add_argument("--rate", type=float, default=1e-3)
    given = parser.parse_args()
    target, traces = foredraft.load(given.model).target, open_traces(given.traces)
    model = target.model
    layers = new_layer(model, given.mlp or int(model.config.intermediate_size))
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    ids = torch.from_numpy(frequent_tokens(traces, given.vocabulary, vocabulary))
    reads = (model_parts(model).count,)
    run = Path(f"{given.out}.run")
    task = Eagle3Task(target, traces, ids, run / "states.npy", layers=layers, reads=reads)
    options = LoopOptions(epochs=20, micro_batch=4, rate=given.rate)
    outcome = train(task, run, traces, options, {}, print, max_minutes=given.minutes)
    save(given.out, task.module, given.model, vocabulary)
    last = outcome.history[-1]
    print(f"{outcome.step} steps, {outcome.minutes:.1f} minutes, {last['agreement']:.1%} held-out agreement")


if __name__ == "__main__":
    main()
