"""Compiled models with layers of kinds that others lack: transformers' own texts, drafted, and beside other texts."""

import pytest

from foredraft.drafters.none import NoDrafter
from foredraft.model.joint_passes import joint_passes
from foredraft.model.target import TorchTarget
from support.batches import drafters, in_company, theirs
from support.compilation import GEMMA4, compiled_once, model_of
from support.families import GREEDY, prompt_of, written

NEW_TOKENS = 40
PROMPT = prompt_of(30)
SIZES = {
    "gemma3n_text": {
        "head_dim": 16, "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "num_kv_shared_layers": 1,
        "intermediate_size": [64] * 2, "activation_sparsity_pattern": [0.95, 0.0],
    },
    "gemma4_text": GEMMA4,
    "nemotron_h": {
        "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16,
        "moe_intermediate_size": 32,
    },
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "n_mamba_heads": 4, "mamba_headdim": 32},
}  # fmt: skip
"""Layers that attend to another one's keys, and products over few numbers, or heads of two sizes; layers that keep
nothing, and recurrent ones whose steps are limited in a prompt; and recurrent layers that share one attention."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own calls
@pytest.mark.parametrize("family", SIZES)
def test_a_compiled_model_writes_transformers_own_text_drafted_and_in_company(family, packages):
    model, other = (model_of(family, {"hidden_size": 64, **SIZES[family]}) for _ in range(2))
    own = theirs(TorchTarget(other), PROMPT, NEW_TOKENS)
    target = compiled_once(model, packages)
    for drafter in (NoDrafter(), *drafters(PROMPT, own)):
        assert written(target, PROMPT, GREEDY, drafter, nodes=8, new_tokens=NEW_TOKENS)[0] == own
    assert in_company(target, (PROMPT[:9], PROMPT, PROMPT[5:20]), NEW_TOKENS) == own
    # what a prompt's tokens leave must be what the same tokens leave when they are written
    assert (joint_passes(target, None) is None) is (family in ("nemotron_h", "zamba2"))
