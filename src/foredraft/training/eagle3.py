"""The training of EAGLE-3's head: it drafts several tokens ahead from its own states, as it will when it drafts.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (NeurIPS 2025),
section 3.2. Does not depend on the training loop.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, DynamicCache

from foredraft.model.eagle3 import Eagle3Layers
from foredraft.model.heads import RankedHead
from foredraft.model.layers import eagle_layers, model_parts, tapped_states
from foredraft.model.state_heads import layer_arguments
from foredraft.model.target import TorchTarget
from foredraft.training.tasks import States, Task
from foredraft.training.traces import Numbers, Traces

AHEAD = 3  # tokens that are drafted one after another in training; more take longer
_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "max_position_embeddings", "rope_parameters", "hidden_act", "vocab_size",
)  # fmt: skip


def new_layers(model: Any) -> Eagle3Layers:
    """Return the layers of a new head: one layer of Llama's or Qwen 3's kind, from the target's last layer if it fits.

    Its attention begins without the token's embedding, and its state as that of the target's highest tapped layer.
    UnsupportedModelError if the target's layers are not a plain list.
    """
    config, parts = model.config, model_parts(model)
    given = {name: value for name in _FIELDS if (value := getattr(config, name, None)) is not None}
    kind = config.model_type if config.model_type in ("llama", "qwen3") else "llama"
    width, count = int(config.hidden_size), len(eagle_layers(parts.count))
    given.setdefault("intermediate_size", 3 * width)
    layers = Eagle3Layers(AutoConfig.for_model(kind, num_hidden_layers=1, **given), {}, count, count * width)
    (layer,), last = layers.layers, model.get_submodule(parts.layers)[-1]
    known = last.state_dict()
    with torch.no_grad():
        for name, weight in layer.state_dict().items():
            theirs = known.get(name)
            if theirs is not None and theirs.shape[0] == weight.shape[0]:
                weight.zero_()[..., -theirs.shape[-1] :].copy_(theirs)
        if "input_layernorm.weight" in known:
            layer.hidden_norm.weight.copy_(known["input_layernorm.weight"])
        layer.input_layernorm.weight.fill_(1)
        layers.norm.weight.copy_(model.get_submodule(parts.norm).weight)
        nn.init.zeros_(layers.fc.weight)[:, -width:].fill_diagonal_(1)
    return layers


class Eagle3Task(Task):
    """Trains a head's layers, `AHEAD` tokens ahead; the target's LM head scores the tokens `ids`, int64[N], or all.

    It learns from the states that the target returns when it drafts: of compiled passes, if it is compiled. `states` is
    as in `ExitTask`, and raises as there. `layers` are others than `new_layers` makes, which read those of the target
    that `reads` names.
    """

    module: Eagle3Layers

    def __init__(
        self, target: TorchTarget, traces: Traces, ids: torch.Tensor | None = None, states: Path | None = None, *,
        layers: Any = None, reads: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        model = target.model
        self._lm_head = model.get_output_embeddings() if ids is None else RankedHead(model, ids)
        module = new_layers(model) if layers is None else layers
        super().__init__(model.requires_grad_(requires_grad=False), traces, module, self._lm_head, AHEAD)
        self._embeddings = model.get_input_embeddings().weight
        self.module.to(self._device)
        self.reads = reads or eagle_layers(model_parts(model).count)

        def compute(input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
            if target.compiled is not None and target.compiled.returns(self.reads):
                found = [target.prefill(ids.numpy(), target.new_cache(), self.reads) for ids in input_ids]
                return torch.stack([each for each in found if each is not None])
            with tapped_states(model, self.reads) as tapped:
                model.base_model(input_ids=input_ids, **inputs)
            return torch.cat([tapped[number] for number in self.reads], dim=-1)

        wide = len(self.reads) * self._embeddings.shape[1]
        self._states = States(compute, wide, self._device, traces, states)

    def scores(self, windows: Numbers) -> list[torch.Tensor]:
        """Return the logits after every token but the first, and `AHEAD` - 1 times one token further ahead.

        A drafted row sees the text up to where its draft began, and the rows of its own draft.
        """
        layers, known = self.module, self._traces.inputs(windows, self._device)["input_ids"]
        states, tokens = layers.fused(self._states.of(windows)[:, :-1]), known[:, 1:]
        rows, cache, masks, scores = tokens.shape[1], DynamicCache(), [], []
        lowest = torch.finfo(states.dtype).min
        for step in range(AHEAD):
            sees = torch.eye(rows, device=self._device).bool() if step else torch.ones(rows, rows).tril().bool()
            masks.append(torch.zeros(rows, rows, dtype=states.dtype).to(self._device).masked_fill(~sees, lowest))
            ids = nn.functional.pad(tokens[:, step:], (0, step))
            positions = torch.arange(rows, device=self._device)[None] + step
            arguments = layer_arguments(layers, states, positions, torch.cat(masks, dim=-1)[None, None], cache)
            embedded = nn.functional.embedding(ids, self._embeddings).to(states.dtype)
            scored, states = layers(embedded, states, arguments)
            scores.append(self._lm_head(scored[:, : rows - step].to(self._lm_head.weight.dtype)))
        return scores
